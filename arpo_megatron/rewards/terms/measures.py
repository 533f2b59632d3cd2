"""Terms that are read off a trajectory: its format, its length, its tool calls."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from arpo_megatron.rewards.base import ResponseGroup, Score


@dataclass(frozen=True, slots=True)
class BrokenFormat:
    """-1 where the tag protocol is broken, else 0 (beside the gate: `reward.format_penalty`)."""

    needs_judge: ClassVar[bool] = False

    def values(self, group: ResponseGroup, scores: Sequence[Score]) -> list[float]:
        """One for each response."""
        return [0.0 if score.format_ok else -1.0 for score in scores]


@dataclass(frozen=True, slots=True)
class Length:
    """-(tokens after the prompt) / the most there may be: in [-1, 0]."""

    needs_judge: ClassVar[bool] = False
    max_response_tokens: int

    def values(self, group: ResponseGroup, scores: Sequence[Score]) -> list[float]:
        """One for each response."""
        return [-min(1.0, response.tokens / self.max_response_tokens) for response in group.responses]


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """-(tool calls on the path): what they cost, in units of the weight."""

    needs_judge: ClassVar[bool] = False

    def values(self, group: ResponseGroup, scores: Sequence[Score]) -> list[float]:
        """One for each response."""
        return [-float(response.calls) for response in group.responses]


@dataclass(frozen=True, slots=True)
class Overlong:
    """DAPO's soft punishment of overlong responses (arXiv 2503.14476, eq. 13).

    0 up to L_max - B tokens, from there falling in a straight line to -1 at L_max, and -1 beyond.

    Attributes:
        max_response_tokens: L_max.
        overlong_buffer: B, in tokens; 0: a fifth of L_max, the share that the paper uses.
    """

    needs_judge: ClassVar[bool] = False
    max_response_tokens: int
    overlong_buffer: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.overlong_buffer <= self.max_response_tokens:
            raise ValueError(f"overlong_buffer must be in 0..{self.max_response_tokens}, not {self.overlong_buffer}")

    def values(self, group: ResponseGroup, scores: Sequence[Score]) -> list[float]:
        """One for each response."""
        buffer = self.overlong_buffer or max(1, self.max_response_tokens // 5)
        free = self.max_response_tokens - buffer
        return [-min(1.0, max(0.0, (each.tokens - free) / buffer)) for each in group.responses]
