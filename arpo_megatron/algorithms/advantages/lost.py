"""Rewards minus their mean, when failed tool calls have cost a tree some of its trajectories.

A trajectory with many tool calls is lost more often than one without. Rewards and gradients of the remaining ones alone
would therefore favour trajectories that call no tool, and two trajectories that share a call remain together more often
than two others. Each pair is weighted by the inverse of its chance to remain (Horvitz and Thompson, 1952):

    A_i = 1/M * sum_j (r_i - r_j) / pi_ij        pi_ij = product of p over the calls that i or j needs

The calls that a trajectory needs are those on its path, and those that decided about its start (`RolloutTree.needs`).
Equal calls that share one execution count once, and not at all if their result was known before the tree
(`RolloutTree.same_calls`). M is the number of trajectories without failures, p the share of a tool's executed calls
that are answered (`RolloutTree.answered_shares`). With the weights 1/(M |o_i|) of `loss_aggregation=sequence-mean`, the
expected gradient over independent failures is then exactly that without failures, with pooled and with reserved forks
(`tests/rollout/test_lost_branches.py` enumerates a small policy).
Without failed calls, A_i = r_i - mean(r).
"""

import numpy as np

from arpo_megatron.algorithms.credit import TreeShape
from arpo_megatron.algorithms.types import Floats
from arpo_megatron.tree import FAILED_CALL, RolloutTree

MAX_PAIR_WEIGHT = 10.0
"""Bound of 1 / pi_ij: in an outage, single trajectories would otherwise get any weight."""
_ANSWERED = ("ok", "error", "timeout", "refused")  # other calls never reach the tool service


def centre(tree: RolloutTree, rewards: Floats) -> Floats:
    """Return rewards minus their mean, corrected for lost trajectories.

    Args:
        tree: the trajectories of one task.
        rewards: float64[leaves], finite.

    Returns:
        float64[leaves]; exact zeros if there is nothing to compare.
    """
    if len(rewards) < 2 or np.ptp(rewards) == 0.0:
        return np.zeros_like(rewards)
    if tree.lost is None and not tree.answered_shares:
        return np.asarray(rewards - rewards.mean())
    differences = rewards[:, None] - rewards[None, :]
    return np.asarray((differences * pair_weights(tree)).sum(1) / tree.planned)


def pair_weights(tree: RolloutTree) -> Floats:
    """Return float64[leaves, leaves], the inverse chance that both trajectories are in the tree, at most
    `MAX_PAIR_WEIGHT`.
    """
    grown, rates = tree.grown, tree.answered_shares
    shape = TreeShape(grown)
    needed = shape.on_path.copy()
    for row, leaf in enumerate(shape.leaves):
        for segment in grown.path(int(leaf)):
            needed[row, list(grown.needs.get(segment, ()))] = True
    for call, first in grown.same_calls.items():
        if first >= 0:
            needed[:, first] |= needed[:, call]
        needed[:, call] = False
    tools = [segment.tool for segment in grown.segments]
    remain = [record is None or record.status != FAILED_CALL for record in (tools[leaf] for leaf in shape.leaves)]
    calls = [None if tool is None or tool.status not in _ANSWERED else tool.name for tool in tools]
    logs = np.array([0.0 if tool is None else -np.log(rates.get(tool, 1.0)) for tool in calls])
    needed = needed[remain]
    pairs = needed[:, None, :] | needed[None, :, :]
    return np.asarray(np.minimum(np.exp(pairs @ logs), MAX_PAIR_WEIGHT))
