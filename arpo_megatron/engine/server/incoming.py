"""The two ways in which a rank's rounds arrive: as messages of a process group, or in memory that a trainer rank
shares."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from arpo_megatron.engine.server.parameters import EngineParameters
from arpo_megatron.engine.wire import connections, sharing
from arpo_megatron.engine.wire.boxes import WeightMessage, unpack
from arpo_megatron.engine.wire.groups import PushGroup
from arpo_megatron.engine.wire.staging import Staging, as_bytes


class Incoming(Protocol):
    """A way in which rounds arrive."""

    @property
    def largest(self) -> int:
        """Bytes of the larger of this rank's two buffers."""

    def opened(self, deadline_s: float) -> Any:
        """Return a context manager around the rounds of one push."""

    def start(self, messages: Sequence[WeightMessage]) -> None:
        """Start to receive a round, while the one before it may not have been stored yet."""

    def finish(self, messages: Sequence[WeightMessage]) -> None:
        """Wait for a round and store it in the parameters."""

    def close(self) -> None:
        """Disconnect from the trainer, which notices at once."""


class FromGroup:
    """Messages of a process group of trainer ranks and engine ranks.

    Args:
        link: where the group meets, and this rank's place in it.
        parameters: the rank's parameters.
    """

    def __init__(self, link: Mapping[str, Any], parameters: EngineParameters) -> None:
        self._parameters = parameters
        members, timeout_s = link["members"], link["timeout_s"]
        timeout = timedelta(seconds=timeout_s)
        store = TCPStore(link["address"], link["port"], members, is_master=False, timeout=timeout)
        self._group = PushGroup(store, link["name"], link["rank"], members, link["backend"], timeout_s)
        device = torch.device("cpu") if link["backend"] == "gloo" else parameters.device
        self._staging = Staging(device)
        self._arriving: list[tuple[list[Any], list[Tensor | None]]] = []
        """Operations, and staged bytes by message, of the rounds that were started and not finished."""

    @property
    def largest(self) -> int:
        """Bytes of the larger of this rank's two buffers."""
        return self._staging.largest

    @contextmanager
    def opened(self, deadline_s: float) -> Iterator[None]:
        """Abort the group if the push fails here or elsewhere."""
        self._arriving = []
        device = self._staging.device
        try:
            with self._group.opened("an engine rank", device, deadline_s) as connecting:
                self._group.wait(connecting, device)
                yield
        finally:
            self._staging.free()

    def start(self, messages: Sequence[WeightMessage]) -> None:
        """Receive a piece straight into its parameter if it is contiguous there; other messages are staged."""
        staging = self._staging
        direct = [self._parameters.contiguous(message.pieces, staging.device) for message in messages]
        staging.switch(sum(m.bytes for m, place in zip(messages, direct, strict=True) if place is None))
        ops, staged = [], list[Tensor | None]()
        for message, place in zip(messages, direct, strict=True):
            flat = staging.take(message.bytes) if place is None else as_bytes(place)
            staged.append(flat if place is None else None)
            ops.append(dist.P2POp(dist.irecv, flat, group=self._group.group, group_peer=message.sender))
        self._arriving.append((dist.batch_isend_irecv(ops), staged))

    def finish(self, messages: Sequence[WeightMessage]) -> None:
        """Wait for the messages and copy the staged ones into the parameters."""
        works, staged = self._arriving.pop(0)
        self._group.wait(works, self._staging.device)
        for message, flat in zip(messages, staged, strict=True):
            values = [None] if flat is None else unpack(flat, message.pieces, self._parameters.types)
            self._parameters.store(message.pieces, values)

    def close(self) -> None:
        """Leave the group: the trainer ranks notice at once."""
        self._group.leave()


class FromMemory:
    """Buffers of a trainer rank on this rank's device, which two processes map.

    Args:
        link: port and key of that trainer rank.
        parameters: the rank's parameters.
    """

    largest = 0
    """The buffers are the trainer rank's."""

    def __init__(self, link: Mapping[str, Any], parameters: EngineParameters) -> None:
        self._connection = connections.connect(link["port"], link["key"])
        self._parameters = parameters
        self._buffers: list[Tensor] = []
        self._deadline_s = self._deadline = 0.0

    @contextmanager
    def opened(self, deadline_s: float) -> Iterator[None]:
        """Map the buffers for one push."""
        self._deadline_s, self._deadline = deadline_s, time.monotonic() + deadline_s
        for _ in range(2):
            self._await()
            self._buffers.append(sharing.accept(self._connection, self._parameters.device))
        try:
            yield
        finally:
            self._buffers = []

    def start(self, messages: Sequence[WeightMessage]) -> None:
        """Nothing: the trainer rank fills the next buffer by itself."""

    def finish(self, messages: Sequence[WeightMessage]) -> None:
        """Wait for a round, copy it into the parameters, and say that its place is free."""
        self._await()
        buffer, start = self._connection.recv()
        for message in messages:
            flat = self._buffers[buffer][start : start + message.bytes]
            self._parameters.store(message.pieces, unpack(flat, message.pieces, self._parameters.types))
            start += message.bytes
        if self._parameters.device.type == "cuda":
            torch.cuda.current_stream(self._parameters.device).synchronize()
        self._connection.send_bytes(b"read")

    def close(self) -> None:
        """Close the connection: the trainer rank notices at once."""
        self._connection.close()

    def _await(self) -> None:
        if not self._connection.poll(max(0.0, self._deadline - time.monotonic())):
            raise TimeoutError(f"not all buffers have come within {self._deadline_s:g} s")
