"""A few trajectories of a step as texts, for people who follow a run elsewhere than on its page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from arpo_megatron.rewards.base import group_of
from arpo_megatron.rewards.scored_tree import ScoredTree


@dataclass(frozen=True, slots=True)
class SampledLeaf:
    """A trajectory with its scores; the fields are the columns of a table."""

    step: int
    task: str
    question: str
    expected: str
    response: str
    answer: str
    reward: float
    accuracy: float
    calls: int


def sample_leaves(
    trees: Sequence[ScoredTree], decode: Callable[[Sequence[int]], str], step: int, count: int
) -> list[SampledLeaf]:
    """Return one trajectory of each of the first `count` trees, another one in every step.

    Args:
        trees: trees that the step trains.
        decode: token ids -> text.
        step: finished steps, with this one.
        count: most trajectories.
    """
    sampled = []
    for item in trees[:count]:
        leaf = step % len(item.rewards)
        response = group_of(item.tree, item.task, decode).responses[leaf]
        answer = item.answers[leaf] if item.answers else None
        sampled.append(
            SampledLeaf(
                step,
                item.task.id,
                item.task.messages[-1]["content"] if item.task.messages else "",
                " or ".join(item.task.answers),
                response.text,
                "" if answer is None else answer,
                float(item.rewards[leaf]),
                float(item.accuracies[leaf]),
                response.calls,
            )
        )
    return sampled
