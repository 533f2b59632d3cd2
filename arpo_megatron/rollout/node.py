"""A segment of a tree that is still growing."""

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from arpo_megatron.algorithms.branching import PathKey
from arpo_megatron.engine.request import encode_ids
from arpo_megatron.tree import BranchRecord, Finish, Float32Array, Int16Array, Int32Array, Role, RolloutTree, ToolRecord


@dataclass(slots=True)
class Node:
    """A segment with the fields of `tree.Segment`, its path key, and its neighbors in the tree."""

    role: Role
    key: PathKey
    token_ids: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))
    logprobs: Float32Array | None = None
    entropies: Float32Array | None = None
    policy_version: int = 0
    finish: Finish | None = None
    branch: BranchRecord | None = None
    tool: ToolRecord | None = None
    routes: Int16Array | None = None
    rewards: Mapping[str, float] | None = None
    ended_s: float | None = None
    parent: "Node | None" = None
    children: "list[Node]" = field(default_factory=list)
    encoded: bytes | None = None
    """`encode_ids` of its tokens, after the first request below it: 6 to 7 bytes a token."""

    def add_child(self, role: Role) -> "Node":
        """Add a segment below this one, with the next free path key."""
        node = Node(role, (*self.key, len(self.children)), parent=self)
        self.children.append(node)
        return node

    def add_continuation(self) -> "Node":
        """Add a MODEL segment that continues this one with newer weights, under the same path key."""
        node = Node(Role.MODEL, self.key, parent=self)
        self.children.append(node)
        return node

    def callers(self, tool: str, refused: Collection[str]) -> "list[Node]":
        """Return the segments above this one that have called the tool, the nearest first.

        Args:
            tool: its name.
            refused: statuses of calls that were not executed; they do not count.
        """
        found, node = [], self
        while node.parent is not None:
            if node.tool is not None and node.tool.name == tool and node.tool.status not in refused:
                found.append(node.parent)
            node = node.parent
        return found

    def store_routes(self, end: int, routes: Int16Array) -> None:
        """Store expert routes of the tokens right before position `end` in this segment and those above it."""
        node: Node | None = self
        stop = end - len(routes)
        length = self.path_length()
        while node is not None and length > stop:
            begin = length - len(node.token_ids)
            if node.routes is None:
                node.routes = np.full((len(node.token_ids), *routes.shape[1:]), -1, np.int16)
            first, last = max(begin, stop), min(length, end)
            if first < last:
                node.routes[first - begin : last - begin] = routes[first - stop : last - stop]
            node, length = node.parent, begin

    def encoded_path(self) -> list[bytes]:
        """Return `encode_ids` of each segment from the root to this one. None of them may change afterwards."""
        parts, node = list[bytes](), self
        while True:
            if node.encoded is None:
                node.encoded = encode_ids(node.token_ids)
            if node.encoded:
                parts.append(node.encoded)
            if node.parent is None:
                return parts[::-1]
            node = node.parent

    def path_length(self) -> int:
        """Return the number of tokens from the root to the end of this segment."""
        return len(self.token_ids) + (0 if self.parent is None else self.parent.path_length())


def depth_first(root: Node) -> Iterator[tuple[int, Node]]:
    """Yield each node with the index of its parent, depth first and in the order of path keys."""
    root.children.sort(key=lambda node: node.key)
    pending = [(-1, root)]
    for index in itertools.count():
        if not pending:
            return
        parent, node = pending.pop()
        yield parent, node
        pending += [(index, child) for child in reversed(node.children)]


def build_tree(root: Node, task_id: str, *, step: int, seconds: float) -> tuple[RolloutTree, list[PathKey]]:
    """Copy the segments from `root` downwards to a tree; return it with the path key of each segment."""
    tree = RolloutTree(task_id, root.token_ids, routes=root.routes, step=step, seconds=seconds)
    keys = [root.key]
    for parent, node in itertools.islice(depth_first(root), 1, None):
        keys.append(node.key)
        tree.add(
            parent,
            node.role,
            node.token_ids,
            logprobs=node.logprobs,
            entropies=node.entropies,
            policy_version=node.policy_version,
            finish=node.finish,
            branch=node.branch,
            tool=node.tool,
            routes=node.routes,
            rewards=node.rewards,
            ended_s=node.ended_s,
        )
    return tree, keys
