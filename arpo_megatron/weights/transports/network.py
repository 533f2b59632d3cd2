"""Point-to-point messages in a process group of all trainer ranks and all engine ranks."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from arpo_megatron.engine.admin import EngineAdmin, WeightPushError, first_line, local_address
from arpo_megatron.engine.wire.boxes import WeightMessage
from arpo_megatron.engine.wire.groups import PushGroup
from arpo_megatron.engine.wire.staging import Staging
from arpo_megatron.utils.heartbeat import beat
from arpo_megatron.utils.stores import listen
from arpo_megatron.weights.control import Control
from arpo_megatron.weights.local import LocalShard
from arpo_megatron.weights.transports import announce
from arpo_megatron.weights.transports.base import Exchange


class Network:
    """Sends every message from its trainer rank to its engine rank, by NCCL or gloo.

    Args:
        control: the trainer's ranks.
        requests: requests to the engines; used by rank 0.
        local: this rank's weights.
        backend: "nccl" if no two members share a GPU, which NCCL refuses; else "gloo".
    """

    def __init__(self, control: Control, requests: EngineAdmin, local: LocalShard, backend: str) -> None:
        self._control = control
        self._admin = requests
        self._local = local
        self._backend = backend
        self._exchange: Exchange | None = None
        self._rounds: list[list[WeightMessage]] = []
        self._group: PushGroup | None = None
        self._store: Any = None
        self._staging = Staging(torch.device("cpu") if backend == "gloo" else local.device)

    @property
    def largest_buffer(self) -> int:
        """Bytes of the larger of this rank's two buffers."""
        return self._staging.largest

    def connect(self, exchange: Exchange) -> None:
        """Form the group, with the trainer's ranks first."""
        control, rank = self._control, self._control.rank
        self._exchange = exchange
        self._rounds = exchange.messages_of(rank)
        control.on_rank_zero(lambda: announce.send_plan(self._admin, exchange))
        members = control.ranks + len(exchange.bucket_holders)
        timeout = timedelta(seconds=self._admin.timeout_s)

        def open_store() -> dict[str, Any]:
            address = local_address(exchange.engines[0].url)
            self._store = listen(address, 0, members, timeout)
            where = {"kind": "network", "address": address, "port": self._store.port, "name": exchange.name}
            return where | {"members": members, "backend": self._backend, "timeout_s": self._admin.engine_deadline_s}

        link = control.on_rank_zero(open_store)
        links = [link | {"rank": control.ranks + receiver} for receiver in range(len(exchange.bucket_holders))]
        failure = ""
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(announce.join, self._admin, exchange, links) if rank == 0 else None
            try:
                if rank:
                    self._store = TCPStore(link["address"], link["port"], members, is_master=False, timeout=timeout)
                self._group = PushGroup(self._store, link["name"], rank, members, self._backend, self._admin.timeout_s)
            except RuntimeError as error:
                failure = f"joining the weight group: {first_line(error)}"
                self._store = None  # an engine that still waits for members sees its end
        try:
            if answer is not None:
                answer.result()
        except WeightPushError as error:
            failure = str(error)
        control.raise_first(failure)

    def send(self) -> int:
        """Send this rank's messages, round by round."""
        assert self._exchange is not None, "connect comes first"
        posts = announce.start(self._admin, self._exchange) if self._control.rank == 0 else []
        try:
            announce.run(posts, partial(self._run, posts))
        finally:
            self._staging.free()
        return 1

    def close(self) -> None:
        """Leave the group; the engines leave it when their next plan comes."""
        self._staging.free()
        self._store = None
        if self._group is not None:
            self._group.leave()
        self._group = None

    def _run(self, posts: Sequence["Future[Any]"]) -> None:
        group, device = self._joined, self._staging.device
        who, failed = f"trainer rank {self._control.rank}", partial(announce.first_failure, posts)
        with group.opened(who, device, self._admin.timeout_s, failed) as connecting:
            works = connecting
            for messages in self._rounds:
                beat()
                started = self._start(messages)
                group.wait(works, device)
                works = started
            group.wait(works, device)

    def _start(self, messages: Sequence[WeightMessage]) -> list[Any]:
        """Start to send one round's messages; what is not contiguous is copied first."""
        direct = [self._local.contiguous(message, self._staging.device) for message in messages]
        self._staging.switch(sum(m.bytes for m, flat in zip(messages, direct, strict=True) if flat is None))
        group, ops = self._joined.group, []
        for message, whole in zip(messages, direct, strict=True):
            flat = self._staging.take(message.bytes) if whole is None else whole
            if whole is None:
                self._local.pack(message, flat)
            peer = self._control.ranks + message.receiver
            ops.append(dist.P2POp(dist.isend, flat, group=group, group_peer=peer))
        return list(dist.batch_isend_irecv(ops)) if ops else []

    @property
    def _joined(self) -> PushGroup:
        assert self._group is not None, "connect comes first"
        return self._group
