"""What a reward is: the decoded text after the prompt and the task in, a `Score` out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from arpo_megatron.tasks.base import Task
from arpo_megatron.tree import RolloutTree


@dataclass(frozen=True, slots=True)
class Score:
    """The verdict on one trajectory.

    Attributes:
        reward: what the advantage is computed from.
        accuracy: how right the answer is, in [0, 1]; 0 where the format hides it.
        format_ok: whether the trajectory keeps to the tag protocol.
        parts: named numbers that went into the reward ("f1", "exact_match", "verified", "tool_bonus"), for the log.
        answer: content of the answer's box, None where there is none.
        reason: what breaks the format, empty where nothing does.
    """

    reward: float
    accuracy: float
    format_ok: bool
    parts: Mapping[str, float] = field(default_factory=dict)
    answer: str | None = None
    reason: str = ""


class Reward(Protocol):
    """Scores a finished trajectory. Implementations hold settings only and may be called from any thread."""

    def score_text(self, response: str, task: Task) -> Score:
        """Score the decoded text after the prompt: model and tool segments in order, tags included."""


def score_tree(reward: Reward, tree: RolloutTree, task: Task, decode: Callable[[list[int]], str]) -> list[Score]:
    """The score of every leaf, in the order of `tree.leaves()`.

    Args:
        reward: how a trajectory is scored.
        tree: a finished tree of that task.
        task: question and ground truth.
        decode: token ids -> text, special tokens kept.
    """
    prompt_length = len(tree.segments[0])
    texts = [decode(tree.path_tokens(leaf)[prompt_length:].tolist()) for leaf in tree.leaves()]
    return [reward.score_text(text, task) for text in texts]
