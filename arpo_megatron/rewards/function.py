"""A reward from a function of question, expected answer and trajectory."""

import inspect
import math
import numbers
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from arpo_megatron.errors import UserError
from arpo_megatron.rewards.base import Response, ResponseGroup, Reward, Score
from arpo_megatron.rewards.judge.prompts import user_question

ScoreFunction = Callable[[str, str, Response], float | Score]
"""(question, expected answer, trajectory) -> reward. Of a number, the part in [0, 1] is also the accuracy.

If a task has several right answers, it is called with each, and the largest reward counts."""


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
        scores = [self._score_one(group, answer, response) for answer in group.task.answers]
        return max(scores, key=lambda score: score.reward)

    def _score_one(self, group: ResponseGroup, answer: str, response: Response) -> Score:
        try:
            value = self.function(user_question(group.task), answer, response)
        except Exception as error:  # the function is the user's: anything can go wrong in it
            where = _place(error, inspect.unwrap(self.function).__code__.co_filename)
            raise UserError(f"reward.kind={self.name} failed for {group.task.id}: {error!r}{where}") from error
        returned = (value.reward, value.accuracy) if isinstance(value, Score) else (value,)
        if not all(isinstance(each, numbers.Real | np.bool_) and math.isfinite(each) for each in returned):
            raise UserError(f"reward.kind={self.name} returned {value!r} for {group.task.id}: it must return a number")
        if isinstance(value, Score):
            return value
        return Score(float(value), min(1.0, max(0.0, float(value))), format_ok=True)


def as_reward(component: Any, name: str) -> Reward:
    """Return a reward, or the reward of a function. Raises UserError if it is async or takes other arguments."""
    if not inspect.isfunction(component):
        reward: Reward = component
        return reward
    try:
        inspect.signature(component).bind("question", "answer", Response(""))
    except TypeError:
        raise UserError(
            f"reward.kind={name} has the arguments {inspect.signature(component)}, not (question, answer, trajectory)"
        ) from None
    if inspect.iscoroutinefunction(component):
        raise UserError(f"reward.kind={name} is an `async def`: write `def`, and wait for results inside of it")
    return FunctionReward(component, name)


def _place(error: Exception, file: str) -> str:
    """Return file and line of the user's code that raised the error, "" if the function itself raised nothing."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" ({file}, line {lines[-1]})" if lines else ""
