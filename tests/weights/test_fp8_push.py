"""FP8 engines: SGLang's rule of quantizing, and pushes into real servers whose FP8 products are emulated."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from arpo_megatron.config import EngineConfig, ParallelConfig
from arpo_megatron.engine.admin import EngineAdmin, WeightPushError
from arpo_megatron.engine.launch import EngineHandle, launch_engine
from arpo_megatron.engine.server.fp8_on_cpu import dequantized
from arpo_megatron.engine.server.parameters import EngineParameters
from arpo_megatron.engine.wire.boxes import BoxPart, TensorType, WeightMessage
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.trainer.consistency import GAP_LIMITS
from arpo_megatron.weights import reshard
from arpo_megatron.weights.blockwise import BLOCK, FP8, SCALES, block_scales, quantized
from arpo_megatron.weights.control import Control
from arpo_megatron.weights.local import LocalShard
from arpo_megatron.weights.sync import PushSettings, WeightSync, probe_gap
from tests.models.tiny_models import make, megatron_logprobs
from tests.ranks import run_ranks
from tests.weights.pushes import TIMEOUT_S, TOKENS, add_tokenizer, post

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128}
"""Whole blocks for two ranks on either side."""
CASES = {
    "llama": (1, {}),
    "qwen2": (1, {"hidden_size": 512}),
    "qwen3": (1, {}),
    "qwen3moe": (2, {"moe_intermediate_size": 128}),
}
"""By family: `engine.expert` and `parallel.expert`, and sizes. Half an expert is no whole block, so each rank has half
of the experts."""
BUCKET_BYTES = 40_000
"""Less than 256 rows of any matrix, so that matrices are cut between blocks."""
CPU = torch.device("cpu")


def sglang_quantizer() -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """SGLang's `per_block_cast_to_fp8`, without the seconds that importing its module takes."""
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    module = ast.parse((Path(spec.origin).parent / "srt/layers/quantization/fp8_utils.py").read_text())
    names = ("per_block_cast_to_fp8", "ceil_to_ue8m0", "ceil_align")
    taken = [each for each in module.body if isinstance(each, ast.FunctionDef) and each.name in names]
    found: dict[str, Any] = {"torch": torch, "Tuple": tuple, "ceil_align": lambda n, unit: -(-n // unit) * unit}
    exec(compile(ast.Module(taken, []), "fp8_utils.py", "exec"), found)
    return found["per_block_cast_to_fp8"]  # type: ignore[no-any-return]


def test_bytes_and_scales_are_those_of_sglang() -> None:
    torch.manual_seed(1)
    cast = sglang_quantizer()
    for scale in (1e-9, 0.02, 1.0, 3e4):
        weight = (torch.randn(384, 256) * scale).to(torch.bfloat16)
        weight[:128, :128] = 0
        weight[200, 200] = scale * 448 * 4  # a block whose largest value is a power of two times the format's largest
        values, scales = cast(weight)
        assert torch.equal(quantized(weight).view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(block_scales(weight), scales)
        assert torch.equal(quantized(weight.t()).view(torch.uint8), cast(weight.t())[0].view(torch.uint8))
        error = (dequantized(values, scales) - weight.float()).abs()
        assert (error <= weight.float().abs() / 16 + scales.max() * 2**-10).all()


def test_large_weights_are_quantized_in_slabs_with_the_same_result() -> None:
    weight = torch.randn(2**15, 256, dtype=torch.bfloat16)  # two slabs
    halves = weight.split(2**14)
    assert torch.equal(quantized(weight).view(torch.uint8), torch.cat([quantized(x) for x in halves]).view(torch.uint8))
    assert torch.equal(block_scales(weight), torch.cat(list(map(block_scales, halves))))


def test_quantized_weights_take_no_second_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large piece that is copied into a bucket is quantized slab by slab."""
    weight = torch.randn(2**14 + 2**15, 256, dtype=torch.bfloat16)  # three slabs
    box = ((0, len(weight)), (0, 256))
    shard: Any = LocalShard(None, {"w": TensorType((len(weight), 256), "float8_e4m3fn")}, {"w": {box: weight}}, CPU)  # type: ignore[arg-type]
    message = WeightMessage(0, 0, (BoxPart("w", 0, box, weight.numel()),))
    made: list[int] = []

    def view(shard: LocalShard, piece: BoxPart) -> Tensor:
        values = own_view(shard, piece)
        made.append(values.nbytes)
        return values

    monkeypatch.setattr(LocalShard, "view", view)
    flat = torch.empty(message.bytes, dtype=torch.uint8)
    shard.pack(message, flat)
    assert torch.equal(flat.view(weight.shape), quantized(weight).view(torch.uint8))
    assert made == [weight.nbytes // 6] * 3


def test_fp8_weights_are_never_cast() -> None:
    class Loader(torch.nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(128, 128, dtype=dtype), requires_grad=False)

        def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
            for _, tensor in weights:
                self.weight.data.copy_(tensor)

    plan = [BoxPart("w", 0, ((0, 128), (0, 128)), 128 * 128)]
    for held, sent in ((torch.bfloat16, FP8), (FP8, torch.bfloat16), (torch.float8_e5m2, FP8)):
        types = {"w": TensorType((128, 128), str(sent).removeprefix("torch."))}
        with pytest.raises(ValueError, match="the engine holds w in torch"):
            EngineParameters(Loader(held), types, [["w"]]).check_cover(plan)
    types = {"w": TensorType((128, 128), "float8_e4m3fn")}
    EngineParameters(Loader(FP8), types, [["w"]]).check_cover(plan)


@pytest.fixture(scope="module", params=CASES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    """A model's directory, and an engine of two ranks whose layers are FP8."""
    directory = tmp_path_factory.mktemp("fp8") / request.param
    expert, sizes = CASES[request.param]
    make(directory, request.param, **SIZES | sizes)
    add_tokenizer(directory)
    config = EngineConfig(
        *(1, 2, expert), quantization="fp8", max_running_requests=4, max_total_tokens=2048, memory_fraction=0.1
    )
    log = directory.parent / "log"
    with launch_engine(directory, config, dtype="bfloat16", seed=1, log_path=log) as handle:
        assert post(handle.url).status_code == 503, "it has no weights"
        yield directory, handle


def push_and_compare(url: str, directory: Path, layout: ParallelConfig, kind: str) -> None:
    """Push on each rank of a trainer; compare bits, bytes and log-probs."""
    from arpo_megatron.actor import parallel
    from arpo_megatron.actor.model import build_chunks

    parallel.initialize(layout, seed=1)
    spec = ModelSpec.from_hf(directory)
    chunks = build_chunks(spec, layout, torch.bfloat16)
    control = Control(parallel.group("control"))
    settings = PushSettings(kind, BUCKET_BYTES, fp8=True)  # type: ignore[arg-type]  # a literal
    sync = WeightSync(control, EngineAdmin([url], TIMEOUT_S), chunks, spec, settings)
    report = sync.push(1)
    names = {name for entry in reshard.pushed(spec, fp8=True) for name in entry.hf}
    assert set(report.verified) == names, "equal bits of every tensor"
    assert sum(name.endswith(SCALES) for name in names) > 7
    assert sync.transport is not None
    assert sync.transport.largest_buffer <= max(BUCKET_BYTES, BLOCK * spec.hidden)
    if control.rank == 0:
        assert all(rank["received"] == rank["held"] for rank in sync.engines.received())
    if control.ranks == 1:
        with torch.no_grad():
            own = megatron_logprobs(chunks[0], TOKENS).float().numpy()
        (scored,) = sync.engines.start_logprobs(TOKENS.tolist())()
        assert 1e-3 < probe_gap(own, scored) < GAP_LIMITS["fp8 engine"]
    control.gather(None)
    sync.close()
    parallel.destroy()


@pytest.mark.slow_campaign
@pytest.mark.parametrize("kind", ["network", "ipc"])
def test_every_family_is_pushed_in_fp8(served: tuple[Path, EngineHandle], kind: str) -> None:
    directory, engine = served
    expert, _ = CASES[directory.name]
    one, four = ParallelConfig(), ParallelConfig(tensor=2, pipeline=2, sequence=True, expert=expert)
    run_ranks(push_and_compare, engine.url, directory, four, kind, ranks=4)
    run_ranks(push_and_compare, engine.url, directory, one, kind, ranks=1)
    assert post(engine.url).status_code == 200


own_view = LocalShard.view


def doubled_scale(shard: LocalShard, piece: BoxPart) -> Tensor:
    values = own_view(shard, piece)
    return values * 2 if piece.name.endswith("o_proj.weight" + SCALES) else values


def flipped_bit(shard: LocalShard, piece: BoxPart) -> Tensor:
    values = own_view(shard, piece)
    if piece.name.endswith("o_proj.weight"):
        values.view(torch.uint8).view(-1)[0] ^= 1
    return values


def push_wrongly(url: str, directory: Path) -> None:
    """Wrong scales and bytes, and scales left out, are stopped at their push; the next one repairs the engine."""
    from arpo_megatron.actor import parallel
    from arpo_megatron.actor.model import build_chunks

    parallel.initialize(ParallelConfig(), seed=1)
    spec = ModelSpec.from_hf(directory)
    chunks = build_chunks(spec, ParallelConfig(), torch.bfloat16)
    settings = PushSettings("network", BUCKET_BYTES, fp8=True)
    sync = WeightSync(Control(None), EngineAdmin([url], TIMEOUT_S), chunks, spec, settings)
    sync.push(1)  # those that follow are no first pushes
    for wrong in (doubled_scale, flipped_bit):
        LocalShard.view = wrong  # type: ignore[method-assign]
        with pytest.raises(WeightPushError, match="is not what the trainer sent: checksum"):
            sync.push(2)
        LocalShard.view = own_view  # type: ignore[method-assign]
        sync.push(3)
    planned = reshard.plan_rounds

    def without_scales(*args: Any) -> list[Any]:
        rounds = planned(*args)
        return [
            tuple(
                replace(send, parts=tuple(part for part in send.parts if not part.names[0].endswith(SCALES)))
                for send in turn
            )
            for turn in rounds
        ]

    reshard.plan_rounds = without_scales
    sync.close()
    sync = WeightSync(Control(None), EngineAdmin([url], TIMEOUT_S), chunks, spec, settings)
    with pytest.raises(WeightPushError, match=r"does not bring each element of .*_scale_inv"):
        sync.push(4)
    reshard.plan_rounds = planned
    sync.push(5)
    sync.close()
    parallel.destroy()


@pytest.mark.slow_campaign
def test_wrong_scales_and_bytes_are_stopped(served: tuple[Path, EngineHandle]) -> None:
    directory, engine = served
    run_ranks(push_wrongly, engine.url, directory, ranks=1)
    assert post(engine.url).status_code == 200
