"""Objects that trees share while they grow: engine, tools, tokenizer, policy, limits."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from arpo_megatron.algorithms.branching import BranchPolicy
from arpo_megatron.engine.client import EngineClient
from arpo_megatron.engine.expert_routes import ExpertRouteSpec
from arpo_megatron.engine.request import Sampling
from arpo_megatron.rollout.admission_gate import TreeAdmission
from arpo_megatron.rollout.environments import TreeEnvironments
from arpo_megatron.rollout.limits import RolloutLimits
from arpo_megatron.rollout.tools import ToolClient
from arpo_megatron.tasks.protocols.base import TextCodec


class PromptTooLongError(ValueError):
    """The prompt leaves no room for a single token."""


class ToolTextError(ValueError):
    """The tokenizer does not accept the text of a tool's answer."""


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
    admission: TreeAdmission | None = None
    """Lets requests pass as the engines' KV pools have room; None: all pass at once."""
    environments: TreeEnvironments | None = None
    """Environments of the tree; None: the policy calls tools."""
    ready: Callable[[], Awaitable[None]] | None = None
    """Awaited before each request."""


def routing_key(step: int, task_id: str) -> str:
    """Return the routing key of a tree's requests: it stays on one engine, whose cache has its prefixes."""
    return f"{step}/{task_id}"
