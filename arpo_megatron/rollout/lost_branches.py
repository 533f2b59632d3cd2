"""Branches that end with a failed tool call: they leave the tree, and what the estimator needs to know stays.

A call fails if the tool service, the network or a provider fails, also when it is repeated. There is no result that the
model could read, so the path cannot continue, and its text must not be trained as if it had ended there. It loses

- the segments that no other trajectory shares;
- the forks that depend on it: those that are reserved for the path, or those that a pool grants later
  (`PooledForks`), which it would share with the path.

So a tree with failed calls is the tree without failures minus some of its trajectories. A trajectory is in it exactly
if all calls that it needs were answered: those on its path, and those of other paths that decided about its start
(`RolloutTree.needs`). `algorithms/advantages/lost.py` weighs the remaining ones accordingly.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from arpo_megatron.algorithms.branching import PathKey, ended_path_key
from arpo_megatron.tree import FAILED_CALL, LostBranches, Role, RolloutTree

_KEPT = 0.9
"""Weight of a report's calls after the next report."""


class AllBranchesLostError(RuntimeError):
    """Failed tool calls have ended every path of the tree."""


class AnsweredShares:
    """The share of calls of each tool that are answered, over about the last `1 / (1 - _KEPT)` reports."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, bool], float] = {}

    def add(self, calls: Mapping[tuple[str, bool], int]) -> dict[str, float]:
        """Add the calls of all trees of a report, failed trees included; return the shares of tools whose calls fail.

        Args:
            calls: their number by tool and whether they were answered.
        """
        found = defaultdict(float, {key: count * _KEPT for key, count in self._calls.items()})
        for key, count in calls.items():
            found[key] += count
        self._calls = dict(found)
        failing = {tool for (tool, answered), count in self._calls.items() if count and not answered}
        return {tool: found[tool, True] / (found[tool, True] + found[tool, False]) for tool in sorted(failing)}


def lost_message(reasons: Mapping[str, str]) -> str:
    """Return one line about a tree without trajectories, given why calls have failed, by tool."""
    why = "; ".join(f"{tool}: {reason}" for tool, reason in reasons.items())
    return f"failed tool calls have ended all trajectories ({why or 'see an earlier message'})"


def needed_calls(
    tree: RolloutTree, keys: Sequence[PathKey], *, probed: bool, shared_round: int | None
) -> dict[int, tuple[int, ...]]:
    """Return `RolloutTree.needs` of a tree that has grown.

    Args:
        tree: the tree.
        keys: path key of each segment.
        probed: all trajectories but the first could start only when that one had ended.
        shared_round: see `ForkBudget`.
    """
    segments, children = tree.segments, tree.children()
    is_tool = [segment.role is Role.TOOL for segment in segments]
    # Continuations have the key of the segment that they continue; the last one ends the path.
    ends = {key: index for index, key in enumerate(keys) if segments[index].role is Role.MODEL}
    fresh = {first: ended for first in children[0] if (ended := ended_path_key(keys[first])) is not None}
    rounds = [0] * len(segments)  # tool results up to a segment; negative in fresh trajectories, which do not fork
    for index, segment in enumerate(segments[1:], start=1):
        rounds[index] = -len(segments) if index in fresh else rounds[segment.parent] + is_tool[index]
    needs: dict[int, tuple[int, ...]] = {}

    def calls_of(leaf: int) -> tuple[int, ...]:
        path = tree.path(leaf)
        return (
            *(index for index in path if is_tool[index]),
            *(call for index in path for call in needs.get(index, ())),
        )

    def calls_until(last: int) -> tuple[int, ...]:
        return tuple(index for index, tool in enumerate(is_tool) if tool and 0 < rounds[index] <= last)

    for first in children[0]:
        if ended := fresh.get(first):
            needs[first] = calls_of(ends[ended])
        elif first in fresh and shared_round is not None:
            needs[first] = calls_until(max(rounds))
        elif first not in fresh and probed and first != 1:
            needs[first] = calls_of(tree.leaves()[0])  # the probe does not fork
    for tool, below in enumerate(children):
        if is_tool[tool] and shared_round is not None and rounds[tool] >= shared_round:
            needs |= dict.fromkeys(below[1:], calls_until(rounds[tool]))
    return needs


def without_lost_branches(grown: RolloutTree, trajectories: int, reasons: Mapping[str, str]) -> RolloutTree:
    """Return the tree without the branches that failed calls have ended.

    Args:
        grown: the tree with them.
        trajectories: planned trajectories that are lost.
        reasons: why calls have failed, by tool.

    Raises:
        AllBranchesLostError: no trajectory is left.
    """
    children = grown.children()
    kept = [segment.tool is None or segment.tool.status != FAILED_CALL for segment in grown.segments]
    for index in reversed(range(len(kept))):
        if children[index]:
            kept[index] = any(kept[child] for child in children[index])
    if not kept[0]:
        raise AllBranchesLostError(lost_message(reasons))
    root = grown.segments[0]
    tree = RolloutTree(grown.task_id, root.token_ids, routes=root.routes, step=grown.step, seconds=grown.seconds)
    places = {0: 0}
    for index, segment in enumerate(grown.segments):
        if index and kept[index]:
            places[index] = tree.append(places[segment.parent], segment)
    tree.lost = LostBranches(grown, trajectories)
    return tree
