"""Random models, and the shards that trainer ranks and SGLang's ranks hold of them."""

from collections.abc import Iterator, Sequence
from itertools import product

from hypothesis import strategies as st

from arpo_megatron.config import ParallelConfig
from arpo_megatron.engine.wire.boxes import Box, EngineShard
from arpo_megatron.models.known import KNOWN_MODELS
from arpo_megatron.models.mapping import Entry, sizes
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.weights.reshard import TrainerShard, pushed


def random_spec(draw: st.DrawFn, *, fp8: bool = False) -> ModelSpec:
    """A small model of any family, with sizes that the layouts below can divide: in FP8 into whole blocks."""
    name = draw(st.sampled_from(["Qwen/Qwen3-4B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen2.5-7B-Instruct"]))
    kv_heads = draw(st.sampled_from([4, 8]))
    known = KNOWN_MODELS[name]
    experts = known.experts and type(known.experts)(
        **{each: getattr(known.experts, each) for each in known.experts.__slots__} | {"count": 4}
    )
    changed = {
        "layers": draw(st.sampled_from([4, 8])),
        "hidden": draw(st.sampled_from([256, 384] if fp8 else [16, 24])),
        "heads": kv_heads * draw(st.sampled_from([1, 2, 3])),
        "kv_heads": kv_heads,
        "head_dim": 128 if fp8 else draw(st.sampled_from([2, 4])),
        "ffn": draw(st.sampled_from([1024, 2048] if fp8 else [16, 40])),
        "vocabulary": draw(st.sampled_from([64, 136])),
        "tied": draw(st.booleans()),
        "experts": experts,
    }
    return ModelSpec(**{each: getattr(known, each) for each in known.__slots__} | changed)


def trainer_shards(draw: st.DrawFn, spec: ModelSpec, *, fp8: bool = False) -> list[TrainerShard]:
    """All ranks of a random layout; see `trainer_ranks`."""
    tensor, data, pipeline, virtual = (draw(st.sampled_from(each)) for each in ([1, 2, 4], [1, 2], [1, 2], [1, 2]))
    virtual = virtual if pipeline > 1 else 1
    expert = draw(st.sampled_from([each for each in (1, 2, 4) if (tensor * data) % each == 0])) if spec.experts else 1
    layout = ParallelConfig(tensor=tensor, data=data, pipeline=pipeline, virtual_pipeline=virtual, expert=expert)
    return trainer_ranks(spec, pushed(spec, fp8=fp8), layout, gpus_per_node=4)


def trainer_ranks(
    spec: ModelSpec, table: Sequence[Entry], layout: ParallelConfig, gpus_per_node: int
) -> list[TrainerShard]:
    """All ranks in Megatron's order: tensor, then data, then pipeline; experts over tensor x data.

    Args:
        spec: the model.
        table: result of `pushed`.
        layout: of the trainer, without context parallelism.
        gpus_per_node: number of ranks on a host.
    """
    tensor, pipeline, expert = layout.tensor, layout.pipeline, layout.expert
    chunk = spec.layers // (pipeline * layout.virtual_pipeline)
    count = 0 if spec.experts is None else spec.experts.count // expert

    def held(stage: int, place: int) -> Iterator[int]:
        for index, entry in enumerate(table):
            if entry.layer is None:
                first = entry.megatron[0].startswith("embedding")
                mine = stage == (0 if first else pipeline - 1)
            else:
                mine = entry.layer // chunk % pipeline == stage
            if mine and (entry.expert is None or entry.expert // count == place):
                yield index

    indices = {each: tuple(held(*each)) for each in product(range(pipeline), range(expert))}
    shards = []
    for rank in range(layout.world_size):
        stage, inner = divmod(rank, tensor * layout.data)
        place = inner // layout.expert_tensor % expert
        rows = (rank % tensor, tensor), (rank % layout.expert_tensor, layout.expert_tensor)
        shards.append(TrainerShard(f"gpu{rank}", f"node{rank // gpus_per_node}", *rows, indices[stage, place]))
    return shards


def engine_shards(draw: st.DrawFn, spec: ModelSpec, *, fp8: bool = False) -> list[EngineShard]:
    """The ranks of engines of a random layout; see `engine_boxes`."""
    tensor, replicas = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 2]))
    if spec.heads % tensor:
        tensor = 1
    whole_experts = spec.experts is not None and tensor <= spec.experts.count and draw(st.booleans())
    near = draw(st.booleans())
    table = pushed(spec, fp8=fp8)
    boxes = [engine_boxes(spec, table, rank, tensor, whole_experts=whole_experts) for rank in range(tensor)]
    return [
        EngineShard("gpu0" if near else f"other{number}", "node0" if near else "far", boxes[number % tensor])
        for number in range(replicas * tensor)
    ]


def engine_boxes(
    spec: ModelSpec, table: Sequence[Entry], rank: int, ranks: int, *, whole_experts: bool = False
) -> dict[str, list[Box]]:
    """The boxes of one rank of an engine, as SGLang divides a model.

    The vocabulary is padded to a multiple of 64, MLP widths to one of the ranks; key and value heads are copied if
    there are more ranks than heads; with expert parallelism a rank has whole experts.
    """
    boxes: dict[str, list[Box]] = {}
    for entry in table:
        whole = entry.expert is not None and whole_experts
        for name, shape in entry.hf.items():
            box = _expert_box(spec, shape, rank, ranks, entry.expert or 0) if whole else None
            if not whole:
                box = _engine_box(spec, name, shape, rank, ranks)
            if box is not None:
                boxes[name] = [box]
    return boxes


def _expert_box(spec: ModelSpec, shape: tuple[int, ...], rank: int, ranks: int, expert: int) -> Box | None:
    share = -(-sizes(spec)["experts"] // ranks)
    return tuple((0, n) for n in shape) if expert // share == rank else None


def _engine_box(spec: ModelSpec, name: str, shape: tuple[int, ...], rank: int, ranks: int) -> Box | None:
    whole = tuple((0, n) for n in shape)
    if "norm" in name or name.endswith("mlp.gate.weight"):
        return whole
    if any(part in name for part in ("k_proj", "v_proj")):
        rows = shape[0] // spec.kv_heads
        held, first = max(1, spec.kv_heads // ranks) * rows, rank * spec.kv_heads // ranks * rows
        return ((first, first + held), *whole[1:])
    dim = 1 if any(part in name for part in ("o_proj.weight", "down_proj.weight")) else 0  # also of their scales
    padded = -(-shape[dim] // 64) * 64 if "embed" in name or "lm_head" in name else shape[dim]
    step = -(-padded // ranks)
    first, last = min(shape[dim], rank * step), min(shape[dim], (rank + 1) * step)
    if first == last:
        return None
    return tuple((first, last) if index == dim else each for index, each in enumerate(whole))
