"""Interface of the ways in which the rounds of a push reach the engines."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from arpo_megatron.engine.admin import EngineEndpoint
from arpo_megatron.engine.wire.boxes import WeightMessage
from arpo_megatron.weights.reshard import Round


@dataclass(frozen=True, slots=True)
class Exchange:
    """A plan, and the engines that it is for."""

    name: str
    """Unique name; an engine accepts exchanges of its newest plan only."""
    engines: tuple[EngineEndpoint, ...]
    rounds: Sequence[Round]
    bucket_holders: Sequence[int]
    """For each engine rank the process that holds its bucket: in `ipc` the trainer rank that carries for it; see
    `reshard.plan_rounds`."""

    def messages_of(self, rank: int) -> list[list[WeightMessage]]:
        """Return, round by round, the messages that a trainer rank sends or carries."""
        holders = self.bucket_holders
        return [
            [each for send in turn if rank in (send.sender, holders[send.receiver]) for each in send.messages()]
            for turn in self.rounds
        ]

    def ranks_of(self, engine: int) -> range:
        """Return the indices of an engine's ranks among the ranks of all engines."""
        first = sum(each.ranks for each in self.engines[:engine])
        return range(first, first + self.engines[engine].ranks)


class Transport(Protocol):
    """A way to send the rounds; every trainer rank has its end of it."""

    @property
    def largest_buffer(self) -> int:
        """Bytes of the larger of this rank's two buffers. A round has one of them for all that it needs."""

    def connect(self, exchange: Exchange) -> None:
        """Give the engines their part of the plan and connect to them. All ranks call it.

        Raises:
            WeightPushError: on all ranks.
        """

    def send(self) -> int:
        """Send this rank's part; return the number of requests with which every engine received weights.

        Raises:
            WeightPushError: on this rank; the other ranks may have sent their part.
        """

    def close(self) -> None:
        """Disconnect; engines that have ended are not an error. A later push must connect."""
