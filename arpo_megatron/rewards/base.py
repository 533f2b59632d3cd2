"""What a reward is: the finished trajectories of a task in, a `Score` for each out; and what a term adds to it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from arpo_megatron.tasks.base import Task
from arpo_megatron.tree import Role, RolloutTree

if TYPE_CHECKING:
    from arpo_megatron.rewards.judge.judge import Judge


@dataclass(frozen=True, slots=True)
class Score:
    """The verdict on one trajectory.

    Attributes:
        reward: what the advantage is computed from.
        accuracy: how right the answer is, in [0, 1]; 0 where the format hides it.
        format_ok: whether the trajectory keeps to the tag protocol.
        parts: named numbers that went into the reward ("f1", "verified", "tool_bonus", a term), for the log.
        answer: content of the answer's box, None where there is none.
        reason: what breaks the format, empty where nothing does.
    """

    reward: float
    accuracy: float
    format_ok: bool
    terms: Mapping[str, float] = field(default_factory=dict)
    answer: str | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Response:
    """A finished trajectory as rewards see it.

    Attributes:
        text: decoded, after the prompt: model and tool segments in order, tags included.
        tokens: after the prompt, model and tool together.
        calls: tool calls on the path.
    """

    text: str
    tokens: int = 0
    calls: int = 0


@dataclass(frozen=True, slots=True)
class ResponseGroup:
    """The trajectories of one tree.

    Attributes:
        task: question and ground truth.
        responses: in the order of the tree's leaves.
        step: finished steps of the run, for what changes in its course.
        judge: a model that can be asked; None: there is none.
    """

    task: Task
    responses: Sequence[Response]
    step: int = 0
    judge: "Judge | None" = None


class Reward(Protocol):
    """Scores the trajectories of a task. Implementations hold settings only and may be called from any thread.

    A frozen dataclass whose fields are its numbers: those that are keys of `reward` (`tool_bonus`, say) have the value
    given there, `max_response_tokens` that of `rollout`, others are in `reward.params`.
    """

    @property
    def needs_judge(self) -> bool:
        """Whether `ResponseGroup.judge` must be one."""

    def score_group(self, group: ResponseGroup) -> list[Score]:
        """A score for each response."""


class Term(Protocol):
    """A number for each trajectory that is added to its reward with a weight. Likewise settings only.

    A frozen dataclass whose fields are its numbers, as those of a `Reward` are.
    """

    @property
    def needs_judge(self) -> bool:
        """Whether `ResponseGroup.judge` must be one."""

    def values(self, group: ResponseGroup, scores: Sequence[Score]) -> Sequence[float]:
        """A value for each response, given what the reward has made of it so far."""


def score_text(reward: Reward, text: str, task: Task) -> Score:
    """The score of a single decoded response."""
    return reward.score_group(ResponseGroup(task, [Response(text)]))[0]


def group_of(tree: RolloutTree, task: Task, decode: Callable[[list[int]], str], *, step: int = 0) -> ResponseGroup:
    """The trajectories of a tree as rewards see them, in the order of `tree.leaves()`.

    Args:
        tree: a finished tree of that task.
        task: question and ground truth.
        decode: token ids -> text, special tokens kept.
        step: finished steps of the run.
    """
    prompt = len(tree.segments[0])
    responses = []
    for leaf in tree.leaves():
        ids = tree.path_tokens(leaf)[prompt:].tolist()
        calls = sum(tree.segments[index].role is Role.TOOL for index in tree.path(leaf))
        responses.append(Response(decode(ids), len(ids), calls))
    return ResponseGroup(task, responses, step)
