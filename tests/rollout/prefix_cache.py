"""A radix cache that only counts how many leading tokens of a sequence it has seen before."""

from dataclasses import dataclass, field

from arpo_megatron.tree import Int32Array


@dataclass(slots=True)
class _Edge:
    """A run of tokens without a fork, and the edges after it by first token."""

    tokens: Int32Array
    below: "dict[int, _Edge]" = field(default_factory=dict)


@dataclass(slots=True)
class PrefixCache:
    """A compressed trie of token sequences."""

    roots: dict[int, _Edge] = field(default_factory=dict)

    def insert(self, ids: Int32Array) -> int:
        """Store a sequence; return how many of its leading tokens were stored before."""
        edges, matched = self.roots, 0
        while matched < len(ids):
            rest = ids[matched:]
            edge = edges.get(int(rest[0]))
            if edge is None:
                edges[int(rest[0])] = _Edge(rest)
                break
            common = _common_prefix(edge.tokens, rest)
            matched += common
            if common < len(edge.tokens):  # the sequence leaves inside this edge: split it
                tail = _Edge(edge.tokens[common:], edge.below)
                edge.tokens, edge.below = edge.tokens[:common], {int(tail.tokens[0]): tail}
            edges = edge.below
        return matched


def _common_prefix(left: Int32Array, right: Int32Array) -> int:
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    return int(differs.argmax()) if differs.any() else length
