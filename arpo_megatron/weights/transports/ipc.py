"""Memory that a trainer rank shares with the engine ranks on its own GPU, or on its machine without GPUs.

For each engine rank one trainer rank is the carrier. Trainer ranks send the carrier its messages in the trainer's own
process group; the carrier collects a round in a buffer that the engine rank maps (CUDA IPC; shared memory on a CPU),
and reports it through a connection. Two buffers take turns: the engine reads one while the carrier fills the other. So
NCCL never sees two ranks on one GPU, and an engine opens memory of its own GPU only.
"""

import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from arpo_megatron.engine.admin import EngineAdmin
from arpo_megatron.engine.wire import sharing
from arpo_megatron.engine.wire.boxes import WeightMessage
from arpo_megatron.engine.wire.groups import wait_for
from arpo_megatron.engine.wire.staging import Staging
from arpo_megatron.utils.heartbeat import beat
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
        self._peers: dict[int, _Peer] = {}
        """Engine ranks that this rank carries for."""
        self._staging = Staging(local.device)

    @property
    def largest_buffer(self) -> int:
        """Bytes of the largest buffer that this rank has used for a round."""
        return max([self._staging.largest, *(peer.largest for peer in self._peers.values())])

    def connect(self, exchange: Exchange) -> None:
        """Have each engine rank connect to its carrier."""
        control, rank = self._control, self._control.rank
        self._exchange = exchange
        self._rounds = [
            [each for each in round_ if rank in (each.sender, exchange.bucket_holders[each.receiver])]
            for round_ in exchange.rounds
        ]
        control.on_rank_zero(lambda: announce.send_plan(self._admin, exchange))
        if control.ranks > 1:  # NCCL connects in the first operation, which needs every rank; a round may not
            dist.all_reduce(torch.zeros(1, device=self._local.device))
        # The connections unpickle what they receive, so both ends prove that they know a key of this push.
        key = control.on_rank_zero(lambda: secrets.token_hex(_KEY_BYTES))
        entrances = {
            receiver: _Entrance(key) for receiver, place in enumerate(exchange.bucket_holders) if place == rank
        }
        try:
            ports: dict[int, int] = {}
            for of_rank in control.gather({receiver: each.port for receiver, each in entrances.items()}):
                ports |= of_rank
            links = [{"kind": "ipc", "port": ports[receiver], "key": key} for receiver in sorted(ports)]
            control.on_rank_zero(lambda: announce.join(self._admin, exchange, links))
            self._peers = {
                receiver: _Peer(entrance.connection(), self._local.device, self._admin.timeout_s)
                for receiver, entrance in entrances.items()
            }
        finally:
            for entrance in entrances.values():
                entrance.close()

    def send(self) -> int:
        """Send this rank's messages, and hand over what arrives for its engine ranks."""
        if self._exchange is None:
            raise AssertionError("connect comes first")
        posts = announce.start(self._admin, self._exchange) if self._control.rank == 0 else []
        try:
            announce.run(posts, self._run)
        finally:
            self._staging.free()
            for peer in self._peers.values():
                peer.free()
        return 1

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._peers = {}

    def _run(self) -> None:
        sizes: dict[int, int] = {}
        for turn in self._rounds:
            held: dict[int, int] = {}
            for message in turn:
                held[message.receiver] = held.get(message.receiver, 0) + message.bytes
            sizes |= {receiver: max(size, sizes.get(receiver, 0)) for receiver, size in held.items()}
        for receiver, peer in self._peers.items():
            peer.offer(sizes[receiver])
        works: list[Any] = []
        filled: set[int] = set()
        for turn in self._rounds:
            beat()
            started = self._start(turn)  # while the round before it travels
            self._finish(works, filled)
            works, filled = started, {each.receiver for each in turn} & self._peers.keys()
            if not started:
                self._finish([], filled)
                filled = set()
        self._finish(works, filled)
        for peer in self._peers.values():
            peer.wait_until_read()
        if broken := [peer.failure for peer in self._peers.values() if peer.failure]:
            raise OSError(broken[0])

    def _start(self, messages: Sequence[WeightMessage]) -> list[Any]:
        """Fill buffers with this rank's own pieces, and start to exchange the others."""
        rank, bucket_holders = self._control.rank, self._bucket_holders
        leaving = [each for each in messages if each.sender == rank and bucket_holders[each.receiver] != rank]
        direct = {each: self._local.contiguous(each, self._local.device) for each in leaving}
        self._staging.turn(sum(each.bytes for each, view in direct.items() if view is None))
        for receiver in {each.receiver for each in messages} & self._peers.keys():
            self._peers[receiver].turn()
        ops = []
        for message in messages:  # in the order of the plan on both sides
            place = bucket_holders[message.receiver]
            if place == rank:
                flat = self._peers[message.receiver].take(message.bytes)
                if message.sender == rank:
                    self._local.pack(message, flat)
                else:
                    ops.append(dist.P2POp(dist.irecv, flat, message.sender))
                continue
            if (whole := direct[message]) is None:
                whole = self._staging.take(message.bytes)
                self._local.pack(message, whole)
            ops.append(dist.P2POp(dist.isend, whole, place))
        return list(dist.batch_isend_irecv(ops)) if ops else []

    def _finish(self, works: Sequence[Any], filled: set[int]) -> None:
        wait_for(works, self._local.device)  # also for this rank's copies: another process reads, on another stream
        for receiver in filled:
            self._peers[receiver].hand_over()

    @property
    def _bucket_holders(self) -> Sequence[int]:
        if self._exchange is None:
            raise AssertionError("connect comes first")
        return self._exchange.bucket_holders


class _Peer:
    """An engine rank that this rank carries for: its connection and two shared buffers.

    After a failure it takes bytes and hands nothing over, so that the other trainer ranks can finish.
    """

    def __init__(self, connection: Connection, device: torch.device, timeout_s: float) -> None:
        self._connection = connection
        self._device = device
        self._timeout_s = timeout_s
        self._buffers: list[Tensor] = []
        self._used = 0
        self._filling = False
        """Whether the present buffer is not handed over so far."""
        self._unread = 0
        """Buffers that were handed over and not read so far."""
        self.failure = ""
        self.largest = 0
        """Bytes of the largest buffer so far."""

    def offer(self, size: int) -> None:
        """Make the buffers of a push and show them to the engine."""
        self._buffers = [sharing.shareable(size, self._device) for _ in range(2)]
        self.largest = max(self.largest, size)
        self._unread, self._filling = 0, False
        for buffer in self._buffers:
            self._do(partial(sharing.offer, self._connection, buffer))

    def turn(self) -> None:
        """Switch to the other buffer, after the engine has read what it held."""
        while self._unread > (0 if self._filling else 1):
            self._wait_for_answer()
        self._buffers.reverse()
        self._used, self._filling = 0, True

    def take(self, size: int) -> Tensor:
        """Return the next uint8[size] of the buffer."""
        self._used += size
        return self._buffers[0][self._used - size : self._used]

    def hand_over(self) -> None:
        """Let the engine read the oldest buffer that it has not been given."""
        self._do(partial(self._connection.send_bytes, b"filled"))
        self._unread += 1

    def wait_until_read(self) -> None:
        """Wait until the engine has read everything."""
        while self._unread:
            self._wait_for_answer()

    def free(self) -> None:
        """Free the buffers for training."""
        self._buffers = []

    def close(self) -> None:
        """Close the connection, which ends the engine's part of a push."""
        self.free()
        self._connection.close()

    def _wait_for_answer(self) -> None:
        def answer() -> None:
            if not self._connection.poll(self._timeout_s):
                raise OSError(f"no answer for {self._timeout_s:g} s")
            self._connection.recv_bytes()

        self._do(answer)
        self._unread -= 1

    def _do(self, work: Callable[[], object]) -> None:
        """Do it unless something has failed before; note the first failure."""
        if self.failure:
            return
        try:
            work()
        except (OSError, EOFError) as error:
            self.failure = f"an engine has left the push: {error or 'its connection is closed'}"


class _Entrance:
    """Accepts one connection in a thread."""

    def __init__(self, key: str) -> None:
        self._listener = Listener(("127.0.0.1", 0), authkey=key.encode())
        self._closing = False
        self._found: list[Connection] = []
        self._thread = threading.Thread(target=self._accept, name="weight-entrance", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """TCP port on the loopback address."""
        return int(self._listener.address[1])

    def connection(self) -> Connection:
        """Return the connection of the engine rank, which has announced that it is there."""
        self._thread.join()
        return self._found[0]

    def close(self) -> None:
        """Stop to listen. A connection that has been accepted stays open."""
        self._closing = True
        if self._thread.is_alive():
            socket.create_connection(self._listener.address).close()  # wakes the thread
            self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._found and not self._closing:
            with suppress(AuthenticationError, EOFError, OSError):  # a stranger
                self._found.append(self._listener.accept())
