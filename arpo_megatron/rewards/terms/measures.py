"""Terms measured on a trajectory: its format, its length, its tool calls."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from arpo_megatron.rewards.base import ResponseGroup, Score


@dataclass(frozen=True, slots=True)
class BrokenFormat:
    """-1 if the tag protocol is broken, else 0 (in addition to the gate, `reward.format_penalty`)."""

    needs_judge: ClassVar[bool] = False

    def values(self, group: ResponseGroup, scores: Sequence[Score]) -> list[float]:
        """Return a value for each response."""
        return [0.0 if score.format_ok else -1.0 for score in scores]


@dataclass(frozen=True, slots=True)
class Length:
    """-(tokens after the prompt) / the largest allowed number: in [-1, 0]."""

    needs_judge: ClassVar[bool] = False
    max_response_tokens: int
    """Largest number of tokens after the prompt."""

    def values(self, group: ResponseGroup, scores: Sequence[Score]) -> list[float]:
        """Return a value for each response."""
        return [-min(1.0, response.tokens / self.max_response_tokens) for response in group.responses]


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """-(tool calls on the path): their cost, in units of the weight."""

    needs_judge: ClassVar[bool] = False

    def values(self, group: ResponseGroup, scores: Sequence[Score]) -> list[float]:
        """Return a value for each response."""
        return [-float(response.calls) for response in group.responses]


@dataclass(frozen=True, slots=True)
class Overlong:
    """DAPO's soft penalty on overlong responses (arXiv 2503.14476, eq. 13).

    0 up to L_max - B tokens, from there falling linearly to -1 at L_max, and -1 beyond.
    """

    needs_judge: ClassVar[bool] = False
    max_response_tokens: int
    """L_max."""
    overlong_buffer: int = 0
    """B, in tokens; 0: a fifth of L_max, the share used in the paper."""

    def __post_init__(self) -> None:
        if not 0 <= self.overlong_buffer <= self.max_response_tokens:
            raise ValueError(f"overlong_buffer must be in 0..{self.max_response_tokens}, not {self.overlong_buffer}")

    def values(self, group: ResponseGroup, scores: Sequence[Score]) -> list[float]:
        """Return a value for each response."""
        buffer = self.overlong_buffer or max(1, self.max_response_tokens // 5)
        free = self.max_response_tokens - buffer
        return [-min(1.0, max(0.0, (each.tokens - free) / buffer)) for each in group.responses]
