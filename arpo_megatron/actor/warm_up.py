"""Compile the attention of a step before its passes: one kernel per pair of padded lengths.

A kernel takes seconds to compile, and the packs of a step have many pairs of lengths. All ranks know all packs, so the
ranks of a machine divide the pairs among themselves; then each loads what the others have compiled from the compiler's
cache, which they share. Without this, every rank would compile every kernel itself, between its passes.
"""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from arpo_megatron.actor import parallel
from arpo_megatron.actor.attention_plan import share_blocks
from arpo_megatron.actor.flex_attention import flex_plan, flex_tree_attention
from arpo_megatron.actor.model import DTYPES
from arpo_megatron.config import AttentionBackend, JobConfig
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.packing.balance import TYPICAL_COST, CostModel
from arpo_megatron.packing.layout import TreePack, padded_lengths
from arpo_megatron.utils.heartbeat import beat

Lengths = tuple[int, int]
"""Padded numbers of queries and keys."""


@dataclass(slots=True)
class AttentionKernels:
    """The kernels that the packs of a rank need, and the shape of its heads."""

    heads: int
    """Query heads of a tensor-parallel rank."""
    groups: int
    """Key heads of the same rank."""
    head_dim: int
    """Width of a head."""
    dtype: torch.dtype
    context: int = 1
    """Context-parallel ranks, which share a pack."""
    cost: CostModel = TYPICAL_COST
    """Model of the work that balances these ranks."""
    backend: AttentionBackend = "auto"
    """`model.attention_backend`."""
    needed: set[Lengths] = field(default_factory=set)
    """Lengths of all packs so far. On a GPU their kernels are compiled."""

    @classmethod
    def of(cls, config: JobConfig, spec: ModelSpec) -> "AttentionKernels":
        """Return the kernels of a job, none of them compiled."""
        layout = config.parallel
        heads, groups = spec.heads // layout.tensor, max(1, spec.kv_heads // layout.tensor)
        dtype = DTYPES[config.model.dtype]
        backend = config.model.attention_backend
        return cls(heads, groups, spec.head_dim, dtype, layout.context, CostModel.of(spec), backend)

    def prepare(self, packs: Iterable[TreePack], log: Callable[[str], None]) -> None:
        """Compile the kernels that packs need and no earlier packs did. On a CPU they are only counted.

        All ranks call it with the same packs.

        Args:
            packs: those of all ranks.
            log: receives the progress of this rank.
        """
        new = sorted({lengths for pack in packs for lengths in self.lengths(pack)} - self.needed)
        self.needed.update(new)
        if not new or parallel.device().type != "cuda":
            return
        started = time.monotonic()
        here, ranks = (int(os.environ.get(name, default)) for name, default in _LOCAL)
        own = new[here::ranks]
        for count, lengths in enumerate(own):
            self.compile(lengths)
            seconds = time.monotonic() - started
            log(f"attention kernels: {count + 1} of this rank's {len(own)} compiled, {seconds:.0f} s")
        parallel.gather_objects(None)  # now the cache has all of them
        for lengths in new:
            if lengths not in own:
                self.compile(lengths)
        log(f"attention kernels: {len(new)} ready after {time.monotonic() - started:.0f} s")

    def lengths(self, pack: TreePack) -> set[Lengths]:
        """Return the pairs of padded lengths of a pack, of all context-parallel ranks."""
        counts = {len(pack)}
        if self.context > 1:
            shares = share_blocks(pack.subtree_end, pack.inherited, self.context, self.cost)
            counts = {sum(stop - start for start, stop in share) for share in shares}
        return {padded_lengths(count, len(pack.subtree_end)) for count in counts if count}

    def compile(self, lengths: Lengths) -> None:
        """Run attention of these lengths as the log-prob pass and the update do, on zeros."""
        queries, keys = lengths
        ends, positions = np.full(keys, keys, np.int32), np.arange(keys - queries, keys)
        device = parallel.device()
        plan = flex_plan(ends, positions, device)
        shapes: Sequence[tuple[int, int]] = ((queries, self.heads), (keys, self.groups), (keys, self.groups))
        inputs = [
            torch.zeros(count, heads, self.head_dim, dtype=self.dtype, device=device).requires_grad_()
            for count, heads in shapes
        ]
        for gradient in (False, True):  # compiled separately
            with torch.set_grad_enabled(gradient):
                query, key, value = inputs
                output = flex_tree_attention(query, key, value, plan, self.head_dim**-0.5, self.backend)
        output.sum().backward()
        beat()


_LOCAL = (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))
"""This rank's index on its machine, and the number of ranks there."""
