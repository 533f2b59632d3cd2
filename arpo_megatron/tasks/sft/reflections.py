"""Reflection data: a wrong turn of a tree, then a sentence that admits it, then the right branch next to it.

Agent-R (arXiv 2501.11425) cuts a failed trajectory at its first error, adds a revision signal, and continues with a
successful trajectory from the same node of its search tree. It lets the model find the error. In a rollout tree the
fork shows it: the first turn of a branch that only leads to failures, next to a branch with a success.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from arpo_megatron.tree import Role, RolloutTree
from arpo_megatron.utils.table_reader import BadRowError

CONTEXT, MODEL = "context", "model"
"""Roles of a part in a row: read, and learned."""


def reflection_rows(tree: RolloutTree, solved: Sequence[bool], reflection: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield a row of token parts for each branch that has only failed next to a branch with a success.

    The reflection and the right continuation are learned; prompt, shared prefix and wrong turn are context. A wrong
    turn without an answered call is left out, because nothing can follow it. Of several successes the shortest is
    taken.

    Args:
        tree: a finished tree.
        solved: for each leaf, in the order of `tree.leaves()`, whether it is right.
        reflection: tokens of the sentence between both branches.
    """
    children, right = tree.children(), _shortest_success(tree, solved)
    for node, below in enumerate(children):
        branches = [child for child in below if tree.segments[child].role is Role.MODEL]
        good = [right[child] for child in branches if child in right]
        if not good:
            continue
        leaf = min(good, key=lambda own: len(tree.path_tokens(own)))
        rest = tree.path(leaf)[len(tree.path(node)) :]
        for child in branches:
            wrong = _answered_turn(tree, children, child)
            if child in right or not wrong:
                continue
            read = [*tree.path(node), *wrong]
            parts = [{"role": CONTEXT, "ids": [int(own) for index in read for own in tree.segments[index].token_ids]}]
            parts.append({"role": MODEL, "ids": list(reflection)})
            for index in rest:
                segment = tree.segments[index]
                role = MODEL if segment.role is Role.MODEL else CONTEXT
                parts.append({"role": role, "ids": segment.token_ids.tolist()})
            yield {"id": tree.task_id, "tokens": parts}


def has_tokens(row: Any) -> bool:
    """Return whether a row of `sft.data` holds token parts instead of messages."""
    return isinstance(row, dict) and "tokens" in row


def tokens_tree(row: Any, name: str) -> RolloutTree:
    """Return a row of token parts as a path that supervised training learns. Raises BadRowError."""
    parts = row["tokens"]
    if not isinstance(parts, list) or len(parts) < 2 or not all(_is_part(part) for part in parts):
        raise BadRowError('"tokens" is no list of {"role": "context" or "model", "ids": [...]}')
    if parts[0]["role"] != CONTEXT or not any(part["role"] == MODEL and part["ids"] for part in parts):
        raise BadRowError('"tokens" must begin with context and hold something to learn')
    tree = RolloutTree(name, parts[0]["ids"])
    for above, part in enumerate(parts[1:]):
        tree.add(above, Role.MODEL if part["role"] == MODEL else Role.TOOL, part["ids"])
    return tree


def _is_part(part: Any) -> bool:
    return (
        isinstance(part, dict)
        and part.get("role") in (CONTEXT, MODEL)
        and isinstance(part.get("ids"), list)
        and all(isinstance(own, int) and 0 <= own < 2**31 for own in part["ids"])
    )


def _shortest_success(tree: RolloutTree, solved: Sequence[bool]) -> dict[int, int]:
    """Return for each segment with a right leaf below it the one with the fewest tokens."""
    found: dict[int, int] = {}
    leaves = [leaf for leaf, own in zip(tree.leaves(), solved, strict=True) if own]
    for leaf in sorted(leaves, key=lambda own: len(tree.path_tokens(own))):
        for index in tree.path(leaf):
            found.setdefault(index, leaf)
    return found


def _answered_turn(tree: RolloutTree, children: Sequence[Sequence[int]], start: int) -> list[int]:
    """Return the segments of the turn that begins with `start`, and of the answer to its call; [] without a call."""
    found = [start]
    while below := children[found[-1]]:
        found.append(below[0])
        if tree.segments[below[0]].role is Role.TOOL:
            return found
    return []
