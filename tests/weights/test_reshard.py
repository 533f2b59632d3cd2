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
    owners,
    plan_rounds,
    pushed,
    tensor_types,
)
from arpo_megatron.weights.sync import carriers, choose_transport
from tests.weights.layouts import engine_boxes, engine_shards, random_spec, trainer_ranks, trainer_shards

DTYPE = torch.bfloat16
Case = tuple[ModelSpec, list[TrainerShard], list[EngineShard], int, bool]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A model, both sides' shards, the bytes of a bucket, and whether trainer ranks carry for engines."""
    spec = random_spec(draw)
    trainers = trainer_shards(draw, spec)
    engines = engine_shards(draw, spec)
    return spec, trainers, engines, draw(st.sampled_from([256, 1000, 5000, 2**20])), draw(st.booleans())


def planned(
    spec: ModelSpec, trainers: list[TrainerShard], engines: list[EngineShard], bucket: int, bucket_holders: list[int]
) -> list[Round]:
    types = tensor_types(pushed(spec), DTYPE)
    return plan_rounds(owners(pushed(spec), trainers), trainers, engines, types, bucket, bucket_holders)


@given(cases())
def test_every_engine_element_comes_once_from_a_rank_that_has_it(
    case: Case,
) -> None:
    spec, trainers, engines, bucket, carried = case
    near = [shard for shard in engines if any(shard.device == each.device for each in trainers)]
    carried = carried and len(near) == len(engines)
    bucket_holders = carriers(trainers, engines) if carried else [len(trainers) + rank for rank in range(len(engines))]
    rounds = planned(spec, trainers, engines, bucket, bucket_holders)
    held = owners(pushed(spec), trainers)
    arriving: dict[tuple[int, str, int], list[Box]] = defaultdict(list)
    received: Counter[int] = Counter()
    widest = max(prod(kind.shape[1:]) * 2 for kind in tensor_types(pushed(spec), DTYPE).values())
    for turn in rounds:
        handled: Counter[int] = Counter()
        for message in (message for send in turn for message in send.messages()):
            for process in {message.sender, bucket_holders[message.receiver]}:
                handled[process] += message.bytes
            for piece in message.pieces:
                assert piece.bytes == 2 * size(piece.box)
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
        assert received[receiver] == sum(2 * size(box) for box in boxes.values()), "its own shard and nothing else"
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
    spec, trainers, *_ = case
    for name, boxes in owners(pushed(spec), trainers).items():
        assert sum(map(size, boxes)) == prod(tensor_types(pushed(spec), DTYPE)[name].shape)
    assert {name for entry in pushed(spec) for name, _ in boxes_in(entry, (0, 1))} == set(
        tensor_types(pushed(spec), DTYPE)
    )


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
