"""What attention must know of a pack: its plan, the ancestors it inherits, and how context parallelism divides it.

A pack's context travels through the model as a number (`handle`) in a tensor, because recomputation saves nothing but
tensors and a pipeline has several packs in flight: whoever computes a layer, at whatever time, finds the right one.
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
from arpo_megatron.actor.logprobs import wide


@dataclass(slots=True)
class Legacy:
    """Keys and values that a pack leaves to later ones, and the gradients that come back.

    Attributes:
        places: int64[u], positions among the pack's tokens, ascending.
        keys: by layer number, [u, groups, head_dim] without gradient.
        values: likewise.
        key_gradients: by layer number, float32 (float64) sums over all heirs.
        value_gradients: likewise.
    """

    places: Tensor
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    key_gradients: dict[int, Tensor] = field(default_factory=dict)
    value_gradients: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Inheritance:
    """What a pack takes from one earlier pack: rows of that one's legacy, which become its next leading tokens."""

    legacy: Legacy
    rows: Tensor


@dataclass(slots=True)
class PackContext:
    """Of one pack on this rank.

    Attributes:
        plan: of this rank's queries over all tokens of the pack.
        multiplicity: float32[q], leaves of each local token, 0 for padding.
        inheritances: in the order of the pack's leading tokens.
        legacy: what is kept for later packs, None for nothing.
        routes: int16[q, layers, k], the experts to send each local token to, -1 where the router chooses; None: it does
            everywhere.
        order: context parallelism: sizes of the pieces of the gathered tokens, and their order in the pack.
    """

    plan: AttentionPlan | FlexPlan
    multiplicity: Tensor
    inheritances: Sequence[Inheritance] = ()
    legacy: Legacy | None = None
    routes: Tensor | None = None
    order: tuple[Sequence[int], Sequence[int]] | None = None

    current: ClassVar["PackContext | None"] = None
    """The pack of the attention that ran last: a layer's router comes after its attention, in recomputation too."""

    def keys_and_values(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [n, groups, head_dim] of all of the pack's tokens from those of this rank's, [q, ...]."""
        if self.order is not None:
            key, value = self._gather(key, value)
        elif len(key) > self.plan.queries:
            key, value = key[: self.plan.queries], value[: self.plan.queries]  # without padding
        if self.legacy is None and not self.inheritances:
            return key, value
        joined: tuple[Tensor, Tensor] = _Inherit.apply(  # type: ignore[no-untyped-call]  # untyped in torch
            key, value, self, layer
        )
        return joined

    def _gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The context-parallel ranks' parts, in the order of the pack; gradients are summed back."""
        assert self.order is not None
        both = gather_from_sequence_parallel_region(
            torch.cat([key, value], dim=-1), group=parallel_state.get_context_parallel_group()
        )
        sizes, order = self.order
        pieces = both.split(list(sizes))
        # Slices put together: the gradient of an indexed selection is slow on a CPU.
        key, value = torch.cat([pieces[piece] for piece in order]).chunk(2, dim=-1)
        return key, value


class _Inherit(torch.autograd.Function):
    """Ancestors' keys and values before the pack's own; their gradients go to the pack that computed them.

    The heirs' backward passes come before that pack's own (see schedule.py), whose keys then get the sum: the chain
    rule of the uncut tree.
    """

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, context: PackContext, layer: int) -> tuple[Tensor, Tensor]:
        ctx.context, ctx.layer = context, layer
        if (legacy := context.legacy) is not None:
            legacy.keys[layer] = key.detach().index_select(0, legacy.places)
            legacy.values[layer] = value.detach().index_select(0, legacy.places)
        rows = [(i.legacy, i.rows) for i in context.inheritances]
        keys = [legacy.keys[layer].index_select(0, places) for legacy, places in rows]
        values = [legacy.values[layer].index_select(0, places) for legacy, places in rows]
        return torch.cat([*keys, key]), torch.cat([*values, value])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        context, layer = ctx.context, ctx.layer
        sizes = [len(i.rows) for i in context.inheritances]
        own = []
        for gradient, name in zip(gradients, ("key_gradients", "value_gradients"), strict=True):
            *inherited, mine = gradient.split([*sizes, len(gradient) - sum(sizes)])
            for inheritance, part in zip(context.inheritances, inherited, strict=True):
                sums = getattr(inheritance.legacy, name)
                if layer not in sums:
                    shape = inheritance.legacy.keys[layer].shape
                    sums[layer] = torch.zeros(shape, dtype=wide(part.dtype), device=part.device)
                sums[layer].index_add_(0, inheritance.rows, part.to(sums[layer].dtype))
            legacy = context.legacy
            if legacy is not None and (returned := getattr(legacy, name).pop(layer, None)) is not None:
                mine = mine.to(returned.dtype).index_add(0, legacy.places, returned).to(mine.dtype)
            own.append(mine)
        return own[0], own[1], None, None


_registered: dict[int, PackContext] = {}
_numbers = count()


def register(context: PackContext) -> Tensor:
    """The handle of a context, int64[] on the CPU."""
    number = next(_numbers)
    _registered[number] = context
    return torch.tensor(number)


def lookup(handle: Tensor) -> PackContext:
    """The context of a handle, which becomes the current one."""
    PackContext.current = _registered[int(handle)]
    return PackContext.current


def release(handle: Tensor) -> None:
    """Forget a context after its backward pass."""
    if _registered.pop(int(handle), None) is PackContext.current:
        PackContext.current = None
