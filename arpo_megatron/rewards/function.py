"""A reward from a function of question, expected answer and trajectory."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from arpo_megatron.errors import UserError
from arpo_megatron.rewards.base import Response, ResponseGroup, Reward, Score
from arpo_megatron.rewards.judge.prompts import user_question

ScoreFunction = Callable[[str, str, Response], float | Score]
"""(question, expected answer, trajectory) -> reward. Of a number, the part in [0, 1] is also the accuracy."""


@dataclass(frozen=True, slots=True)
class FunctionReward:
    """Scores each trajectory by a function."""

    needs_judge: ClassVar[bool] = False
    function: ScoreFunction
    name: str
    """Name in messages (`reward.kind`)."""

    def score_group(self, group: ResponseGroup) -> list[Score]:
        """Return a score for each response. Raises UserError if the function fails or returns no number."""
        return [self._score(group, response) for response in group.responses]

    def _score(self, group: ResponseGroup, response: Response) -> Score:
        try:
            value = self.function(user_question(group.task), group.task.ground_truth, response)
        except Exception as error:  # the function is the user's: anything can go wrong in it
            raise UserError(f"reward.kind={self.name} failed for {group.task.id}: {error!r}") from error
        if isinstance(value, Score):
            return value
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise UserError(f"reward.kind={self.name} returned {value!r} for {group.task.id}: it must return a number")
        return Score(float(value), min(1.0, max(0.0, float(value))), format_ok=True)


def as_reward(component: Any, name: str) -> Reward:
    """Return a reward, or the reward of a function. Raises UserError if its arguments are others than three."""
    if not inspect.isfunction(component):
        reward: Reward = component
        return reward
    try:
        inspect.signature(component).bind("question", "answer", Response(""))
    except TypeError:
        raise UserError(
            f"reward.kind={name} has the arguments {inspect.signature(component)}, not (question, answer, trajectory)"
        ) from None
    return FunctionReward(component, name)
