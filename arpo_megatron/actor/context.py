"""Per-pack state of attention: the plan, inherited keys and values, and the division among context-parallel ranks.

A pack's context travels through the model as a number (`handle`) in a tensor: recomputation saves only tensors, and a
pipeline has several packs in flight. Each layer looks its context up by the handle whenever it runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, ClassVar

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from arpo_megatron.actor.attention_plan import AttentionPlan
from arpo_megatron.actor.flex_attention import FlexPlan
from arpo_megatron.actor.logprobs import sum_dtype


@dataclass(slots=True)
class KeptKeyValues:
    """Keys and values that a pack keeps for later packs, and the gradients that those packs return."""

    positions: Tensor
    """int64[u], ascending positions among the tokens that the pack computes."""
    keys: dict[int, Tensor] = field(default_factory=dict)
    """[u, groups, head_dim] by layer number, without gradient."""
    values: dict[int, Tensor] = field(default_factory=dict)
    """[u, groups, head_dim] by layer number, without gradient."""
    key_gradients: dict[int, Tensor] = field(default_factory=dict)
    """float32 or float64 [u, groups, head_dim] by layer number, summed over all later packs."""
    value_gradients: dict[int, Tensor] = field(default_factory=dict)
    """float32 or float64 [u, groups, head_dim] by layer number, summed over all later packs."""


@dataclass(frozen=True, slots=True)
class Inheritance:
    """Tokens that a pack inherits from one earlier pack; they become its next leading tokens."""

    source: KeptKeyValues
    rows: Tensor
    """int64[r], indices into `source.positions`."""


@dataclass(slots=True)
class PackContext:
    """Context of one pack on this rank."""

    plan: AttentionPlan | FlexPlan
    """This rank's queries over all tokens of the pack."""
    multiplicity: Tensor
    """float32[q], number of leaves below each local token, 0 for padding."""
    inheritances: Sequence[Inheritance] = ()
    """Inherited tokens, in the order of the pack's leading tokens."""
    kept: KeptKeyValues | None = None
    """Keys and values kept for later packs; None if no pack inherits from this one."""
    routes: Tensor | None = None
    """int16[q, layers, k], experts of each local token, -1 if the router chooses; None if it chooses for all tokens."""
    order: tuple[Sequence[int], Sequence[int]] | None = None
    """Sizes of the pieces that context-parallel ranks gather, and the order of the pieces in the pack."""

    current: ClassVar["PackContext | None"] = None
    """The pack whose attention ran last. A layer's router runs after its attention, in recomputation too."""

    def keys_and_values(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of the whole pack, [n, groups, head_dim], from those of this rank's tokens, [q,
        ...]."""
        if self.order is not None:
            key, value = self._gather(key, value)
        elif len(key) > self.plan.queries:
            key, value = key[: self.plan.queries], value[: self.plan.queries]  # without padding
        if self.kept is None and not self.inheritances:
            return key, value
        joined: tuple[Tensor, Tensor] = _Inherit.apply(  # type: ignore[no-untyped-call]  # untyped in torch
            key, value, self, layer
        )
        return joined

    def _gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Gather the tokens of all context-parallel ranks in the pack's order; gradients are summed back."""
        assert self.order is not None
        both = gather_from_sequence_parallel_region(
            torch.cat([key, value], dim=-1), group=parallel_state.get_context_parallel_group()
        )
        sizes, order = self.order
        pieces = both.split(list(sizes))
        # Concatenated slices: the gradient of an indexed selection is slow on a CPU.
        key, value = torch.cat([pieces[piece] for piece in order]).chunk(2, dim=-1)
        return key, value


class _Inherit(torch.autograd.Function):
    """Put inherited keys and values before the pack's own, and send their gradients to the pack that computed them.

    The backward passes of later packs run before that pack's own (see schedule.py), which then adds the sum: the chain
    rule of the uncut tree.
    """

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, context: PackContext, layer: int) -> tuple[Tensor, Tensor]:
        ctx.context, ctx.layer = context, layer
        if (kept := context.kept) is not None:
            kept.keys[layer] = key.detach().index_select(0, kept.positions)
            kept.values[layer] = value.detach().index_select(0, kept.positions)
        keys = [each.source.keys[layer].index_select(0, each.rows) for each in context.inheritances]
        values = [each.source.values[layer].index_select(0, each.rows) for each in context.inheritances]
        return torch.cat([*keys, key]), torch.cat([*values, value])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        context, layer = ctx.context, ctx.layer
        sizes = [len(each.rows) for each in context.inheritances]
        own = []
        for gradient, name in zip(gradients, ("key_gradients", "value_gradients"), strict=True):
            *inherited, mine = gradient.split([*sizes, len(gradient) - sum(sizes)])
            for inheritance, part in zip(context.inheritances, inherited, strict=True):
                sums = getattr(inheritance.source, name)
                if layer not in sums:
                    shape = inheritance.source.keys[layer].shape
                    sums[layer] = torch.zeros(shape, dtype=sum_dtype(part.dtype), device=part.device)
                sums[layer].index_add_(0, inheritance.rows, part.to(sums[layer].dtype))
            kept = context.kept
            if kept is not None and (returned := getattr(kept, name).pop(layer, None)) is not None:
                mine = mine.to(returned.dtype).index_add(0, kept.positions, returned).to(mine.dtype)
            own.append(mine)
        return own[0], own[1], None, None


_registered: dict[int, PackContext] = {}
_numbers = count()


def register(context: PackContext) -> Tensor:
    """Store a context and return its handle, int64[] on the CPU."""
    number = next(_numbers)
    _registered[number] = context
    return torch.tensor(number)


def lookup(handle: Tensor) -> PackContext:
    """Return the context of a handle and make it the current one."""
    PackContext.current = _registered[int(handle)]
    return PackContext.current


def release(handle: Tensor) -> None:
    """Forget a context after its backward pass."""
    if _registered.pop(int(handle), None) is PackContext.current:
        PackContext.current = None
