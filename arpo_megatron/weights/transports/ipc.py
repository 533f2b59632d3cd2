"""Memory that a trainer rank shares with the engine ranks on its own GPU, or on its machine without GPUs.

For each engine rank one trainer rank is the carrier. Trainer ranks send the carrier its messages in a process group of
their own; the carrier collects a round in a buffer that the engine ranks next to it map (CUDA IPC; shared memory on a
CPU), and reports it through a connection. A rank has two buffers: it fills one while engine ranks read the other. The
messages that it sends to other carriers pass through the same two. So NCCL never sees two ranks on one GPU, and an
engine opens memory of its own GPU only.
"""

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist
from torch import Tensor

from arpo_megatron.engine.admin import EngineAdmin, WeightPushError, first_line
from arpo_megatron.engine.wire import sharing
from arpo_megatron.engine.wire.boxes import WeightMessage
from arpo_megatron.engine.wire.connections import Listener
from arpo_megatron.engine.wire.groups import PushGroup, wait_for
from arpo_megatron.engine.wire.staging import Staging
from arpo_megatron.utils.heartbeat import beat
from arpo_megatron.utils.stores import rank_store
from arpo_megatron.weights.control import Control
from arpo_megatron.weights.local import LocalShard
from arpo_megatron.weights.transports import announce
from arpo_megatron.weights.transports.base import Exchange

_KEY_BYTES = 32


class Ipc:
    """Sends messages between trainer ranks, and hands buffers to the engine ranks next to them.

    Args:
        control: the trainer's ranks.
        requests: requests to the engines; used by rank 0.
        local: this rank's weights.
    """

    def __init__(self, control: Control, requests: EngineAdmin, local: LocalShard) -> None:
        self._control = control
        self._admin = requests
        self._local = local
        self._exchange: Exchange | None = None
        self._rounds: list[list[WeightMessage]] = []
        self._size = 0
        """Bytes of a buffer: the most that a round of this plan needs."""
        self._group: PushGroup | None = None
        """The trainer's ranks; None for a single rank."""
        self._peers: dict[int, _Peer] = {}
        """Engine ranks that this rank carries for."""
        self._staging = Staging(local.device)

    @property
    def largest_buffer(self) -> int:
        """Bytes of the larger of this rank's two buffers, which hold all that it carries and sends."""
        return self._staging.largest

    def connect(self, exchange: Exchange) -> None:
        """Form the group of trainer ranks, and have each engine rank connect to its carrier."""
        control, rank = self._control, self._control.rank
        self._exchange = exchange
        self._rounds = exchange.messages_of(rank)
        needed = [sum(each.bytes for each in round_ if self._direct(each) is None) for round_ in self._rounds]
        self._size = max(needed, default=0)
        control.on_rank_zero(lambda: announce.send_plan(self._admin, exchange))
        control.raise_first(self._form_group(exchange.name))
        # The connections unpickle what they receive, so both ends prove that they know a key of this push.
        key = control.on_rank_zero(lambda: secrets.token_hex(_KEY_BYTES))
        carried = [receiver for receiver, holder in enumerate(exchange.bucket_holders) if holder == rank]
        listeners = {receiver: Listener(key) for receiver in carried}
        try:
            ports: dict[int, int] = {}
            for of_rank in control.gather({receiver: each.port for receiver, each in listeners.items()}):
                ports |= of_rank
            links = [{"kind": "ipc", "port": ports[receiver], "key": key} for receiver in sorted(ports)]
            control.on_rank_zero(lambda: announce.join(self._admin, exchange, links))
            control.raise_first(self._accept(listeners))
        finally:
            for listener in listeners.values():
                listener.close()

    def send(self) -> int:
        """Send this rank's messages, and hand over what arrives for its engine ranks."""
        assert self._exchange is not None, "connect comes first"
        posts = announce.start(self._admin, self._exchange) if self._control.rank == 0 else []
        try:
            announce.run(posts, partial(self._run, posts))
        except WeightPushError:
            self.close()  # rank 0 may wait for the engine ranks that this rank carries for
            raise
        finally:
            self._staging.free()
        return 1

    def close(self) -> None:
        """Leave the group, and close the connections, which ends the engine ranks' part of a push."""
        for peer in self._peers.values():
            peer.close()
        self._peers = {}
        if self._group is not None:
            self._group.leave()
        self._group = None

    def _form_group(self, name: str) -> str:
        """Form the group, which a failed push aborts; return what has failed, or ""."""
        control, timeout_s = self._control, self._admin.timeout_s
        if control.ranks == 1:
            return ""
        backend = "nccl" if self._local.device.type == "cuda" else "gloo"
        store = rank_store(control.rank, control.ranks, timedelta(seconds=timeout_s))
        try:
            self._group = PushGroup(store, name, control.rank, control.ranks, backend, timeout_s)
        except RuntimeError as error:
            return f"joining the weight group: {first_line(error)}"
        return ""

    def _accept(self, listeners: dict[int, Listener]) -> str:
        """Take the connections of engine ranks, which have announced themselves; return what has failed, or ""."""
        timeout_s = self._admin.timeout_s
        try:
            self._peers = {
                receiver: _Peer(listener.connection(timeout_s), timeout_s) for receiver, listener in listeners.items()
            }
        except OSError as error:
            return f"an engine has left the push: {error}"
        return ""

    def _run(self, posts: Sequence["Future[Any]"]) -> None:
        who, failed = f"trainer rank {self._control.rank}", partial(announce.first_failure, posts)
        opened: Any = nullcontext([])
        if self._group is not None:
            opened = self._group.opened(who, self._local.device, self._admin.timeout_s, failed)
        with opened as works:
            self._exchange_rounds(works)

    def _exchange_rounds(self, works: Sequence[Any]) -> None:
        """Exchange all rounds. `works`: operations that have been started."""
        if self._size:
            buffers = [sharing.shareable(self._size, self._local.device) for _ in range(2)]
            self._staging.use(buffers)
            for peer in self._peers.values():
                peer.offer(buffers)
        filled: list[Callable[[], None]] = []
        for round_ in self._rounds:
            beat()
            started, filling = self._start(round_)  # while the round before it travels
            self._finish(works, filled)
            works, filled = started, filling
            if not started:
                self._finish([], filled)
                filled = []
        self._finish(works, filled)
        for peer in self._peers.values():
            peer.wait_until_read()

    def _start(self, messages: Sequence[WeightMessage]) -> tuple[list[Any], list[Callable[[], None]]]:
        """Fill a buffer with this rank's own pieces, and start to exchange the others.

        Returns:
            The operations, and what hands the buffer to engine ranks when they have ended.
        """
        rank, staging = self._control.rank, self._staging
        direct = [self._direct(each) for each in messages]
        staging.switch(sum(each.bytes for each, flat in zip(messages, direct, strict=True) if flat is None))
        for peer in self._peers.values():
            peer.wait_until_read(staging.current)
        starts: dict[int, int] = {}
        """Where the messages of an engine rank begin. They lie one after the other, as in the plan."""
        ops = []
        for message, whole in zip(messages, direct, strict=True):  # in the order of the plan on both sides
            holder = self._holder(message)
            if holder == rank:
                starts.setdefault(message.receiver, staging.used)
            flat = staging.take(message.bytes) if whole is None else whole
            if whole is None and message.sender == rank:
                self._local.pack(message, flat)
            if message.sender != rank:
                ops.append(self._operation(dist.irecv, flat, message.sender))
            elif holder != rank:
                ops.append(self._operation(dist.isend, flat, holder))
        filled: list[Callable[[], None]] = [
            partial(self._peers[each].hand_over, staging.current, start) for each, start in starts.items()
        ]
        return list(dist.batch_isend_irecv(ops)) if ops else [], filled

    def _finish(self, works: Sequence[Any], filled: Sequence[Callable[[], None]]) -> None:
        wait = wait_for if self._group is None else self._group.wait
        wait(works, self._local.device)  # also for this rank's copies: another process reads, on another stream
        for hand_over in filled:
            hand_over()

    def _direct(self, message: WeightMessage) -> Tensor | None:
        """Return the bytes of a message that is sent from its parameter; None: it passes through a buffer."""
        carried = self._holder(message) == self._control.rank
        return None if carried else self._local.contiguous(message, self._local.device)

    def _holder(self, message: WeightMessage) -> int:
        """Return the trainer rank that carries for a message's engine rank."""
        assert self._exchange is not None, "connect comes first"
        return self._exchange.bucket_holders[message.receiver]

    def _operation(self, kind: Any, flat: Tensor, rank: int) -> dist.P2POp:
        """Return an operation with another trainer rank."""
        assert self._group is not None, "a lone rank has no message for others"
        return dist.P2POp(kind, flat, group=self._group.group, group_peer=rank)


class _Peer:
    """An engine rank that this rank carries for. Every method raises OSError if it has left the push.

    Args:
        connection: to the engine rank.
        timeout_s: deadline of the engine rank's part of a push.
    """

    def __init__(self, connection: Connection, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._deadline = 0.0
        self._unread: deque[int] = deque()
        """Buffers, 0 or 1, that were handed over and not read yet, in that order."""

    def offer(self, buffers: Sequence[Tensor]) -> None:
        """Show the two buffers of a push to the engine."""
        self._deadline = time.monotonic() + self._timeout_s
        with _named():
            for buffer in buffers:
                sharing.offer(self._connection, buffer)

    def hand_over(self, buffer: int, start: int) -> None:
        """Let the engine read its messages of a round, which begin at byte `start` of a buffer."""
        with _named():
            self._connection.send((buffer, start))
        self._unread.append(buffer)

    def wait_until_read(self, buffer: int | None = None) -> None:
        """Wait until the engine has read a buffer; None: both."""
        while self._unread if buffer is None else buffer in self._unread:
            with _named():
                if not self._connection.poll(max(0.0, self._deadline - time.monotonic())):
                    raise OSError(f"no answer for {self._timeout_s:g} s")
                self._connection.recv_bytes()
            self._unread.popleft()

    def close(self) -> None:
        """Close the connection, which ends the engine's part of a push."""
        self._connection.close()


@contextmanager
def _named() -> Iterator[None]:
    """Add to an error of a connection which process it was with."""
    try:
        yield
    except (OSError, EOFError) as error:
        raise OSError(f"an engine has left the push: {str(error) or 'its connection is closed'}") from error
