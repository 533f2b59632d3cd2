"""A segment of a tree that still grows."""

from dataclasses import dataclass, field

import numpy as np

from arpo_megatron.algorithms.branching import PathKey
from arpo_megatron.tree import BranchRecord, Finish, Float32Array, Int16Array, Int32Array, Role, ToolRecord


@dataclass(slots=True)
class Node:
    """A segment that may still grow: the fields of `tree.Segment`, its place, and its neighbours in the tree."""

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
    above: "Node | None" = None
    children: "list[Node]" = field(default_factory=list)

    def child(self, role: Role) -> "Node":
        """Take the next place below this segment."""
        node = Node(role, (*self.key, len(self.children)), above=self)
        self.children.append(node)
        return node

    def continuation(self) -> "Node":
        """A MODEL segment below this one that goes on with it: the same place, sampled by newer weights."""
        node = Node(Role.MODEL, self.key, above=self)
        self.children.append(node)
        return node

    def caller(self, tool: str) -> "Node | None":
        """The nearest segment above this one that has called a tool of that name and got its answer."""
        node = self
        while node.above is not None:
            if node.tool is not None and node.tool.name == tool:
                return node.above
            node = node.above
        return None

    def keep_routes(self, end: int, routes: Int16Array) -> None:
        """Give the routes of the tokens before position `end` to the segments that hold them, this one and above."""
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
            node, length = node.above, begin

    def path_length(self) -> int:
        """Tokens from the root to the end of this segment."""
        return len(self.token_ids) + (0 if self.above is None else self.above.path_length())
