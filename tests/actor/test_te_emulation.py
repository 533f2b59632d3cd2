"""Transformer Engine's own layers on a CPU agree with Megatron's in every layout, and checkpoints keep their state.

The reference is Megatron's layers in float32 on one rank (test_exactness.py proves them). A bound is about twice the
largest deviation; docs/guides/gpu.md has the quantiles.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from arpo_megatron.errors import UserError
from arpo_megatron.hardware import transformer_engine
from arpo_megatron.hardware.te_emulation.patches import PATCHES
from tests.ranks import emulated_ranks

pytestmark = pytest.mark.timeout(1000)
LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "full recomputation": {"recompute": "full"},
    "recomputed modules": {"recompute": "selective", "recompute_modules": ("layernorm", "mlp", "moe_act")},
    "experts, recomputed modules": {"recompute": "selective", "recompute_modules": ("layernorm", "moe_act")},
    "recomputed layers": {"recompute": "full", "recompute_layers": 1},
    "tensor and sequence": {"tensor": 2, "sequence": True},
    "pipeline": {"pipeline": 2},
    "context": {"context": 2},
    "data, distributed optimizer": {"data": 2, "distributed_optimizer": True},
    "experts": {"data": 2, "expert": 2},
    "experts over tensor ranks": {"tensor": 2, "expert": 2, "sequence": True},
    "experts x tensor": {"tensor": 2, "data": 2, "expert": 2, "sequence": True, "distributed_optimizer": True},
}
BOUNDS = {"bfloat16": (0.02, 0.03), "blockwise": (0.2, 0.35), "current": (0.2, 0.35)}
"""Largest log-prob gap in nats, and largest relative error of a tensor's gradient, by number format."""
RUNS = [(layout, form, "experts" if layout.startswith("experts") else "dense") for layout in LAYOUTS for form in BOUNDS]
REFERENCES = [("alone", "plain", "dense"), ("alone", "plain", "experts")]
Ranks = Callable[..., None]


@pytest.fixture(scope="module")
def run() -> Iterator[Ranks]:
    with emulated_ranks() as start:
        yield start


@pytest.fixture(scope="module")
def root(run: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the weights and what the reference computes from them."""
    path = tmp_path_factory.mktemp("emulated")
    compute(run, path, REFERENCES)
    return path


def compute(run: Ranks, root: Path, runs: list[tuple[str, str, str]]) -> None:
    fields = LAYOUTS[runs[0][0]]
    ranks = fields.get("tensor", 1) * fields.get("pipeline", 1) * fields.get("context", 1) * fields.get("data", 1)
    run("compute", root, LAYOUTS, runs, ranks=ranks)


def check(root: Path, layout: str, form: str, family: str) -> dict[str, torch.Tensor]:
    """Compare a run with the reference; return its log-prob gaps and gradient errors."""
    exact = torch.load(root / f"alone plain {family}.pt", weights_only=False)
    found = torch.load(root / f"{layout} {form} {family}.pt", weights_only=False)
    assert "TELayerNormColumnParallelLinear" in found["layers"] or family == "experts"
    assert "TERowParallelLinear" in found["layers"]
    assert found["exported"].keys() == exact["exported"].keys()
    assert all(torch.equal(value.float(), exact["exported"][name]) for name, value in found["exported"].items())
    gaps = (found["logprobs"] - exact["logprobs"]).abs()
    errors = {
        name: (value.float() - exact["gradients"][name]).norm() / exact["gradients"][name].norm()
        for name, value in found["gradients"].items()
        if name != "loss"
    }
    loss, exact_loss = (float(each["gradients"]["loss"]) for each in (found, exact))
    assert loss == pytest.approx(exact_loss, rel=1e-5)  # all ratios are 1: it has the advantages only
    logprob_bound, gradient_bound = BOUNDS[form]
    assert gaps.max() <= logprob_bound
    assert max(errors.values()) <= gradient_bound, max(errors, key=lambda name: errors[name])
    assert found["ratio"] == 1.0
    continued, resumed = found["next"]
    assert continued.pop("gradient norm") == resumed.pop("gradient norm")
    assert all(torch.equal(value, resumed[name]) for name, value in continued.items())
    return {"log-prob gap": gaps, "gradient error": torch.stack(list(errors.values()))}


def test_layers_agree_with_megatrons_on_one_rank(run: Ranks, root: Path) -> None:
    own = [("alone", "blockwise", "dense"), ("alone", "current", "experts")]
    compute(run, root, own)
    for case in own:
        check(root, *case)


def test_layers_agree_with_megatrons_on_two_ranks(run: Ranks, root: Path) -> None:
    own = [("tensor and sequence", "blockwise", "dense"), ("data, distributed optimizer", "bfloat16", "dense")]
    compute(run, root, own)
    for case in own:
        check(root, *case)


def test_groups_of_several_packs_keep_all_gradients_in_a_pipeline(run: Ranks, root: Path) -> None:
    """TE overwrites `main_grad` in the pass of a first micro-batch, which Megatron's schedules mark by themselves."""
    own = [("pipeline", "blockwise", "dense")]
    compute(run, root, own)
    check(root, *own[0])


EXPERTS: dict[str, Any] = {"data": 2, "expert": 2}
RECOMPUTED: dict[str, Any] = {"data": 2, "recompute": "selective", "recompute_modules": ("layernorm", "moe_act")}
OVERLAPS = {
    "few": [
        (EXPERTS, "bfloat16"),
        (RECOMPUTED, "blockwise"),  # a rank without packs has another order
        ({"data": 2, "distributed_optimizer": True}, "blockwise"),  # the next forward pass waits for gathered weights
    ],
    "others": [(EXPERTS, "blockwise"), (RECOMPUTED, "bfloat16")],
}


@pytest.mark.parametrize("pairs", ["few", pytest.param("others", marks=pytest.mark.slow_campaign)])
def test_overlap_changes_no_update_of_grouped_experts(run: Ranks, pairs: str) -> None:
    run("overlapped", OVERLAPS[pairs], ranks=2)


def test_mixtures_agree_with_themselves_when_additions_come_in_any_order(run: Ranks, tmp_path: Path) -> None:
    """Unfused, the experts of a token are added by atomics on a GPU."""
    run("add_in_any_order", tmp_path, ranks=1)
    ratios = torch.load(tmp_path / "ratios")
    assert ratios[True] == 1.0
    assert ratios[False] != 1.0


def test_products_refuse_what_a_gpu_refuses(run: Ranks) -> None:
    run("refuse", ranks=1)


def test_patches_have_a_reason_and_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = [patch.target for patch in PATCHES]
    assert len(set(targets)) == len(targets)
    assert all(patch.reason for patch in PATCHES)
    monkeypatch.setattr(transformer_engine, "CHECKED_TRANSFORMER_ENGINE", "2.10.0")
    with pytest.raises(
        UserError, match=r"of transformer-engine 2\.10\.0, but transformer-engine 2\.11\.0 is installed"
    ):
        transformer_engine.check_emulation()


@pytest.mark.slow_campaign
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_agree_with_megatrons_in_all_layouts(run: Ranks, root: Path, layout: str) -> None:
    own = [case for case in RUNS if case[0] == layout]
    compute(run, root, own)
    for case in own:
        for name, values in check(root, *case).items():
            shares = [round(values.quantile(share).item(), 5) for share in (0.5, 0.9, 1.0)]
            print(f"{case}: {name}, quantiles 0.5, 0.9, 1: {shares}")
