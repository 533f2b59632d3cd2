"""Rollout trees as arrays in depth-first order: the layout that packs are made of.

Everything here is numpy and a pure function of its inputs, so all ranks that hold the same trees hold the same packs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arpo_megatron.algorithms.credit import TreeCredit
from arpo_megatron.tree import Float32Array, Int16Array, Int32Array, Role, RolloutTree

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TreePack:
    """A stretch of a forest in depth-first order, and the predictions that it makes: one forward and backward pass.

    Its tokens may begin with ancestors of the others that an earlier pack has computed: of those only keys and values
    are used here (`inherited`). Attention and positions treat them like any token.

    Attributes:
        token_ids: int32[n].
        position_ids: int32[n], depth in the own trajectory.
        subtree_end: int32[n], one past the last position of the subtree: q attends to k iff k <= q < subtree_end[k].
        multiplicity: int32[n], leaves (trajectories) that a token belongs to; 0 where another pack counts it.
        routes: int16[n, layers, k], experts that the engine chose, -1 where the model's router shall choose; [n, 0, 0]
            where it shall for all.
        inherited_pack: int32[a], for each of the first `a` tokens the index of the pack that computes it.
        inherited_index: int32[a], its position there.
        predictors: int32[m], positions whose hidden states predict a MODEL token; ascending.
        target_ids: int32[m], the predicted tokens.
        positive: float32[m], like the next two from the trees' credits.
        negative: float32[m].
        weight: float32[m].
        sampling_logprobs: float32[m] in nats, NaN where unknown.
        tree_index: int32[m], which of the packed trees a target belongs to.
        token_index: int32[m], its place among that tree's tokens (segments 0 to S-1 concatenated).
        repeated: tokens at the beginning that another pack computes too (ancestors, where none can be inherited).
        data_rank: data-parallel rank that computes the pack.
    """

    token_ids: Int32Array
    position_ids: Int32Array
    subtree_end: Int32Array
    multiplicity: Int32Array
    routes: Int16Array
    inherited_pack: Int32Array
    inherited_index: Int32Array
    predictors: Int32Array
    target_ids: Int32Array
    positive: Float32Array
    negative: Float32Array
    weight: Float32Array
    sampling_logprobs: Float32Array
    tree_index: Int32Array
    token_index: Int32Array
    repeated: int = 0
    data_rank: int = 0

    def __len__(self) -> int:
        """Tokens computed here."""
        return len(self.token_ids) - self.inherited

    @property
    def inherited(self) -> int:
        """Number of leading tokens whose keys and values come from earlier packs."""
        return len(self.inherited_pack)

    @property
    def attention_pairs(self) -> int:
        """Query-key pairs under the mask."""
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
    """A pack of arrays of any numeric type; fields that are left out are empty."""
    arrays: dict[str, Any] = {}
    for field in fields(TreePack)[: -len(("repeated", "data_rank"))]:
        dtype = np.float32 if field.name in _FLOATS else np.int16 if field.name == "routes" else np.int32
        arrays[field.name] = np.asarray(values.pop(field.name, ()), dtype)
    if not arrays["routes"].size:
        arrays["routes"] = np.zeros((len(arrays["token_ids"]), 0, 0), np.int16)
    return TreePack(**arrays, **values)


def lay_out(index: int, tree: RolloutTree, credit: TreeCredit) -> TreePack:
    """A whole tree as one pack.

    Args:
        index: of the tree in its minibatch.
        tree: its segments may be empty, a MODEL token may not be the first of all.
        credit: of this tree.

    Raises:
        ValueError: the credit is of another length, or a MODEL token has no token before it.
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
    # Depth-first order lets a fork's later children come after its first child's whole subtree.
    targets = targets[np.argsort(predictor[targets], kind="stable")]
    if len(targets) and predictor[targets[0]] < 0:
        raise ValueError(f"tree {index}: a MODEL token has no token before it that could predict it (empty prompt)")
    token_index = walk.first_token[segment] + offset
    token_ids = np.concatenate([tree.segments[s].token_ids for s in walk.order])
    logprobs = [np.full(len(s), np.nan, np.float32) if s.logprobs is None else s.logprobs for s in tree.segments]
    place = token_index[targets]
    return new_pack(
        token_ids=token_ids,
        position_ids=walk.depth[segment] + offset,
        subtree_end=walk.end[segment],
        multiplicity=walk.leaves[segment],
        routes=_routes([(len(tree.segments[s]), tree.segments[s].routes) for s in walk.order]),
        predictors=predictor[targets],
        target_ids=token_ids[targets],
        positive=credit.positive[place],
        negative=credit.negative[place],
        weight=credit.weight[place],
        sampling_logprobs=np.concatenate(logprobs)[place],
        tree_index=np.full(len(targets), index),
        token_index=place,
    )


def _routes(parts: Sequence[tuple[int, Int16Array | None]]) -> Int16Array:
    """Routes of stretches of so many tokens, one after the other; -1 in those without any."""
    inner = next((routes.shape[1:] for _, routes in parts if routes is not None and routes.size), (0, 0))
    missing = [np.full((count, *inner), -1, np.int16) for count, _ in parts]
    return np.concatenate(
        [gap if routes is None or not routes.size else routes for gap, (_, routes) in zip(missing, parts, strict=True)]
    )


@dataclass(frozen=True, slots=True)
class _Walk:
    """A tree's segments in depth-first order; arrays are indexed by segment unless they say otherwise.

    Attributes:
        order: the segments as they are met.
        segment: int64[tokens], the segment of every token in depth-first order.
        parents: of every segment.
        start: position of its first token.
        end: one past the last position of its subtree.
        depth: depth of its first token.
        last: position of the token before its end on its path (its own last, if it has any), -1 for none.
        leaves: number of leaves at or below it.
        first_token: where its tokens begin when segments are concatenated by index.
    """

    order: NDArray[np.int64]
    segment: NDArray[np.int64]
    parents: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    depth: NDArray[np.int64]
    last: NDArray[np.int64]
    leaves: NDArray[np.int64]
    first_token: NDArray[np.int64]

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


def join(layouts: Sequence[TreePack], shared: int = 0) -> TreePack:
    """Whole trees side by side in one pack.

    Args:
        layouts: from `lay_out`.
        shared: the first `shared` tokens of all of them are equal (a common system prompt): they appear once, as a
            root over all trees.
    """
    if not layouts:
        return new_pack()
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in (*_TOKEN_FIELDS, *_TARGET_FIELDS)}
    routes: list[tuple[int, Int16Array | None]] = []
    end = shared
    for layout in layouts:
        skip = 0 if layout is layouts[0] else shared
        shift = end - shared  # of every token but the shared ones
        for name in _TOKEN_FIELDS:
            parts[name].append(getattr(layout, name)[skip:])
        routes.append((len(layout) - skip, layout.routes[skip:]))
        parts["subtree_end"][-1] = layout.subtree_end[skip:] + shift
        for name in _TARGET_FIELDS:
            parts[name].append(getattr(layout, name))
        parts["predictors"][-1] = np.where(layout.predictors < shared, layout.predictors, layout.predictors + shift)
        end += len(layout) - shared
    arrays = {name: np.concatenate(values) for name, values in parts.items()}
    arrays["routes"] = _routes(routes)
    arrays["subtree_end"][:shared] = end
    arrays["multiplicity"][:shared] = sum(int(layout.multiplicity[0]) for layout in layouts if shared)
    order = np.argsort(arrays["predictors"], kind="stable")
    for name in _TARGET_FIELDS:
        arrays[name] = arrays[name][order]
    return new_pack(**arrays)


def cut(layout: TreePack, spans: Sequence[Span], *, first_pack: int, inherit: bool) -> list[TreePack]:
    """A pack for each span of one tree, with the ancestors of its first token before it.

    Those are all that its tokens attend to outside of the span (see attention_plan.py). A prediction is made where the
    predicting token is computed first, also that of a token of a later span.

    Args:
        layout: of a whole tree.
        spans: consecutive, from 0 to its end.
        first_pack: index of the first of these packs among all of the minibatch.
        inherit: take the ancestors' keys and values from the packs that computed them; otherwise compute them again.
    """
    starts = np.array([start for start, _ in spans])
    offsets: list[int] = []  # position of a span's first token in its own pack
    packs = []
    for start, stop in spans:
        above = np.flatnonzero(layout.subtree_end[:start] > start)
        offsets.append(len(above))
        members = np.concatenate([above, np.arange(start, stop)])
        home = np.searchsorted(starts, above, side="right") - 1
        place = above - starts[home] + np.array(offsets)[home] if len(above) else above
        targets = slice(*np.searchsorted(layout.predictors, (start, stop)))
        end = np.minimum(layout.subtree_end[members], stop) - start + len(above)
        packs.append(
            new_pack(
                token_ids=layout.token_ids[members],
                position_ids=layout.position_ids[members],
                subtree_end=end,
                multiplicity=np.where(members < start, 0, layout.multiplicity[members]),
                routes=layout.routes[members],
                inherited_pack=home + first_pack if inherit else (),
                inherited_index=place if inherit else (),
                repeated=0 if inherit else len(above),
                **{name: getattr(layout, name)[targets] for name in _TARGET_FIELDS if name != "predictors"},
                predictors=layout.predictors[targets] - start + len(above),
            )
        )
    return packs


def shared_prefix(layouts: Sequence[TreePack], prompts: Sequence[int]) -> int:
    """Tokens that the prompts of all trees begin with; 0 for fewer than two trees.

    Args:
        layouts: of whole trees.
        prompts: length of each tree's prompt.
    """
    if len(layouts) < 2:
        return 0
    # At least one token of each tree is left, so that none vanishes.
    first = layouts[0].token_ids[: min(*prompts, *(len(layout) - 1 for layout in layouts))]
    length = len(first)
    for layout in layouts[1:]:
        differs = np.flatnonzero(layout.token_ids[:length] != first[:length])
        length = int(differs[0]) if len(differs) else length
    return length


def drop_routes(pack: TreePack) -> TreePack:
    """The pack, for a model whose own routers choose."""
    return replace(pack, routes=pack.routes[:, :0, :0])


def on_rank(pack: TreePack, data_rank: int) -> TreePack:
    """The pack, for another data-parallel rank."""
    return replace(pack, data_rank=data_rank)
