"""Pushes by `ipc` into two engine ranks that are threads: failures, memory, overlap. No server is started."""

import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from arpo_megatron.engine.admin import EngineEndpoint, WeightPushError
from arpo_megatron.engine.server.incoming import FromMemory
from arpo_megatron.engine.server.receive import Shard
from arpo_megatron.engine.wire import sharing
from arpo_megatron.engine.wire.boxes import EXCHANGE_FORMAT, PLAN_ACTION, EngineShard, TensorType, boxes_from_json
from arpo_megatron.engine.wire.devices import device_name, host_name
from arpo_megatron.utils.stores import rank_store
from arpo_megatron.weights.control import Control
from arpo_megatron.weights.local import LocalShard
from arpo_megatron.weights.reshard import TrainerShard, plan_rounds
from arpo_megatron.weights.sync import carriers
from arpo_megatron.weights.transports import Exchange, Ipc, announce, ipc
from tests.ranks import run_ranks

TIMEOUT_S = 60.0
SOON_S = 15.0
BUCKET_BYTES = 2**17
CPU = torch.device("cpu")
SHAPE = (256, 128)
NAMES = [f"{stage} {kind} {index}" for stage in range(2) for index in range(3) for kind in ("rows", "columns")]
"""By pipeline stage. An engine rank holds half of the rows, or half of the columns, of each."""
TYPES = {name: TensorType(SHAPE, "float32") for name in NAMES}


def values(name: str) -> Tensor:
    return torch.arange(float(SHAPE[0] * SHAPE[1])).view(SHAPE) + NAMES.index(name)


class Half(nn.Module):
    """The model of one of two engine ranks."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.held = {name: nn.Parameter(torch.zeros_like(self._half(name, values(name)))) for name in NAMES}
        self.first = self.held[NAMES[0]]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.held[name].data.copy_(self._half(name, tensor))

    def is_whole(self) -> bool:
        return all(torch.equal(held, self._half(name, values(name))) for name, held in self.held.items())

    def _half(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.chunk(2, int("columns" in name))[self.rank]


class Engine:
    """An engine whose two ranks are threads, and the requests to it that a transport makes."""

    timeout_s = engine_deadline_s = TIMEOUT_S

    def __init__(self) -> None:
        self.models = [Half(rank) for rank in range(2)]
        self.ranks = [Shard() for _ in self.models]
        self._pool = ThreadPoolExecutor(len(self.ranks))
        self._running: list[Future[Any]] = []

    def layout(self) -> list[EngineShard]:
        request = {"types": dict.fromkeys(NAMES, (SHAPE, "float32")), "together": [[name] for name in NAMES]}
        answers = [rank.describe(model, request) for rank, model in zip(self.ranks, self.models, strict=True)]
        return [EngineShard(each["device"], each["host"], boxes_from_json(each["boxes"])) for each in answers]

    def send_to_ranks(self, action: str, engines: Sequence[Sequence[Any]]) -> None:
        wait(self._running)  # SGLang's ranks do one thing at a time
        (of_ranks,) = engines
        for rank, value in zip(self.ranks, json.loads(json.dumps(of_ranks)), strict=True):
            (rank.accept_plan if action == PLAN_ACTION else rank.join)(value)

    def post_all(self, _endpoint: str, bodies: Sequence[Any]) -> "list[Future[Any]]":
        ((_, body),) = bodies
        request = json.loads(body["load_format"].removeprefix(EXCHANGE_FORMAT))

        def receive(rank: Shard) -> None:
            try:
                rank.receive(**request)
            except Exception as error:
                raise WeightPushError(f"the engine's account: {type(error).__name__}") from error

        self._running = [self._pool.submit(receive, rank) for rank in self.ranks]
        return self._running


class Trainer:
    """One rank of a trainer with two pipeline stages of two replicas; or a trainer of one rank."""

    def __init__(self, control: Control) -> None:
        rank, ranks = control.rank, control.ranks
        stage = {name: int(name[0]) if ranks > 1 else 0 for name in NAMES}
        held = {name: {TYPES[name].whole: list(range(ranks))[2 * stage[name] :][:2]} for name in NAMES}
        shard = TrainerShard(device_name(CPU), host_name(), (0, 1), (0, 1), ())
        parts = {name: {TYPES[name].whole: values(name)} for name in NAMES if rank in held[name][TYPES[name].whole]}
        self.engine = Engine()
        self.control = control
        self.transport = Ipc(control, self.engine, LocalShard(shard, TYPES, parts, CPU))  # type: ignore[arg-type]
        layout = self.engine.layout()
        holders = carriers([shard] * ranks, layout)
        rounds = plan_rounds(held, [shard] * ranks, layout, TYPES, BUCKET_BYTES, holders)
        self._exchange = Exchange("the plan", (EngineEndpoint("", 2, ""),), rounds, holders)

    def push(self) -> None:
        self.transport.connect(self._exchange)
        failure = ""
        try:
            self.transport.send()
        except WeightPushError as error:
            failure = str(error)
        failures = self.control.gather(failure)
        if any(failures):
            self.transport.close()
            raise WeightPushError(" | ".join(failures))

    def check(self) -> None:
        """All values are where they belong."""
        if self.control.rank == 0:
            assert all(model.is_whole() for model in self.engine.models)


class Buffers:
    """Counts the bytes of all buffers of this process."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = self.most = 0
        self._lock = threading.RLock()  # ranks of the engine are threads of this process
        patch.setattr(sharing, "shareable", self._counted(sharing.shareable))
        patch.setattr(torch, "empty", self._counted(torch.empty))

    def _counted(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*arguments: Any, **named: Any) -> Tensor:
            buffer = make(*arguments, **named)
            if buffer.dtype == torch.uint8:
                self._add(buffer.nbytes)
                weakref.finalize(buffer, self._add, -buffer.nbytes)
            return buffer

        return made

    def _add(self, count: int) -> None:
        with self._lock:
            self.now += count
            self.most = max(self.most, self.now)


def joined() -> Control:
    """The control group of all ranks of this test."""
    rank, ranks, timeout = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=rank_store(rank, ranks, timeout), rank=rank, world_size=ranks)
    return Control(dist.new_group(backend="gloo"))


def failing(calls: int, original: Callable[..., Any]) -> Callable[..., Any]:
    """Run out of memory in a later call."""
    left = [calls]

    def call(*arguments: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise torch.OutOfMemoryError("out of memory")
        return original(*arguments)

    return call


def push_with_a_failure(who: str) -> None:
    """Push from four ranks; the first push fails on one rank only."""
    control = joined()
    trainer = Trainer(control)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(announce, "_ANSWER_S", 0.1)
        if who == f"trainer rank {control.rank}":
            patch.setattr(LocalShard, "pack", failing(3, LocalShard.pack))
        if who == "engine" and control.rank == 0:
            patch.setattr(FromMemory, "finish", failing(3, FromMemory.finish))
        started = time.monotonic()
        with pytest.raises(WeightPushError) as failed:
            trainer.push()
        assert time.monotonic() - started < SOON_S
    reasons = str(failed.value).split(" | ")
    assert len(reasons) == 4, "every rank of the trainer raises"
    # The engine's answer comes before or after a carrier has seen that it has left.
    causes = ("an engine has left the push", "OutOfMemory") if who == "engine" else (f"{who}: out of memory",)
    known = ("", "the engine's account: EOFError")  # a rank whose part is done, and rank 0 after its own part
    assert all(reason in known or any(each in reason for each in (*causes, "OutOfMemory")) for reason in reasons), (
        reasons
    )
    assert any(cause in reason for cause in causes for reason in reasons), reasons
    trainer.push()
    trainer.check()
    trainer.transport.close()
    control.gather(None)
    dist.destroy_process_group()


@pytest.mark.parametrize("who", ["trainer rank 0", "trainer rank 3", "engine"])
def test_failure_of_one_rank_ends_the_push_on_all_and_the_next_push_succeeds(who: str) -> None:
    """A carrier, a rank that only sends, and an engine rank; gloo blocks here as NCCL does: no one has gone."""
    run_ranks(push_with_a_failure, who, ranks=4, timeout_s=25)


def push_and_count(_: None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        trainer, buffers = Trainer(joined()), Buffers(patch)
        trainer.push()
        trainer.check()
        most = trainer.transport.largest_buffer
        assert buffers.most == 2 * most, "all that this process holds is in two equal buffers"
        assert 0 < most <= BUCKET_BYTES
        deadline = time.monotonic() + 30
        while buffers.now and time.monotonic() < deadline:
            time.sleep(0.01)  # gloo's threads may hold the last ones a moment longer
        assert buffers.now == 0
        trainer.transport.close()
        trainer.control.gather(None)
        dist.destroy_process_group()


def test_all_buffers_of_a_trainer_rank_are_two_buckets_at_most() -> None:
    """Columns must be packed, so a carrier sends from buffers, too."""
    run_ranks(push_and_count, None, ranks=4)


def test_next_buffer_is_filled_while_an_engine_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lone trainer rank waits for no other rank, only for the buffer that it needs."""
    finish, hand_over = FromMemory.finish, ipc._Peer.hand_over
    handed, both, in_time = list[Any](), threading.Event(), list[bool]()

    def note(*arguments: Any) -> None:
        hand_over(*arguments)
        handed.append(arguments)
        if len(handed) == 2:
            both.set()

    def read_late(*arguments: Any) -> None:
        in_time.append(both.wait(5.0))
        finish(*arguments)

    monkeypatch.setattr(ipc._Peer, "hand_over", note)
    monkeypatch.setattr(FromMemory, "finish", read_late)
    trainer = Trainer(Control(None))
    trainer.push()
    trainer.check()
    assert len(handed) > 2
    assert in_time[0], "the second buffer is filled before the first one is read"
    trainer.transport.close()


def test_shared_buffers_are_free_between_pushes(monkeypatch: pytest.MonkeyPatch) -> None:
    during, offer = list[bool](), sharing.offer

    def mapped() -> bool:
        return f"/torch_{os.getpid()}_" in Path("/proc/self/maps").read_text()

    def offer_and_note(*arguments: Any) -> None:
        offer(*arguments)
        during.append(mapped())

    monkeypatch.setattr(sharing, "offer", offer_and_note)
    trainer = Trainer(Control(None))
    for _ in range(2):
        trainer.push()
        trainer.check()
        assert not mapped()
        trainer.transport.close()
    assert during and all(during), "torch's files have the name that is looked for"
