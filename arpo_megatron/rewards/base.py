"""The protocols of rewards and of terms that are added to them, and the data that they take and return."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from arpo_megatron.tasks.base import Task
from arpo_megatron.tree import Role, RolloutTree

if TYPE_CHECKING:
    from arpo_megatron.rewards.judge.judge import Judge


@dataclass(frozen=True, slots=True)
class Score:
    """Reward of one trajectory, with its components and its format."""

    reward: float
    """Input of the advantage."""
    accuracy: float
    """Correctness of the answer, in [0, 1]; 0 if the format hides it."""
    format_ok: bool
    """Whether the trajectory follows the tag protocol."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """Named components of the reward ("f1", "verified", "tool_bonus", a term), for the metrics."""
    answer: str | None = None
    """Content of the answer's box; None if there is none."""
    reason: str = ""
    """How the trajectory breaks the format; empty if it does not."""


@dataclass(frozen=True, slots=True)
class Response:
    """A finished trajectory as rewards see it."""

    text: str
    """Decoded text after the prompt: model and tool segments in order, tags included."""
    tokens: int = 0
    """Tokens after the prompt, model and tool together."""
    calls: int = 0
    """Tool calls on the path."""
    last_turn: str | None = None
    """Text of the model after the last tool result; None: all of `text`."""
    called: frozenset[str] = frozenset()
    """Names of the tools that were called."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Sums of the parts of the reward that an environment has given."""


@dataclass(frozen=True, slots=True)
class ResponseGroup:
    """Trajectories of one tree and their task, as rewards see them."""

    task: Task
    """Question and ground truth."""
    responses: Sequence[Response]
    """One per leaf, in the order of the tree's leaves."""
    step: int = 0
    """Finished steps of the run, for terms that change during training."""
    judge: "Judge | None" = None
    """A model judge; None: there is none."""


class Reward(Protocol):
    """Scores the trajectories of a task. Implementations hold settings only and may be called from any thread.

    An implementation is a frozen dataclass; its fields are its params. Fields named like a key of `reward`
    (`tool_bonus`, for example) take the value of that key, and `max_response_tokens` and `tools` (names) those of
    `rollout`; `protocol` is the job's `CallProtocol`. Others are set in `reward.params`.
    """

    @property
    def needs_judge(self) -> bool:
        """Whether `ResponseGroup.judge` must be set."""

    def score_group(self, group: ResponseGroup) -> list[Score]:
        """Return a score for each response."""


class Term(Protocol):
    """Computes a value per trajectory that is added to its reward with a weight. Implementations hold settings only.

    An implementation is a frozen dataclass; its fields are its params, as those of a `Reward`.
    """

    @property
    def needs_judge(self) -> bool:
        """Whether `ResponseGroup.judge` must be set."""

    def values(self, group: ResponseGroup, scores: Sequence[Score]) -> Sequence[float]:
        """Return a value for each response, given its score so far."""


def score_text(reward: Reward, text: str, task: Task) -> Score:
    """Return the score of a single decoded response, as a group of one."""
    return reward.score_group(ResponseGroup(task, [Response(text)]))[0]


def group_of(tree: RolloutTree, task: Task, decode: Callable[[list[int]], str], *, step: int = 0) -> ResponseGroup:
    """Return the trajectories of a tree as rewards see them, in the order of `tree.leaves()`.

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
        last, called = last_turn(tree, leaf)
        responses.append(Response(decode(ids), len(ids), calls, decode(last), called, environment_rewards(tree, leaf)))
    return ResponseGroup(task, responses, step)


def environment_rewards(tree: RolloutTree, leaf: int) -> dict[str, float]:
    """Return the sums of an environment's rewards over a trajectory, by name."""
    sums: dict[str, float] = {}
    for index in tree.path(leaf):
        for name, value in (tree.segments[index].rewards or {}).items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def last_turn(tree: RolloutTree, leaf: int) -> tuple[list[int], frozenset[str]]:
    """Return the model's tokens after the last tool result of a trajectory, and the names of the tools called."""
    ids: list[int] = []
    called = set()
    for index in tree.path(leaf):
        segment = tree.segments[index]
        if segment.role is Role.MODEL:
            ids += segment.token_ids.tolist()
        elif segment.role is Role.TOOL:
            ids = []
            called |= {segment.tool.name} if segment.tool is not None else set()
    return ids, frozenset(called)
