"""Loss and every gradient of a tree minibatch are those of its flattened trajectories, in every parallel layout.

The reference is plain torch in float64 over one trajectory at a time (reference.py); the layouts compute in float32.
"""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import cases
import pytest
import reference
import torch
from safetensors.torch import save_file

from arpo_megatron.actor.model import build_model
from arpo_megatron.config import ParallelConfig
from arpo_megatron.weights.export import hf_tensors

HERE = Path(__file__).parent
TOLERANCE = 1e-5
FAMILIES = ("tied", "untied", "experts")
LAYOUTS = {
    2: {
        "tensor": {"tensor": 2},
        "tensor and sequence": {"tensor": 2, "sequence": True},
        "selective recomputation": {"tensor": 2, "sequence": True, "recompute": "selective"},
        "full recomputation": {"tensor": 2, "sequence": True, "recompute": "full"},
        "data": {"data": 2},
        "context": {"context": 2},
        "context, recomputed": {"context": 2, "recompute": "full"},
        "pipeline": {"pipeline": 2},
        "pipeline, recomputed": {"pipeline": 2, "recompute": "full"},
        "interleaved pipeline": {"pipeline": 2, "virtual_pipeline": 2},
        "experts": {"data": 2, "expert": 2},
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


def families_of(fields: dict) -> tuple[str, ...]:
    """Layouts that share out experts are for the model that has some; a divided one wants sequence parallelism."""
    if "expert" in fields:
        return ("experts",)
    return FAMILIES if "tensor" not in fields or "sequence" in fields else FAMILIES[:2]


def by_hf_name(model, shape, values) -> dict[str, torch.Tensor]:
    """Values of the model's parameters under Hugging Face names."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
    return {name: tensor.clone() for name, tensor in hf_tensors([model], shape)}


@pytest.fixture(scope="module")
def expected(one_rank, tmp_path_factory):
    """A directory with each family's weights, and the float64 reference of loss and gradients."""
    import proof

    root, found = tmp_path_factory.mktemp("exactness"), {}
    forest, advantages, _ = cases.proof_forest(proof.MINIBATCH)
    clip = {name: getattr(proof.CLIP, name) for name in ("clip_low", "clip_high", "dual_clip")}
    for family in FAMILIES:
        shape = cases.SHAPES[family]
        torch.manual_seed(11)
        model = build_model(shape, ParallelConfig(), "float32")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        weights = {name: tensor.contiguous().clone() for name, tensor in hf_tensors([model], shape)}
        (root / family).mkdir()
        save_file(weights, root / family / "model.safetensors")
        parameters = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}
        loss = sum(
            reference.flat_ppo(parameters, tree, own, 2.0**-7, shape, **clip)
            for tree, own in zip(forest, advantages, strict=True)
        )
        loss.backward()
        exact = build_model(shape, ParallelConfig(), "float64")
        gradients = by_hf_name(exact, shape, {name: p.grad for name, p in parameters.items()})
        found[family] = {**gradients, "loss": loss.detach()}
    return root, found


@pytest.fixture(scope="module", params=sorted(LAYOUTS), ids=lambda ranks: f"{ranks} ranks")
def computed(request, expected):
    """What each layout of that many ranks computed, from one torchrun."""
    root, _ = expected
    ranks = request.param
    (root / "cases.json").write_text(
        json.dumps({n: [families_of(fields), fields] for n, fields in LAYOUTS[ranks].items()})
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    process = subprocess.Popen(
        [*command, str(HERE / "proof.py"), str(root)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1]), "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output[-4000:]
    return {
        name: {family: torch.load(root / f"{name}.{family}.pt") for family in families_of(fields)}
        for name, fields in LAYOUTS[ranks].items()
    }


def test_loss_and_every_gradient_are_those_of_the_flattened_trajectories(expected, computed):
    _, exact = expected
    wrong = []
    for layout, families in computed.items():
        for family, packings in families.items():
            scale = max(float(g.abs().max()) for name, g in exact[family].items() if name != "loss")
            for packing, found in packings.items():
                assert found.keys() == exact[family].keys()
                for name, value in exact[family].items():
                    error = float((found[name].double() - value).abs().max())
                    size = abs(float(value)) if name == "loss" else max(float(value.abs().max()), 1e-3 * scale)
                    if not error <= TOLERANCE * size:
                        wrong.append((layout, family, packing, name, error / size))
    assert not wrong, "\n".join(map(str, wrong))
