"""The plan of a push, over random models and layouts of both sides."""

from collections import Counter, defaultdict
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arpo_megatron.engine.wire.boxes import Box, EngineShard, TensorType, intersect, size
from arpo_megatron.jobs.resolve import resolve
from arpo_megatron.models.known import KNOWN_MODELS, load_spec
from arpo_megatron.models.mapping import hf_bytes
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.weights.reshard import (
    Round,
    TrainerShard,
    boxes_in,
    checksum_ranks,
    owners,
    plan_rounds,
    pushed,
    tensor_types,
)
from arpo_megatron.weights.sync import carriers, choose_transport
from tests.weights.layouts import engine_boxes, engine_shards, random_spec, trainer_ranks, trainer_shards

DTYPE = torch.bfloat16
Case = tuple[ModelSpec, list[TrainerShard], list[EngineShard], int, bool, bool]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A model, both sides' shards, the bytes of a bucket, whether trainer ranks carry for engines, and whether the
    engines hold their products in FP8."""
    fp8 = draw(st.booleans())
    spec = random_spec(draw, fp8=fp8)
    trainers = trainer_shards(draw, spec, fp8=fp8)
    engines = engine_shards(draw, spec, fp8=fp8)
    bucket = draw(st.sampled_from([2**15, 50_000, 200_000, 2**20] if fp8 else [256, 1000, 5000, 2**20]))
    return spec, trainers, engines, bucket, draw(st.booleans()), fp8


def planned(
    spec: ModelSpec,
    trainers: list[TrainerShard],
    engines: list[EngineShard],
    bucket: int,
    bucket_holders: list[int],
    *,
    fp8: bool = False,
) -> list[Round]:
    table = pushed(spec, fp8=fp8)
    types = tensor_types(table, DTYPE)
    return plan_rounds(owners(table, trainers), trainers, engines, types, bucket, bucket_holders)


@given(cases())
def test_every_engine_element_comes_once_from_a_rank_that_has_it(
    case: Case,
) -> None:
    spec, trainers, engines, bucket, carried, fp8 = case
    near = [shard for shard in engines if any(shard.device == each.device for each in trainers)]
    carried = carried and len(near) == len(engines)
    bucket_holders = carriers(trainers, engines) if carried else [len(trainers) + rank for rank in range(len(engines))]
    rounds = planned(spec, trainers, engines, bucket, bucket_holders, fp8=fp8)
    table = pushed(spec, fp8=fp8)
    held, types = owners(table, trainers), tensor_types(table, DTYPE)
    in_blocks = {name for name, kind in types.items() if kind.dtype == "float8_e4m3fn"}
    assert bool(in_blocks) == fp8
    arriving: dict[tuple[int, str, int], list[Box]] = defaultdict(list)
    received: Counter[int] = Counter()
    item = {name: kind.torch_dtype.itemsize for name, kind in types.items()}
    rows = {name: 128 if name in in_blocks else 1 for name in types}
    widest = max(rows[name] * prod(kind.shape[1:]) * item[name] for name, kind in types.items())
    for turn in rounds:
        handled: Counter[int] = Counter()
        for message in (message for send in turn for message in send.messages()):
            for process in {message.sender, bucket_holders[message.receiver]}:
                handled[process] += message.bytes
            for piece in message.pieces:
                assert piece.bytes == item[piece.name] * size(piece.box)
                assert not any(place % 128 for place in piece.box[0] if piece.name in in_blocks), "a block is cut"
                received[message.receiver] += piece.bytes
                arriving[message.receiver, piece.name, piece.at].append(piece.box)
                assert any(
                    intersect(piece.box, box) == piece.box and message.sender in ranks
                    for box, ranks in held[piece.name].items()
                )
        assert max(handled.values()) <= max(bucket, widest + 16), "no process holds more than a bucket in a round"
    for receiver, shard in enumerate(engines):
        boxes = {(name, at): box for name, of_name in shard.boxes.items() for at, box in enumerate(of_name)}
        for (name, at), box in boxes.items():
            parts = arriving.pop((receiver, name, at))
            assert sum(map(size, parts)) == size(box)
            assert all(intersect(part, box) == part for part in parts)
            assert not any(intersect(one, other) for i, one in enumerate(parts) for other in parts[:i])
        own = sum(item[name] * size(box) for (name, _), box in boxes.items())
        assert received[receiver] == own, "its own shard and nothing else"
    assert not arriving


@given(st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 2, 4]))
def test_replicas_share_the_sending(data: int, replicas: int, tensor: int) -> None:
    """Equally near replicas differ by no more than the largest piece."""
    spec = KNOWN_MODELS["Qwen/Qwen3-4B"]
    small = spec.__class__(**{**{name: getattr(spec, name) for name in spec.__slots__}, "layers": 2})
    everything = tuple(range(len(pushed(small))))
    trainers = [TrainerShard(f"t{rank}", f"t{rank}", (0, 1), (0, 1), everything) for rank in range(data)]
    whole = {name: [kind.whole] for name, kind in tensor_types(pushed(small), DTYPE).items()}
    engines = [EngineShard(f"e{rank}", f"e{rank}", whole) for rank in range(replicas * tensor)]
    bucket = 2**26
    rounds = planned(small, trainers, engines, bucket, [data + rank for rank in range(len(engines))])
    sent = Counter(dict.fromkeys(range(data), 0))
    for turn in rounds:
        for message in (message for send in turn for message in send.messages()):
            sent[message.sender] += message.bytes
    largest = max(2 * prod(kind.shape) for kind in tensor_types(pushed(small), DTYPE).values())
    assert max(sent.values()) - min(sent.values()) <= largest
    assert sum(sent.values()) == len(engines) * hf_bytes(small, 2)


@pytest.mark.parametrize("fp8", [False, True])
def test_replicas_share_the_checksums(fp8: bool) -> None:
    """The 14B model on 4 nodes: every rank reads its share of the weights, and each box is read once."""
    job = resolve("deepsearch_14b+4nodes")
    spec = load_spec(job.model)
    table = pushed(spec, fp8=fp8)
    trainers = trainer_ranks(spec, table, job.parallel, gpus_per_node=8)
    held, read = owners(table, trainers), Counter(dict.fromkeys(range(len(trainers)), 0))
    assert len(trainers) == 32
    for name, boxes in checksum_ranks(held).items():
        assert boxes.keys() == held[name].keys()
        for box, rank in boxes.items():
            assert rank in held[name][box]
            read[rank] += size(box) * (128**2 if name.endswith("_scale_inv") else 1)
    largest = max(size(box) for boxes in held.values() for box in boxes)
    assert max(read.values()) - min(read.values()) <= largest
    assert max(read.values()) < 1.1 * sum(read.values()) / len(trainers)


@pytest.mark.parametrize(
    ("recipe", "pieces", "planned"),
    [("moe_30b_a3b+16nodes", 2_400_000, 100_000), ("moe_30b_a3b+fp8_engine", 300_000, 50_000)],
)
def test_plan_of_a_large_mixture_is_small(recipe: str, pieces: int, planned: int) -> None:
    """Every trainer rank makes the plan, so the experts of a layer are planned as one."""
    job = resolve(recipe)
    spec, ranks, fp8 = load_spec(job.model), job.engine.tensor, job.engine.quantization == "fp8"
    table = pushed(spec, fp8=fp8)
    trainers = trainer_ranks(spec, table, job.parallel, gpus_per_node=8)
    boxes = [engine_boxes(spec, table, rank, ranks, whole_experts=job.engine.expert > 1) for rank in range(ranks)]
    engines = [EngineShard(each.device, each.host, boxes[rank % ranks]) for rank, each in enumerate(trainers)]
    rounds = plan_rounds(
        owners(table, trainers),
        trainers,
        engines,
        tensor_types(table, DTYPE),
        job.sync.bucket_bytes,
        carriers(trainers, engines),
    )
    parts = [part for turn in rounds for send in turn for part in send.parts]
    assert sum(len(part.names) for part in parts) > pieces
    assert len(parts) < planned


@given(cases())
def test_boxes_of_all_trainer_ranks_cover_the_model(
    case: Case,
) -> None:
    spec, trainers, *_, fp8 = case
    table = pushed(spec, fp8=fp8)
    types = tensor_types(table, DTYPE)
    for name, boxes in owners(table, trainers).items():
        assert sum(map(size, boxes)) == prod(types[name].shape)
    assert {name for entry in table for name, _ in boxes_in(entry, (0, 1))} == set(types)


def test_nearest_rank_sends() -> None:
    types = {"norm": TensorType((8,), "bfloat16")}
    box = ((0, 8),)
    trainers = [TrainerShard(f"gpu{rank}", f"node{rank // 2}", (0, 1), (0, 1), ()) for rank in range(4)]
    engines = [
        EngineShard(device, host, {"norm": [box]}) for device, host in (("gpu2", "node1"), ("x", "node1"), ("y", "z"))
    ]
    ((*messages,),) = plan_rounds({"norm": {box: [0, 1, 2, 3]}}, trainers, engines, types, 1000, [4, 5, 6])
    assert [message.sender for message in messages] == [2, 3, 0]


def test_shapes_of_both_sides_are_compared() -> None:
    box, types = ((0, 8),), {"norm": TensorType((8,), "bfloat16")}
    trainer = TrainerShard("a", "a", (0, 1), (0, 1), ())
    for held, wanted, message in (
        ({((0, 4),): [0]}, [box], "the trainer holds 4 of the 8 elements of norm"),
        ({box: [0]}, [((0, 4),)], "the engines hold 4 of the 8 elements of norm"),
        ({box: [0]}, [], "the engines hold 0 of the 8 elements of norm"),
    ):
        with pytest.raises(ValueError, match=message):
            plan_rounds({"norm": held}, [trainer], [EngineShard("e", "e", {"norm": wanted})], types, 100, [1])


def test_transport_follows_from_the_places_of_both_sides() -> None:
    trainers = [TrainerShard(f"gpu{rank}", "node", (0, 1), (0, 1), ()) for rank in range(2)]
    shared, own = EngineShard("gpu1", "node", {}), EngineShard("gpu2", "node", {})
    assert choose_transport("auto", trainers, [shared], on_gpu=True) == (
        "ipc",
        "every engine rank is on a trainer rank's GPU",
    )
    assert choose_transport("auto", trainers, [own], on_gpu=True) == ("nccl", "the engines have GPUs of their own")
    assert choose_transport("network", trainers, [shared], on_gpu=True)[0] == "gloo"
    assert choose_transport("auto", trainers, [shared, own], on_gpu=True)[0] == "gloo"
    assert choose_transport("auto", trainers, [own], on_gpu=False) == (
        "gloo",
        "an engine shares no memory with a trainer",
    )
    with pytest.raises(Exception, match="1 engine rank\\(s\\) are not on a trainer rank's GPU"):
        choose_transport("ipc", trainers, [shared, own], on_gpu=True)
    assert carriers(trainers, [shared, shared]) == [1, 1]
    alike = [TrainerShard("cpu", "node", (0, 1), (0, 1), ()) for _ in range(2)]
    assert carriers(alike, [EngineShard("cpu", "node", {})] * 3) == [0, 1, 0]
