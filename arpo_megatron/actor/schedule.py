"""The order of forward and backward passes over packs.

Without a pipeline the order is nested: a pack's backward pass waits for the packs that inherit keys and values from it,
so only the activations of one path of packs are alive at a time. A pipeline uses Megatron's first-in-first-out order;
its packs do not inherit.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from arpo_megatron.actor.microbatch import MicroBatch, MicroBatches
from arpo_megatron.config import ParallelConfig
from arpo_megatron.packing.layout import TreePack

Finish = Callable[[MicroBatch, tuple[Tensor, Tensor]], tuple[Tensor | None, Any]]
"""A function from a micro-batch and the model output to the loss (None in a forward-only pass) and a value to keep."""


def pack_indices(packs: Sequence[TreePack], parallel: ParallelConfig) -> list[int]:
    """Return the indices of this rank's packs in order; larger indices are empty packs that keep the ranks in step."""
    own = [i for i, pack in enumerate(packs) if pack.data_rank == parallel_state.get_data_parallel_rank()]
    counts = [sum(pack.data_rank == rank for pack in packs) for rank in range(parallel.data)]
    count = max(1, *counts) if parallel.expert > 1 else max(1, len(own))
    count += -count % parallel.pipeline if parallel.virtual_pipeline > 1 else 0
    return own + list(range(len(packs), len(packs) + count - len(own)))


def nested_order(uses: Sequence[tuple[int, int]]) -> Iterator[tuple[str, int]]:
    """Yield the passes of packs that inherit from each other, as ("forward" or "backward", pack).

    A pack's backward pass follows those of all packs that inherit from it, because it needs their gradients. It comes
    as early as possible, because the pack's activations live until then.

    Args:
        uses: each pack in order, and the last pack that inherits from it (itself if none does).
    """
    waiting: list[tuple[int, int]] = []
    for index, last_use in uses:
        while waiting and waiting[-1][1] < index:
            yield "backward", waiting.pop()[0]
        yield "forward", index
        waiting.append((index, last_use))
    while waiting:
        yield "backward", waiting.pop()[0]


def run_nested(
    model: Any,
    batches: MicroBatches,
    uses: Sequence[tuple[int, int]],
    finish: Finish,
    *,
    temperature: float,
    forward_only: bool,
) -> list[Any]:
    """Run all packs of a rank without a pipeline, in nested order.

    Args:
        model: the chunk, in Megatron's DistributedDataParallel.
        batches: micro-batches of the pass; each is released after its backward pass.
        uses: as in `nested_order`.
        finish: computes the loss.
        temperature: divides the logits.
        forward_only: make no backward passes.

    Returns:
        The kept value of each pack, in order.
    """
    kept: list[Any] = []
    if forward_only:
        for index, _ in uses:
            batch = batches.make(index)
            kept.append(finish(batch, model(*batch.inputs, temperature))[1])
            for over in [earlier for earlier, last_use in uses if last_use == index]:
                batches.done(over)
        return kept
    losses: list[Tensor] = []  # a stack: losses of packs that wait for their backward pass
    left = len(uses)
    with ExitStack() as unsynchronised:
        unsynchronised.enter_context(model.no_sync())
        for step, index in nested_order(uses):
            if step == "forward":
                batch = batches.make(index)
                loss, keep = finish(batch, model(*batch.inputs, temperature))
                assert loss is not None
                losses.append(loss)
                kept.append(keep)
                continue
            left -= 1
            if not left:
                unsynchronised.close()  # the last backward pass may overlap with the reduction of its gradients
            losses.pop().backward()
            batches.done(index)
    finalize_model_grads([model], None)
    return kept


def run_pipeline(
    chunks: Sequence[Any],
    make: Callable[[int], MicroBatch],
    indices: Sequence[int],
    finish: Finish,
    *,
    temperature: float,
    forward_only: bool,
) -> list[Any]:
    """Run all packs with Megatron's pipeline schedules; like `run_nested`, but only the last stage gets the kept
    values."""

    def forward_step(iterator: Iterator[MicroBatch], model: Any) -> tuple[Any, Any]:
        batch = next(iterator)
        return model(*batch.inputs, temperature), partial(finished, batch)

    def finished(batch: MicroBatch, output: Any) -> tuple[Tensor, Tensor, Any]:
        loss, keep = finish(batch, output)
        if loss is None:  # with experts Megatron reads the loss's device, in forward-only passes too
            loss = torch.zeros((), device=batch.targets.device)
        # The schedule's token count is not used: credits are normalised over the batch.
        return loss, torch.ones((), dtype=torch.int32, device=batch.targets.device), keep

    iterators = [map(make, indices) for _ in chunks]
    outputs: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(indices),
        seq_length=1,  # ignored: the stages send each other the shapes
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return outputs


def sum_gradients(model: list[Any], num_tokens: Tensor | None, **groups: Any) -> None:
    """Reduce gradients as Megatron does, but without its division by tokens: credits are already normalised."""
    finalize_model_grads(model, None, **groups)
