"""Section `evaluation`: the held-out evaluation during training."""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from arpo_megatron.config.fields import STRICT, NonNegative, NonNegativeFloat, Positive, PositiveFloat


@dataclass(frozen=True, config=STRICT)
class EvalConfig:
    """Held-out evaluation through the engines and the tool service."""

    tasks: Positive = 200
    """Number of held-out tasks, with one trajectory each."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling: probability mass of the tokens that are drawn from."""
    top_k: NonNegative = 0
    """Number of the most likely tokens that are drawn from; 0: all."""
    repetition_penalty: PositiveFloat = 1.0
    """The logits of tokens that the engine has sampled in the same turn are divided by it (multiplied if negative).
    Ignored with temperature 0: SGLang sometimes counts a token as sampled one step late, so greedy answers would vary.
    """
    max_tool_calls: NonNegative | None = None
    """Tool calls per trajectory of an evaluation; None: `rollout.max_tool_calls`."""
    max_calls_by_tool: dict[str, NonNegative] | None = field(default=None, hash=False)
    """Calls per trajectory of single tools; None: `rollout.max_calls_by_tool`."""
    max_turn_tokens: Positive | None = None
    """Tokens of one turn of the model; None: `rollout.max_turn_tokens`."""
    max_response_tokens: Positive | None = None
    """Tokens after the prompt; None: `rollout.max_response_tokens`."""
    max_tool_tokens: Positive | None = None
    """Tokens of one tool result; None: `rollout.max_tool_tokens`."""
    answer_tokens: NonNegative | None = None
    """Tokens that `at_limit=answer_now` keeps for the answer; None: `rollout.answer_tokens`."""
    refuse_repeated: tuple[str, ...] | None = None
    """Tools whose repeated calls are not executed; None: `rollout.refuse_repeated`."""
    tool_timeout_s: PositiveFloat | None = None
    """Deadline of a tool call in seconds; None: `rollout.tool_timeout_s`."""
    stop_at_answer: bool | None = None
    """End a trajectory at </answer>; None: `rollout.stop_at_answer`."""
    at_limit: Literal["end", "answer_now"] | None = None
    """Treatment of a call beyond a limit; None: `rollout.at_limit`."""
    before: bool = True
    """Evaluate before the first step."""
    after: bool = True
    """Evaluate after the last step."""
    every: Positive | None = None
    """Evaluate after every n-th step, too; None: no."""

    @property
    def penalty(self) -> float:
        """Return `repetition_penalty`, or 1 if sampling is greedy."""
        return self.repetition_penalty if self.temperature > 0 else 1.0
