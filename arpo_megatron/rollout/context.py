"""What the trees of one call share while they grow: engine, tools, tokenizer, policy, limits."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from arpo_megatron.algorithms.branching import BranchPolicy
from arpo_megatron.engine.client import EngineClient
from arpo_megatron.engine.expert_routes import ExpertRouteSpec
from arpo_megatron.engine.request import Sampling
from arpo_megatron.rollout.tools import ToolClient
from arpo_megatron.tasks.tags import calls as protocol


class PromptTooLongError(ValueError):
    """The prompt leaves no room for a single token."""


class ToolTextError(ValueError):
    """The tokenizer does not take what a tool has answered."""


class TextCodec(Protocol):
    """Text to token ids without special tokens added, and back with special tokens kept."""

    def encode(self, text: str) -> list[int]: ...  # noqa: D102

    def encode_plain(self, text: str) -> list[int]:
        """The same, but what spells a special token in the text becomes ordinary ones."""

    def decode(self, token_ids: Sequence[int]) -> str: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """Bounds of a trajectory (`config.RolloutConfig`), and `max_length`, those of prompt and response together.

    With `sessions` a python call begins with the state that the one before it on its path has left.
    """

    max_length: int
    max_response_tokens: int
    max_tool_calls: int
    max_tool_tokens: int
    tool_timeout_s: float
    stop_at_answer: bool = False
    sessions: bool = False

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end a generation."""
        return (*protocol.STOP_STRINGS, *([protocol.ANSWER_STOP] if self.stop_at_answer else []))


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """What all trees of one call share. `seed` is the run's; `sampling.seed` is replaced for every place.

    With `routes` the engine tells to which experts it sent each token. `ready` is awaited before each request.
    """

    engine: EngineClient
    tools: ToolClient
    codec: TextCodec
    policy: BranchPolicy
    sampling: Sampling
    limits: RolloutLimits
    seed: int
    step: int
    on_tokens: Callable[[int], None]
    routes: ExpertRouteSpec | None = None
    ready: Callable[[], Awaitable[None]] | None = None
