"""Random models, and the shards that trainer ranks and SGLang's ranks hold of them."""

from hypothesis import strategies as st

from arpo_megatron.engine.wire.boxes import Box, EngineShard
from arpo_megatron.models.known import KNOWN_MODELS
from arpo_megatron.models.mapping import sizes
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.weights.reshard import TrainerShard, pushed


def random_spec(draw: st.DrawFn) -> ModelSpec:
    """A small model of any family, with sizes that the layouts below can divide."""
    name = draw(st.sampled_from(["Qwen/Qwen3-4B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen2.5-7B-Instruct"]))
    kv_heads = draw(st.sampled_from([4, 8]))
    known = KNOWN_MODELS[name]
    experts = known.experts and type(known.experts)(
        **{each: getattr(known.experts, each) for each in known.experts.__slots__} | {"count": 4}
    )
    changed = {
        "layers": draw(st.sampled_from([4, 8])),
        "hidden": draw(st.sampled_from([16, 24])),
        "heads": kv_heads * draw(st.sampled_from([1, 2, 3])),
        "kv_heads": kv_heads,
        "head_dim": draw(st.sampled_from([2, 4])),
        "ffn": draw(st.sampled_from([16, 40])),
        "vocabulary": draw(st.sampled_from([64, 136])),
        "tied": draw(st.booleans()),
        "experts": experts,
    }
    return ModelSpec(**{each: getattr(known, each) for each in known.__slots__} | changed)


def trainer_shards(draw: st.DrawFn, spec: ModelSpec) -> list[TrainerShard]:
    """All ranks of a layout in Megatron's order: tensor, then data, then pipeline; experts over tensor x data."""
    tensor, data, pipeline, virtual = (draw(st.sampled_from(each)) for each in ([1, 2, 4], [1, 2], [1, 2], [1, 2]))
    virtual = virtual if pipeline > 1 else 1
    expert = draw(st.sampled_from([each for each in (1, 2, 4) if (tensor * data) % each == 0])) if spec.experts else 1
    expert_tensor = tensor if expert == 1 else 1
    table = pushed(spec)
    chunk = spec.layers // (pipeline * virtual)
    count = 0 if spec.experts is None else spec.experts.count // expert
    shards = []
    for rank in range(tensor * data * pipeline):
        stage, row = rank // (tensor * data), rank % tensor
        place = rank % (tensor * data) // expert_tensor % expert
        held = []
        for index, entry in enumerate(table):
            if entry.layer is None:
                first = entry.megatron[0].startswith("embedding")
                mine = stage == (0 if first else pipeline - 1)
            else:
                mine = entry.layer // chunk % pipeline == stage
            if mine and (entry.expert is None or entry.expert // count == place):
                held.append(index)
        expert_row = (row, tensor) if expert == 1 else (0, 1)
        shards.append(TrainerShard(f"gpu{rank}", f"node{rank // 4}", (row, tensor), expert_row, tuple(held)))
    return shards


def engine_shards(draw: st.DrawFn, spec: ModelSpec) -> list[EngineShard]:
    """The ranks of engines as SGLang divides a model.

    The vocabulary is padded to a multiple of 64, MLP widths to one of the ranks; key and value heads are copied if
    there are more ranks than heads; with expert parallelism a rank has whole experts.
    """
    tensor, replicas = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 2]))
    if spec.heads % tensor:
        tensor = 1
    whole_experts = spec.experts is not None and tensor <= spec.experts.count and draw(st.booleans())
    near = draw(st.booleans())
    shards = []
    for replica in range(replicas):
        for rank in range(tensor):
            boxes: dict[str, list[Box]] = {}
            for entry in pushed(spec):
                whole = entry.expert is not None and whole_experts
                for name, shape in entry.hf.items():
                    box = _expert_box(spec, shape, rank, tensor, entry.expert or 0) if whole else None
                    if not whole:
                        box = _engine_box(spec, name, shape, rank, tensor)
                    if box is not None:
                        boxes[name] = [box]
            number = replica * tensor + rank
            shards.append(EngineShard("gpu0" if near else f"other{number}", "node0" if near else "far", boxes))
    return shards


def _expert_box(spec: ModelSpec, shape: tuple[int, ...], rank: int, ranks: int, expert: int) -> Box | None:
    share = -(-sizes(spec)["experts"] // ranks)
    return tuple((0, n) for n in shape) if expert // share == rank else None


def _engine_box(spec: ModelSpec, name: str, shape: tuple[int, ...], rank: int, ranks: int) -> Box | None:
    whole = tuple((0, n) for n in shape)
    if "norm" in name or name.endswith("mlp.gate.weight"):
        return whole
    if any(part in name for part in ("k_proj", "v_proj")):
        held = max(1, spec.kv_heads // ranks) * spec.head_dim
        first = rank * spec.kv_heads // ranks * spec.head_dim
        return ((first, first + held), *whole[1:])
    dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
    padded = -(-shape[dim] // 64) * 64 if "embed" in name or "lm_head" in name else shape[dim]
    step = -(-padded // ranks)
    first, last = min(shape[dim], rank * step), min(shape[dim], (rank + 1) * step)
    if first == last:
        return None
    return tuple((first, last) if index == dim else each for index, each in enumerate(whole))
