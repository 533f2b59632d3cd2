"""Loss and every gradient of a tree batch are those of its flattened trajectories, in every parallel layout.

The reference is plain torch in float64 over one trajectory at a time (reference.py); the layouts compute in float32.
"""

from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from arpo_megatron.actor.model import build_model
from arpo_megatron.config import ParallelConfig
from arpo_megatron.weights.export import hf_tensors
from tests.actor import cases, proof, reference
from tests.ranks import run_ranks

# All layouts of a number of ranks are one start of processes: minutes where other work has the cores too.
pytestmark = pytest.mark.timeout(1000)
TOLERANCE = 1e-5
FAMILIES = ("tied", "untied", "experts")
CORE_ATTENTION = {"recompute": "selective", "recompute_modules": ("core_attn",)}
LAYOUTS = {
    1: {
        "alone": {},
        "recomputed": {"recompute": "full"},
        "recomputed modules": {"recompute": "selective", "recompute_modules": ("mlp", "core_attn")},
        "recomputed layers": {"recompute": "full", "recompute_layers": 1},
    },
    2: {
        "tensor": {"tensor": 2},
        "tensor and sequence": {"tensor": 2, "sequence": True},
        "selective recomputation": {"tensor": 2, "sequence": True, **CORE_ATTENTION},
        "full recomputation": {"tensor": 2, "sequence": True, "recompute": "full"},
        "data": {"data": 2},
        "data, distributed optimizer": {"data": 2, "distributed_optimizer": True},
        "context": {"context": 2},
        "context, recomputed": {"context": 2, "recompute": "full"},
        "pipeline": {"pipeline": 2},
        "pipeline, recomputed": {"pipeline": 2, "recompute": "full"},
        "interleaved pipeline": {"pipeline": 2, "virtual_pipeline": 2},
        "experts": {"data": 2, "expert": 2},
        "experts, distributed optimizer": {"data": 2, "expert": 2, "distributed_optimizer": True},
        "experts over tensor ranks": {"tensor": 2, "expert": 2, "sequence": True},
        "experts over context ranks, recomputed": {"context": 2, "expert": 2, "recompute": "full"},
    },
    4: {
        "tensor x pipeline": {"tensor": 2, "pipeline": 2, "sequence": True},
        "tensor x context": {"tensor": 2, "context": 2, "sequence": True},
        "pipeline x data": {"pipeline": 2, "data": 2},
        "context x data": {"context": 2, "data": 2},
        "pipeline x context": {"pipeline": 2, "context": 2},
        "interleaved pipeline of four": {"pipeline": 4, "virtual_pipeline": 2},
        "experts x pipeline": {"pipeline": 2, "data": 2, "expert": 2},
        "experts x interleaved pipeline": {"pipeline": 2, "virtual_pipeline": 2, "data": 2, "expert": 2},
        "experts x tensor": {"tensor": 2, "data": 2, "expert": 2, "sequence": True},
        "experts x data, a rank without trees": {"data": 4, "expert": 2},
    },
}
REPRESENTATIVES = {
    "alone": [("all terms", "tied"), ("weighted", "untied"), ("adamw", "experts")],
    "recomputed": [("all terms", "experts")],
    "tensor": [("clip", "tied")],
    "data, distributed optimizer": [("adamw", "tied")],
    "context": [("sequence", "tied")],
    "interleaved pipeline": [("all terms", "experts")],
    "experts over context ranks, recomputed": [("replayed", "experts")],
    "tensor x pipeline": [("adamw", "untied")],
    "experts x tensor": [("clip", "experts")],
}
"""Problems and families of the short run: each way to divide a model, products of them, each loss and packing."""
MORE = {
    "all terms": {
        "tensor and sequence": "experts",
        "selective recomputation": "experts",
        "data, distributed optimizer": "tied",
        "context": "experts",
        "pipeline": "untied",
        "experts": "experts",
        "tensor x pipeline": "experts",
        "tensor x context": "untied",
        "experts x interleaved pipeline": "experts",
    },
    "sequence": {
        "alone": "tied",
        "data": "untied",
        "pipeline": "tied",
        "experts": "experts",
        "tensor x pipeline": "untied",
    },
    "weighted": {"pipeline": "untied", "data, distributed optimizer": "experts", "tensor x context": "tied"},
    "replayed": {
        "pipeline": "experts",
        "experts": "experts",
        "experts, distributed optimizer": "experts",
        "experts over tensor ranks": "experts",
    },
    "adamw": {"experts": "experts", "experts x tensor": "experts"},
}
"""Families by problem and layout that the full run adds to `clip` for every family and to `REPRESENTATIVES`."""
TRAINED_TOLERANCE = 5e-5
"""Relative error of the change of weights in four updates, and of the gradient norms on the way."""


def runs_of(name: str, *, full: bool) -> list[tuple[str, str]]:
    """Return the problems and families of a layout."""
    short = REPRESENTATIVES.get(name, [])
    if not full:
        return short
    fields = next(layouts[name] for layouts in LAYOUTS.values() if name in layouts)
    families = FAMILIES
    if fields.get("pipeline") == 4:
        families = ("deep",)
    elif "expert" in fields:
        families = ("experts",)
    elif "tensor" in fields and "sequence" not in fields:
        families = FAMILIES[:2]  # divided experts need sequence parallelism
    more = [(problem, chosen[name]) for problem, chosen in MORE.items() if name in chosen]
    return list(dict.fromkeys([*short, *(("clip", family) for family in families), *more]))


def random_weights(spec, directory) -> dict[str, torch.Tensor]:
    """Write random weights as a Hugging Face directory; return them in float64 by Megatron's names."""
    model = build_model(spec, ParallelConfig(), "float32")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    directory.mkdir()
    weights = {name: tensor.contiguous().clone() for name, tensor in hf_tensors([model], spec)}
    save_file(weights, directory / "model.safetensors")
    return {name: parameter.detach().double() for name, parameter in model.named_parameters()}


def solution(problem: proof.Problem, spec, weights, first) -> dict[str, torch.Tensor]:
    """Return the loss and the gradients by Hugging Face name."""
    parameters = {name: value.clone().requires_grad_() for name, value in weights.items()}
    penalties = {
        "kl_coefficient": problem.algorithm.kl_coefficient,
        "entropy_coefficient": problem.algorithm.entropy_coefficient,
    }
    loss = stale_loss(problem, parameters, first, spec) if problem.stale else torch.zeros((), dtype=torch.float64)
    pairs = [] if problem.stale else zip(problem.forest, problem.advantages, strict=True)
    for index, (tree, advantages) in enumerate(pairs):
        routes = None if problem.routes is None else problem.routes[index]
        loss = loss + reference.flat_ppo(parameters, tree, advantages, proof.WEIGHT, spec, **proof.CLIP, routes=routes)
        if any(penalties.values()):
            loss = loss + reference.flat_penalties(parameters, first, tree, proof.WEIGHT, spec, **penalties)
    found, total = {"loss": loss.detach()}, loss
    if problem.balance and spec.experts is not None:
        router, _ = reference.flat_balance(parameters, problem.forest, spec)
        found["router loss"] = router.detach() / spec.layers
        total = loss + problem.balance * router
    total.backward()
    found["gradient norm"] = torch.stack([parameter.grad.norm() for parameter in parameters.values()]).norm()
    return found | by_hf_names({name: parameter.grad for name, parameter in parameters.items()}, spec)


def by_hf_names(values: dict[str, torch.Tensor], spec) -> dict[str, torch.Tensor]:
    exact = build_model(spec, ParallelConfig(), "float64")
    with torch.no_grad():
        for name, parameter in exact.named_parameters():
            parameter.copy_(values[name])
    return {name: tensor.clone() for name, tensor in hf_tensors([exact], spec)}


def stale_loss(problem: proof.Problem, parameters, first, spec) -> torch.Tensor:
    bounds = {name: getattr(problem.algorithm, name) for name in ("clip_low", "clip_high", "dual_clip")}
    loss, weights = reference.flat_off_policy(
        parameters,
        first,
        problem.forest,
        problem.advantages,
        spec,
        ratio="sequence" if problem.algorithm.loss == "gspo" else "token",
        correction=problem.algorithm.sampling_correction,
        limit=proof.WEIGHT_LIMIT,
        **bounds,
    )
    assert weights.min() < 0.75 * proof.WEIGHT_LIMIT and (weights == proof.WEIGHT_LIMIT).sum() > 1
    return loss


def trained(weights: dict[str, torch.Tensor], spec) -> tuple[dict[str, torch.Tensor], list[tuple[float, float]]]:
    """Train with torch's AdamW in float64 on flattened trajectories.

    Returns:
        The change of weights by Hugging Face name, and the gradient norm and learning rate of each update.
    """
    parameters = {name: torch.nn.Parameter(value.clone()) for name, value in weights.items()}
    config, rows = proof.ADAMW, []
    matrices = [p for p in parameters.values() if p.dim() > 1]
    vectors = [p for p in parameters.values() if p.dim() == 1]
    adamw = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        weight_decay=config.weight_decay,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )
    for update in range(proof.TAKEN):
        forest, _ = cases.batch(update)
        adamw.zero_grad()
        for index, tree in enumerate(forest):
            advantages = cases.dyadic_advantages(tree, update + index)
            reference.flat_ppo(parameters, tree, advantages, proof.WEIGHT, spec, **proof.CLIP).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(parameters.values(), config.clip_grad))
        warmup = round(config.warmup_fraction * proof.UPDATES)
        rate = reference.learning_rate(
            config.schedule, update + 1, updates=proof.UPDATES, warmup=warmup, peak=config.lr, last=config.min_lr_ratio
        )
        for group in adamw.param_groups:
            group["lr"] = rate
        adamw.step()
        rows.append((norm, rate))
    changes = {name: parameter.detach() - weights[name] for name, parameter in parameters.items()}
    return by_hf_names(changes, spec), rows


class Solutions:
    """Weights of each family in a directory, and the float64 solutions, computed when a layout needs them."""

    def __init__(self, root: Path) -> None:
        self.root, self.weights, self.first = root, {}, {}
        for family in (*FAMILIES, "deep"):
            torch.manual_seed(11)
            self.weights[family] = random_weights(cases.SPECS[family], root / family)
            self.first[family] = random_weights(cases.SPECS[family], root / f"{family} first")
        self.gradients = cache(self._gradients)
        self.trained = cache(self._trained)

    def _gradients(self, problem: str, family: str) -> dict[str, torch.Tensor]:
        return solution(proof.PROBLEMS[problem], cases.SPECS[family], self.weights[family], self.first[family])

    def _trained(self, family: str):
        return trained(self.weights[family], cases.SPECS[family])


@pytest.fixture(scope="module")
def solutions(one_rank, tmp_path_factory) -> Solutions:
    return Solutions(tmp_path_factory.mktemp("exactness"))


SHORT = [pytest.param((ranks, False), id=f"{ranks} ranks") for ranks in LAYOUTS]
FULL = [pytest.param((ranks, True), id=f"{ranks} ranks, all", marks=pytest.mark.slow_campaign) for ranks in LAYOUTS]


@pytest.fixture(scope="module", params=SHORT + FULL)
def computed(request, solutions):
    """Return the results of each layout of that many ranks, by layout, problem and family; one rank is this process."""
    ranks, full = request.param
    layouts = LAYOUTS[ranks]
    runs = {name: own for name in layouts if (own := runs_of(name, full=full))}
    if ranks == 1:
        proof.compute(solutions.root, layouts, runs)
    else:
        run_ranks(proof.compute_and_leave, solutions.root, layouts, runs, ranks=ranks, timeout_s=900)
    return {
        (name, *run): torch.load(solutions.root / f"{'.'.join((name, *run))}.pt")
        for name, own in runs.items()
        for run in own
    }


def errors(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative errors of losses, norm and gradients; a gradient's scale is at least a thousandth of the largest one."""
    assert found.keys() == exact.keys()
    numbers = {"loss", "router loss", "gradient norm"}
    scale = max(float(value.abs().max()) for name, value in exact.items() if name not in numbers)
    return {
        name: float((found[name].double() - value).abs().max())
        / max(float(value.abs().max()), 0.0 if name in numbers else 1e-3 * scale)
        for name, value in exact.items()
    }


def test_loss_and_every_gradient_are_those_of_the_flattened_trajectories(solutions, computed):
    wrong = [
        (*run, packing, name, error)
        for run, results in computed.items()
        for packing, found in results.get("gradients", {}).items()
        for name, error in errors(found, solutions.gradients(*run[1:])).items()
        if not error <= TOLERANCE
    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_ratio_is_exactly_one_before_the_first_update_only(computed):
    for run, results in computed.items():
        if results.get("ratios") is not None:
            before, after = results["ratios"]
            assert before == [1.0, 0.0], run
            assert after[0] != 1.0 and after[1] > 0, run


def test_updates_are_those_of_adamw_on_the_flattened_trajectories(solutions, computed):
    for (layout, problem, family), results in computed.items():
        if problem != "adamw":
            continue
        changes, rows = solutions.trained(family)
        assert all(norm > proof.ADAMW.clip_grad for norm, _ in rows)  # every update is clipped
        assert results["rows"] == [pytest.approx(row, rel=TRAINED_TOLERANCE) for row in rows], layout
        start = by_hf_names(solutions.weights[family], cases.SPECS[family])
        for name, change in changes.items():
            found = results["weights"][name].double() - start[name]
            error = float((found - change).norm() / change.norm())
            assert error <= TRAINED_TOLERANCE, (layout, name, error)
