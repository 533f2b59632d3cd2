"""Bare exchange of a push's plan: its messages between the same number of processes, which do nothing else.

Each byte has a place of its own at its trainer rank and at the process that stands for its engine rank, in memory that
is there already. Two rounds are in flight, as in a push.

    network   every message goes from its trainer rank to its engine rank by gloo
    ipc       it goes to the engine rank's carrier by gloo, or by a copy if the carrier sends it, into one of two shared
              buffers; the engine rank copies its part of a round from there. Each exchange makes its buffers, as each
              push does
"""

import secrets
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing.connection import Connection
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from arpo_megatron.bench import bare
from arpo_megatron.engine.wire import sharing
from arpo_megatron.engine.wire.connections import Listener, connect

if TYPE_CHECKING:  # they import Megatron, which takes the receivers seconds
    from arpo_megatron.weights.control import Control
    from arpo_megatron.weights.transports import Exchange

_CPU = torch.device("cpu")
_START_S = 120.0
"""Longest start of a process."""
_SIGNAL = b"."


@dataclass(frozen=True, slots=True)
class _Plan:
    """The messages of a push."""

    rounds: Sequence[Sequence[tuple[int, int, int]]]
    """Sender, receiver and bytes of each message, by round."""
    holders: Sequence[int]
    """For each receiver the process that its messages are sent to: its carrier, or itself."""
    trainers: int
    """Number of trainer ranks, which come first among the processes."""

    @property
    def processes(self) -> int:
        return self.trainers + len(self.holders)

    def in_buffer(self, turn: int, receiver: int) -> tuple[int, int]:
        """Return where a receiver's bytes of a round begin and end in its carrier's buffer: one after the other."""
        carried = [each for each in self.rounds[turn] if self.holders[each[1]] == self.holders[receiver]]
        ends = [0, *accumulate(count for _, _, count in carried)]
        mine = [index for index, (_, to, _) in enumerate(carried) if to == receiver]
        return (ends[mine[0]], ends[mine[-1] + 1]) if mine else (0, 0)


class BareExchange:
    """One trainer rank's end. All ranks make one and call its methods together.

    Args:
        control: the trainer's ranks; rank 0 starts a process for each engine rank.
        exchange: the plan of a push, and who holds the buckets.
    """

    def __init__(self, control: "Control", exchange: "Exchange") -> None:
        rank = self._rank = control.rank
        rounds = [
            [(each.sender, each.receiver, each.bytes) for send in turn for each in send.messages()]
            for turn in exchange.rounds
        ]
        plan = self._plan = _Plan(rounds, exchange.bucket_holders, control.ranks)
        if rank == 0:
            self._store = bare.make_store(plan.processes)
        port, key = control.on_rank_zero(lambda: (self._store.port, secrets.token_hex(16)))
        listeners = {receiver: Listener(key) for receiver, holder in enumerate(plan.holders) if holder == rank}
        ports: dict[int, int] = {}
        for of_rank in control.gather({receiver: each.port for receiver, each in listeners.items()}):
            ports |= of_rank
        receivers = range(len(plan.holders) if rank == 0 else 0)
        self._processes = [bare.start_receiver(_receive, plan, each, port, ports.get(each), key) for each in receivers]
        self._group = bare.join(port, rank, plan.processes)
        size = sum(count for turn in rounds for sender, _, count in turn if sender == rank)
        self._source = torch.ones(size, dtype=torch.uint8)
        carried = max((plan.in_buffer(turn, each)[1] for turn in range(len(rounds)) for each in listeners), default=0)
        self._carried = carried
        self._buffers: list[Tensor] = []
        self._peers = {receiver: _Peer(listener) for receiver, listener in listeners.items()}

    def seconds(self) -> float:
        """Return the seconds of one exchange, until every receiver has everything."""
        bare.meet(self._group, more=True)
        started = perf_counter()
        self._buffers = [sharing.shareable(self._carried, _CPU) for _ in range(2 if self._peers else 0)]
        for peer in self._peers.values():
            peer.offer(self._buffers)
        sent, open_rounds = 0, list[tuple[int, list[Any]]]()
        for turn in range(len(self._plan.rounds)):
            works, sent = self._start(turn, sent)
            open_rounds.append((turn, works))
            while open_rounds and (len(open_rounds) > 1 or not works):
                self._finish(*open_rounds.pop(0))
        for turn, works in open_rounds:
            self._finish(turn, works)
        for peer in self._peers.values():
            peer.wait_until_read()
        bare.meet(self._group, more=True)
        elapsed = perf_counter() - started
        bare.meet(self._group, more=True)  # the receivers check what has arrived, which must not slow down a push
        return elapsed

    def close(self) -> None:
        """End the receivers. Raises RuntimeError: one of them has not received everything."""
        bare.meet(self._group, more=False)
        for process in self._processes:
            process.join()
            if process.exitcode:
                raise RuntimeError("a bare exchange has left bytes out")

    def _start(self, turn: int, sent: int) -> tuple[list[Any], int]:
        """Start a round; return its operations, and how many bytes of the source have been sent with it."""
        for peer in self._peers.values():
            peer.wait_until_read(turn - 2)
        works, used = [], 0
        for sender, receiver, count in self._plan.rounds[turn]:
            holder = self._plan.holders[receiver]
            source = self._source[sent : sent + count]
            if holder == self._rank:
                target = self._buffers[turn % 2][used : used + count]
                used += count
                if sender == self._rank:
                    target.copy_(source)
                else:
                    works.append(self._group.recv([target], sender, 0))
            elif sender == self._rank:
                works.append(self._group.send([source], holder, 0))
            sent += count if sender == self._rank else 0
        return works, sent

    def _finish(self, turn: int, works: Sequence[Any]) -> None:
        """Wait for a round's operations, and let the receivers read it."""
        for work in works:
            work.wait()
        for receiver, peer in self._peers.items():
            if self._plan.in_buffer(turn, receiver)[1]:
                peer.hand_over(turn)


class _Peer:
    """A receiver that this rank carries for."""

    def __init__(self, listener: Listener) -> None:
        self._connection = listener.connection(_START_S)
        listener.close()
        self._unread: deque[int] = deque()
        """Rounds that were handed over and not read yet."""

    def offer(self, buffers: Sequence[Tensor]) -> None:
        for buffer in buffers:
            sharing.offer(self._connection, buffer)

    def hand_over(self, turn: int) -> None:
        self._connection.send_bytes(_SIGNAL)
        self._unread.append(turn)

    def wait_until_read(self, last: int | None = None) -> None:
        """Wait until all rounds up to `last` have been read; None: all that were handed over."""
        while self._unread and (last is None or self._unread[0] <= last):
            self._connection.recv_bytes()
            self._unread.popleft()


def _receive(plan: _Plan, receiver: int, port: int, carrier_port: int | None, key: str) -> None:
    """Run the process that stands for an engine rank."""
    torch.set_num_threads(1)
    group = bare.join(port, plan.trainers + receiver, plan.processes)
    size = sum(count for turn in plan.rounds for _, to, count in turn if to == receiver)
    target = torch.zeros(size, dtype=torch.uint8)
    connection, whole = None if carrier_port is None else connect(carrier_port, key), True
    while bare.meet(group, more=True):
        if connection is None:
            _from_group(plan, receiver, group, target)
        else:
            _from_memory(plan, receiver, connection, target)
        bare.meet(group, more=True)
        whole &= bool(target.all())
        target.zero_()
        bare.meet(group, more=True)
    if not whole:
        sys.exit(1)


def _from_group(plan: _Plan, receiver: int, group: Any, target: Tensor) -> None:
    start, before = 0, list[Any]()
    for turn in plan.rounds:
        works = []
        for sender, to, count in turn:
            if to == receiver:
                works.append(group.recv([target[start : start + count]], sender, 0))
                start += count
        for work in before:
            work.wait()
        before = works
    for work in before:
        work.wait()


def _from_memory(plan: _Plan, receiver: int, connection: Connection, target: Tensor) -> None:
    buffers, start = [sharing.accept(connection, _CPU) for _ in range(2)], 0
    for turn in range(len(plan.rounds)):
        first, last = plan.in_buffer(turn, receiver)
        if last:
            connection.recv_bytes()
            target[start : start + last - first].copy_(buffers[turn % 2][first:last])
            connection.send_bytes(_SIGNAL)
            start += last - first
