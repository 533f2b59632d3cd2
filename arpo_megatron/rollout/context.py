"""Objects that trees share while they grow: engine, tools, tokenizer, policy, limits."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from arpo_megatron.algorithms.branching import BranchPolicy
from arpo_megatron.engine.client import EngineClient
from arpo_megatron.engine.expert_routes import ExpertRouteSpec
from arpo_megatron.engine.request import Sampling
from arpo_megatron.rollout.limits import RolloutLimits
from arpo_megatron.rollout.tools import ToolClient


class PromptTooLongError(ValueError):
    """The prompt leaves no room for a single token."""


class ToolTextError(ValueError):
    """The tokenizer does not accept the text of a tool's answer."""


class TextCodec(Protocol):
    """Converts text to token ids without adding special tokens, and back with special tokens kept."""

    def encode(self, text: str) -> list[int]: ...  # noqa: D102

    def encode_plain(self, text: str) -> list[int]:
        """Encode text; the spelling of a special token in it becomes ordinary tokens."""

    def decode(self, token_ids: Sequence[int]) -> str: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """Objects and limits that the trees of a step share."""

    engine: EngineClient
    tools: ToolClient
    codec: TextCodec
    policy: BranchPolicy
    sampling: Sampling
    """Its seed is replaced for each path."""
    limits: RolloutLimits
    seed: int
    step: int
    on_tokens: Callable[[int], None]
    """Called with the number of tokens of each generation."""
    expert_routes: ExpertRouteSpec | None = None
    """Ask the engine for the experts that each token was sent to."""
    ready: Callable[[], Awaitable[None]] | None = None
    """Awaited before each request."""
