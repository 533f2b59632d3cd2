"""Rollout trees as arrays in depth-first order: the layout that packs are made of.

All functions are pure functions on numpy arrays, so ranks that hold the same trees compute the same packs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arpo_megatron.algorithms.credit import TreeCredit
from arpo_megatron.tree import Float32Array, Int16Array, Int32Array, Role, RolloutTree

Span = tuple[int, int]
ATTENTION_BLOCK = 128
"""Queries and keys per block of attention on CUDA. The kernel may divide it further."""


@dataclass(frozen=True, slots=True)
class TreePack:
    """A stretch of a forest in depth-first order and its predictions: the unit of one forward and backward pass.

    The first tokens may be inherited: ancestors of the others that an earlier pack has computed. Only their keys and
    values are used here; attention and positions treat them like any token.
    """

    token_ids: Int32Array
    """int32[n], token ids."""
    position_ids: Int32Array
    """int32[n], depth of each token in its trajectory."""
    subtree_end: Int32Array
    """int32[n], one past the last position of the subtree: q attends to k iff k <= q < subtree_end[k]."""
    multiplicity: Int32Array
    """int32[n], number of leaves (trajectories) below each token; 0 if another pack counts the token."""
    routes: Int16Array
    """int16[n, layers, k], experts that the engine chose, -1 if the model's router chooses; [n, 0, 0] if it chooses
    for all tokens."""
    inherited_pack: Int32Array
    """int32[a], for each of the first `a` tokens the index of the pack that computes it (`cut_pack`: of its packs)."""
    inherited_index: Int32Array
    """int32[a], position of the token in that pack."""
    predictors: Int32Array
    """int32[m], positions whose hidden states predict a MODEL token, ascending."""
    target_ids: Int32Array
    """int32[m], the predicted token ids."""
    positive: Float32Array
    """float32[m], credit sum_i w_i max(A_i, 0) of each target."""
    negative: Float32Array
    """float32[m], credit sum_i w_i min(A_i, 0) of each target."""
    weight: Float32Array
    """float32[m], sum_i w_i of each target."""
    sampling_logprobs: Float32Array
    """float32[m] in nats, NaN if unknown."""
    tree_index: Int32Array
    """int32[m], index of the tree of each target."""
    token_index: Int32Array
    """int32[m], index of each target among its tree's tokens (segments 0 to S-1 concatenated)."""
    repeated: int = 0
    """Number of leading computed tokens that another pack computes too: ancestors that could not be inherited."""
    data_rank: int = 0
    """Data-parallel rank that computes the pack."""

    def __len__(self) -> int:
        """Return the number of tokens computed here."""
        return len(self.token_ids) - self.inherited

    @property
    def inherited(self) -> int:
        """Number of leading tokens whose keys and values come from earlier packs."""
        return len(self.inherited_pack)

    @property
    def attention_pairs(self) -> int:
        """Number of query-key pairs under the mask."""
        return int(self.position_ids[self.inherited :].sum(dtype=np.int64)) + len(self)


_TOKEN_FIELDS = ("token_ids", "position_ids", "subtree_end", "multiplicity")
_TARGET_FIELDS = (
    "predictors",
    "target_ids",
    "positive",
    "negative",
    "weight",
    "sampling_logprobs",
    "tree_index",
    "token_index",
)
_FLOATS = ("positive", "negative", "weight", "sampling_logprobs")


def new_pack(**values: Any) -> TreePack:
    """Make a pack from arrays of any numeric dtype; omitted fields are empty."""
    arrays: dict[str, Any] = {}
    for field in fields(TreePack)[: -len(("repeated", "data_rank"))]:
        dtype = np.float32 if field.name in _FLOATS else np.int16 if field.name == "routes" else np.int32
        arrays[field.name] = np.asarray(values.pop(field.name, ()), dtype)
    if not arrays["routes"].size:
        arrays["routes"] = np.zeros((len(arrays["token_ids"]), 0, 0), np.int16)
    return TreePack(**arrays, **values)


def lay_out(index: int, tree: RolloutTree, credit: TreeCredit) -> TreePack:
    """Lay a whole tree out as one pack.

    Args:
        index: index of the tree in its batch.
        tree: segments may be empty; the first token of the tree may not be a MODEL token.
        credit: credit of this tree.

    Raises:
        ValueError: the credit has another length, or a MODEL token has no token before it.
    """
    total = tree.unique_tokens
    for name in ("positive", "negative", "weight"):
        if len(getattr(credit, name)) != total:
            raise ValueError(f"tree {index}: {len(getattr(credit, name))} {name} credits for {total} tokens")
    walk = _Walk.of(tree)
    segment = walk.segment
    offset = np.arange(total) - walk.start[segment]
    # A segment's first token is predicted by the last token before it on its path.
    before = np.where(walk.parents >= 0, walk.last[walk.parents], -1)
    predictor = np.where(offset > 0, np.arange(total) - 1, before[segment])
    model = np.array([s.role is Role.MODEL for s in tree.segments])
    targets = np.flatnonzero(model[segment])
    # In depth-first order a fork's later children follow the whole subtree of its first child.
    targets = targets[np.argsort(predictor[targets], kind="stable")]
    if len(targets) and predictor[targets[0]] < 0:
        raise ValueError(f"tree {index}: a MODEL token has no token before it that could predict it (empty prompt)")
    token_index = walk.first_token[segment] + offset
    token_ids = np.concatenate([tree.segments[s].token_ids for s in walk.order])
    logprobs = [np.full(len(s), np.nan, np.float32) if s.logprobs is None else s.logprobs for s in tree.segments]
    own = token_index[targets]
    return new_pack(
        token_ids=token_ids,
        position_ids=walk.depth[segment] + offset,
        subtree_end=walk.end[segment],
        multiplicity=walk.leaves[segment],
        routes=_routes([(len(tree.segments[s]), tree.segments[s].routes) for s in walk.order]),
        predictors=predictor[targets],
        target_ids=token_ids[targets],
        positive=credit.positive[own],
        negative=credit.negative[own],
        weight=credit.weight[own],
        sampling_logprobs=np.concatenate(logprobs)[own],
        tree_index=np.full(len(targets), index),
        token_index=own,
    )


def _routes(parts: Sequence[tuple[int, Int16Array | None]]) -> Int16Array:
    """Concatenate routes of stretches of given lengths; -1 for stretches without routes."""
    inner = next((routes.shape[1:] for _, routes in parts if routes is not None and routes.size), (0, 0))
    missing = [np.full((count, *inner), -1, np.int16) for count, _ in parts]
    return np.concatenate(
        [gap if routes is None or not routes.size else routes for gap, (_, routes) in zip(missing, parts, strict=True)]
    )


@dataclass(frozen=True, slots=True)
class _Walk:
    """A tree's segments in depth-first order; arrays are indexed by segment unless noted."""

    order: NDArray[np.int64]
    """Segments in depth-first order."""
    segment: NDArray[np.int64]
    """int64[tokens], segment of each token in depth-first order."""
    parents: NDArray[np.int64]
    """Parent of each segment."""
    start: NDArray[np.int64]
    """Position of the first token."""
    end: NDArray[np.int64]
    """One past the last position of the subtree."""
    depth: NDArray[np.int64]
    """Depth of the first token."""
    last: NDArray[np.int64]
    """Position of the last token on the path down to and including the segment; -1 if the path is empty."""
    leaves: NDArray[np.int64]
    """Number of leaves at or below the segment."""
    first_token: NDArray[np.int64]
    """Index of the first token when segments are concatenated by index."""

    @classmethod
    def of(cls, tree: RolloutTree) -> "_Walk":
        lengths = np.array([len(segment) for segment in tree.segments], np.int64)
        parents = np.array([segment.parent for segment in tree.segments], np.int64)
        order = np.array(_depth_first(tree), np.int64)
        start = np.empty(len(order), np.int64)
        start[order] = np.cumsum(lengths[order]) - lengths[order]
        depth, last = np.zeros(len(order), np.int64), np.full(len(order), -1, np.int64)
        end = start + lengths
        for s, above in enumerate(parents):  # a parent comes before its children
            depth[s] = depth[above] + lengths[above] if above >= 0 else 0
            last[s] = end[s] - 1 if lengths[s] else (last[above] if above >= 0 else -1)
        leaves = np.zeros(len(order), np.int64)
        leaves[tree.leaves()] = 1
        for s in range(len(order) - 1, 0, -1):
            end[parents[s]] = max(end[parents[s]], end[s])
            leaves[parents[s]] += leaves[s]
        first_token = np.cumsum(lengths) - lengths
        return cls(order, np.repeat(order, lengths[order]), parents, start, end, depth, last, leaves, first_token)


def _depth_first(tree: RolloutTree) -> list[int]:
    children = tree.children()
    order, stack = [], [0]
    while stack:
        index = stack.pop()
        order.append(index)
        stack.extend(reversed(children[index]))
    return order


def join_packs(tree_packs: Sequence[TreePack], shared: int = 0) -> TreePack:
    """Join whole trees in one pack.

    Args:
        tree_packs: packs from `lay_out`.
        shared: number of first tokens that are equal in all of them (a common system prompt). They appear once, as a
            root over all trees.
    """
    if not tree_packs:
        return new_pack()
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in (*_TOKEN_FIELDS, *_TARGET_FIELDS)}
    routes: list[tuple[int, Int16Array | None]] = []
    end = shared
    for pack in tree_packs:
        skip = 0 if pack is tree_packs[0] else shared
        shift = end - shared  # of every token but the shared ones
        for name in _TOKEN_FIELDS:
            parts[name].append(getattr(pack, name)[skip:])
        routes.append((len(pack) - skip, pack.routes[skip:]))
        parts["subtree_end"][-1] = pack.subtree_end[skip:] + shift
        for name in _TARGET_FIELDS:
            parts[name].append(getattr(pack, name))
        parts["predictors"][-1] = np.where(pack.predictors < shared, pack.predictors, pack.predictors + shift)
        end += len(pack) - shared
    arrays = {name: np.concatenate(values) for name, values in parts.items()}
    arrays["routes"] = _routes(routes)
    arrays["subtree_end"][:shared] = end
    arrays["multiplicity"][:shared] = sum(int(pack.multiplicity[0]) for pack in tree_packs if shared)
    order = np.argsort(arrays["predictors"], kind="stable")
    for name in _TARGET_FIELDS:
        arrays[name] = arrays[name][order]
    return new_pack(**arrays)


def cut_pack(layout: TreePack, spans: Sequence[Span], *, inherit: bool) -> list[TreePack]:
    """Make one pack per span of a tree, each with the ancestors of its first token before it.

    The tokens of a span attend to nothing else outside it (see attention_plan.py). A prediction belongs to the pack
    that computes the predicting token first, even if the target is in a later span.

    Args:
        layout: pack of a whole tree, or of a part of it that begins with the ancestors of the rest.
        spans: consecutive spans from 0 to the end of the tree.
        inherit: take the ancestors' keys and values from the packs that computed them; False computes them again.
    """
    starts = np.array([start for start, _ in spans])
    offsets: list[int] = []  # position of a span's first token in its own pack
    packs = []
    for start, stop in spans:
        above = np.flatnonzero(layout.subtree_end[:start] > start)
        offsets.append(len(above))
        members = np.concatenate([above, np.arange(start, stop)])
        home = np.searchsorted(starts, above, side="right") - 1
        index = above - starts[home] + np.array(offsets)[home] if len(above) else above
        targets = slice(*np.searchsorted(layout.predictors, (start, stop)))
        end = np.minimum(layout.subtree_end[members], stop) - start + len(above)
        packs.append(
            new_pack(
                token_ids=layout.token_ids[members],
                position_ids=layout.position_ids[members],
                subtree_end=end,
                multiplicity=np.where(members < start, 0, layout.multiplicity[members]),
                routes=layout.routes[members],
                inherited_pack=home if inherit else (),
                inherited_index=index if inherit else (),
                repeated=max(0, min(stop, layout.repeated) - start) if inherit else len(above),
                **{name: getattr(layout, name)[targets] for name in _TARGET_FIELDS if name != "predictors"},
                predictors=layout.predictors[targets] - start + len(above),
            )
        )
    return packs


def shared_prefix(tree_packs: Sequence[TreePack], prompts: Sequence[int]) -> int:
    """Return the number of tokens that all prompts begin with; 0 for fewer than two trees.

    Args:
        tree_packs: packs of whole trees.
        prompts: length of each tree's prompt.
    """
    if len(tree_packs) < 2:
        return 0
    # At least one token of each tree must remain.
    first = tree_packs[0].token_ids[: min(*prompts, *(len(pack) - 1 for pack in tree_packs))]
    length = len(first)
    for pack in tree_packs[1:]:
        differs = np.flatnonzero(pack.token_ids[:length] != first[:length])
        length = int(differs[0]) if len(differs) else length
    return length


def drop_routes(pack: TreePack) -> TreePack:
    """Return the pack without routes, so that the model's own routers choose."""
    return replace(pack, routes=pack.routes[:, :0, :0])


def padded_length(length: int) -> int:
    """Return the smallest of 128, 256, 384, 512, 768, 1024, 1536 ... (two per octave) that is at least `length`.

    Attention on CUDA compiles a kernel for each pair of padded lengths.
    """
    step = max(ATTENTION_BLOCK, 1 << max(0, (length - 1).bit_length() - 2))
    return max(1, -(-length // step)) * step


def padded_lengths(queries: int, keys: int) -> tuple[int, int]:
    """Return the padded lengths of queries and keys: the queries have 1, 1/2, 1/4 or 1/8 of the keys' length.

    The lengths depend on each other so that few pairs occur, each of which takes seconds to compile.

    Args:
        queries: at most `keys`; fewer in a pack that inherits keys, and on a context-parallel rank.
        keys: positive.
    """
    length = padded = padded_length(keys)
    while length >= 2 * max(queries, ATTENTION_BLOCK) and not length % (2 * ATTENTION_BLOCK) and 8 * length > padded:
        length //= 2
    return length, padded
