"""A dialogue with a user who follows a script: an environment that is replayed."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from arpo_megatron.tasks.base import Message, Task
from arpo_megatron.tasks.environments.base import Step, plain

_SYSTEM = (
    "Talk to the user until you know what they need. Then write it between <answer> and </answer>. Ask for one thing a "
    "turn; the user answers nothing else."
)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(slots=True)
class ScriptedUser:
    """A user who answers questions by key words, and gives each answer once. The ground truth is what the user needs.

    The reward is `correct` (1 or 0) of the answer, and `turn_penalty` for each question.
    """

    replies: Mapping[str, str] = field(default_factory=dict)
    """Key word -> reply to a question with that word; the first that was not given yet."""
    otherwise: str = "I do not know."
    """Reply to any other question."""
    turn_penalty: float = 0.0
    """Part of the reward for each question; not positive."""
    replayable: bool = True
    _answers: frozenset[str] = field(default=frozenset(), init=False)
    _given: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        if self.turn_penalty > 0:
            raise ValueError("it must not be positive")

    def reset(self, task: Task) -> Sequence[Message]:
        """Begin with the user's first message."""
        self._answers, self._given = frozenset(map(plain, task.answers)), set()
        return [{"role": "system", "content": _SYSTEM}, task.messages[-1]]

    def step(self, action: str) -> Step:
        """Reply to a question, or score the answer."""
        if (answer := _ANSWER.search(action)) is not None:
            right = plain(answer[1]) in self._answers
            return Step("", done=True, rewards={"correct": float(right)})
        asked = action.casefold()
        word = next((each for each in self.replies if each.casefold() in asked and each not in self._given), None)
        if word is None:
            return Step(self.otherwise, rewards={"turns": self.turn_penalty})
        self._given.add(word)
        return Step(self.replies[word], rewards={"turns": self.turn_penalty})

    def close(self) -> None:
        """A dialogue holds nothing that must be freed."""
