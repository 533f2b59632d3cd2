"""Loss and every gradient of a tree minibatch are those of its flattened trajectories, in every parallel layout.

The reference is plain torch in float64 over one trajectory at a time (reference.py); the layouts compute in float32.
"""

import json

import cases
import proof
import pytest
import reference
import torch
from safetensors.torch import save_file
from torchrun import torchrun

from arpo_megatron.actor.model import build_model
from arpo_megatron.config import ParallelConfig
from arpo_megatron.weights.export import hf_tensors

TOLERANCE = 1e-5
FAMILIES = ("tied", "untied", "experts")
LAYOUTS = {
    1: {
        "alone": {},
        "recomputed": {"recompute": "full"},
    },
    2: {
        "tensor": {"tensor": 2},
        "tensor and sequence": {"tensor": 2, "sequence": True},
        "selective recomputation": {"tensor": 2, "sequence": True, "recompute": "selective"},
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
        "experts x pipeline": {"pipeline": 2, "data": 2, "expert": 2},
        "experts x interleaved pipeline": {"pipeline": 2, "virtual_pipeline": 2, "data": 2, "expert": 2},
        "experts x tensor": {"tensor": 2, "data": 2, "expert": 2, "sequence": True},
    },
}
ALL_TERMS = {
    "alone": "tied",
    "recomputed": "experts",
    "tensor and sequence": "experts",
    "data, distributed optimizer": "tied",
    "context": "experts",
    "pipeline": "untied",
    "interleaved pipeline": "experts",
    "experts": "experts",
    "tensor x pipeline": "experts",
    "tensor x context": "untied",
    "experts x interleaved pipeline": "experts",
}
"""The family for which a layout solves that problem too, which takes longer: every term and packing meets every way of
dividing a model, alone and with another."""


def runs_of(name: str, fields: dict) -> list[tuple[str, str]]:
    """Problems and families. Layouts that share out experts are for the model that has some."""
    families = FAMILIES
    if "expert" in fields:
        families = ("experts",)
    elif "tensor" in fields and "sequence" not in fields:
        families = FAMILIES[:2]  # divided experts want sequence parallelism
    more = [("all terms", ALL_TERMS[name])] if name in ALL_TERMS else []
    return [("clip", family) for family in families] + more


def random_weights(shape, directory) -> dict[str, torch.Tensor]:
    """Written as a Hugging Face directory; in float64 by Megatron's names."""
    model = build_model(shape, ParallelConfig(), "float32")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    directory.mkdir()
    weights = {name: tensor.contiguous().clone() for name, tensor in hf_tensors([model], shape)}
    save_file(weights, directory / "model.safetensors")
    return {name: parameter.detach().double() for name, parameter in model.named_parameters()}


def solution(problem: proof.Problem, shape, weights, first) -> dict[str, torch.Tensor]:
    """The loss and the gradients, by Hugging Face names."""
    parameters = {name: value.clone().requires_grad_() for name, value in weights.items()}
    penalties = {
        "kl_coefficient": problem.algorithm.kl_coefficient,
        "entropy_coefficient": problem.algorithm.entropy_coefficient,
    }
    loss = torch.zeros((), dtype=torch.float64)
    for tree, advantages in zip(problem.forest, problem.advantages, strict=True):
        loss = loss + reference.flat_ppo(parameters, tree, advantages, proof.WEIGHT, shape, **proof.CLIP)
        if any(penalties.values()):
            loss = loss + reference.flat_penalties(parameters, first, tree, proof.WEIGHT, shape, **penalties)
    found, total = {"loss": loss.detach()}, loss
    if problem.balance and shape.experts is not None:
        router, _ = reference.flat_balance(parameters, problem.forest, shape)
        found["router loss"] = router.detach() / shape.layers
        total = loss + problem.balance * router
    total.backward()
    exact = build_model(shape, ParallelConfig(), "float64")
    with torch.no_grad():
        for name, parameter in exact.named_parameters():
            parameter.copy_(parameters[name].grad)
    return found | {name: tensor.clone() for name, tensor in hf_tensors([exact], shape)}


@pytest.fixture(scope="module")
def expected(one_rank, tmp_path_factory):
    """A directory with each family's weights, and the float64 solutions by problem and family."""
    root, found = tmp_path_factory.mktemp("exactness"), {}
    for family in FAMILIES:
        shape = cases.SHAPES[family]
        torch.manual_seed(11)
        weights = random_weights(shape, root / family)
        first = random_weights(shape, root / f"{family} first")
        for name, problem in proof.PROBLEMS.items():
            found[name, family] = solution(problem, shape, weights, first)
    return root, found


@pytest.fixture(scope="module", params=sorted(LAYOUTS), ids=lambda ranks: f"{ranks} ranks")
def computed(request, expected):
    """What each layout of that many ranks made of its problems, from one torchrun; of one rank, in this process."""
    root, _ = expected
    ranks, runs = request.param, {name: runs_of(name, fields) for name, fields in LAYOUTS[request.param].items()}
    (root / "cases.json").write_text(json.dumps({n: [LAYOUTS[ranks][n], own] for n, own in runs.items()}))
    if ranks == 1:
        proof.compute(root)
    else:
        torchrun("proof.py", str(root), ranks=ranks, timeout_s=240)
    return {
        (name, *run): torch.load(root / f"{'.'.join((name, *run))}.pt") for name, own in runs.items() for run in own
    }


def errors(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, float]:
    """Of losses and gradients, relative to their largest entry, but at least to a thousandth of any gradient's."""
    assert found.keys() == exact.keys()
    losses = {"loss", "router loss"}
    scale = max(float(value.abs().max()) for name, value in exact.items() if name not in losses)
    return {
        name: float((found[name].double() - value).abs().max())
        / max(float(value.abs().max()), 0.0 if name in losses else 1e-3 * scale)
        for name, value in exact.items()
    }


def test_loss_and_every_gradient_are_those_of_the_flattened_trajectories(expected, computed):
    wrong = [
        (*run, packing, name, error)
        for run, results in computed.items()
        for packing, found in results["gradients"].items()
        for name, error in errors(found, expected[1][run[1:]]).items()
        if not error <= TOLERANCE
    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_the_ratio_is_exactly_one_before_the_first_update_and_only_then(computed):
    ratios = {run: results["ratios"] for run, results in computed.items() if results["ratios"] is not None}
    assert ratios
    for run, (before, after) in ratios.items():
        assert before == [1.0, 0.0], run
        assert after[0] != 1.0 and after[1] > 0, run
