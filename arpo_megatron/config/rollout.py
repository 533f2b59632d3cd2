"""Limits and sampling of a trajectory, and how trees overlap with training."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from arpo_megatron.config.fields import STRICT, NonNegative, NonNegativeFloat, Positive, PositiveFloat


@dataclass(frozen=True, config=STRICT)
class RolloutConfig:
    """Limits and sampling of a trajectory."""

    temperature: PositiveFloat = 1.0
    """Sampling temperature."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling; training wants 1."""
    max_tool_calls: NonNegative = 3
    """Tool calls a trajectory, so one turn of the model more; a call beyond it ends the trajectory."""
    max_response_tokens: Positive = 4096
    """Tokens after the prompt, model and tool together."""
    stop_at_answer: bool = False
    """End a trajectory at </answer> instead of waiting for the end-of-sequence token (which then is not learnt)."""
    max_tool_tokens: Positive = 1024
    """A longer tool result is cut to this many tokens."""
    tool_timeout_s: PositiveFloat = 30.0
    """Deadline of a tool call in seconds; the model reads that it timed out."""
    max_staleness: NonNegative = 0
    """0: a step trains the trees that it began. n: twice a step's trees are under way, also while the trainer trains,
    and a tree is trained at most n versions of the policy after the one that began it."""
    across_push: Literal["keep", "drain"] = "keep"
    """What a weight push does to trees under way: they go on with the new weights from where they were, or are finished
    first."""
    stale: Literal["wait", "drop"] = "wait"
    """What becomes of trees that take too long for `max_staleness` (> 0). `wait`: the step waits for them. `drop`:
    it goes on; they are left out when they finish, counted and replaced. What older weights have sampled of a tree that
    is trained is corrected by `algorithm.trajectory_weight_limit` either way."""
    oversampling: NonNegativeFloat = 0.0
    """Share of trees begun beyond a step's need; the last to finish are given up. Favours short trajectories. Not with
    `max_staleness` > 0."""
    max_refills: NonNegative = 8
    """Rounds of new tasks in a step for those that failed or were left out, before it goes on with fewer. (A run
    that is resumed within a step has as many again.)"""
    journal_every_s: NonNegativeFloat = 60.0
    """Seconds between two writings of what a step's trees have sampled, while it waits for them: what a run that is
    killed then may have to sample again."""
