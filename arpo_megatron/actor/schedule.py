"""The order of forward and backward passes over packs.

A pack's backward pass waits for the packs that inherit keys and values from it. Alone, a rank nests the passes, so only
the activations of one path of packs are alive at a time. Ranks that exchange experts or stages of a pipeline must agree
on an order. It is that of groups (packing/packs.py): all forward passes in order, then all backward passes in reverse.
A pipeline runs Megatron's one-forward-one-backward schedules, in which a group is one micro-batch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count, islice, zip_longest
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from arpo_megatron.actor.group import pairs, run_group
from arpo_megatron.actor.microbatch import MicroBatch, MicroBatches
from arpo_megatron.actor.stages import StageCommunicator, pipeline_groups
from arpo_megatron.config import ParallelConfig
from arpo_megatron.packing.layout import TreePack
from arpo_megatron.packing.packs import last_uses, rank_groups

LossFunction = Callable[[MicroBatch, tuple[Tensor, Tensor]], tuple[Tensor | None, Any]]
"""A function from a micro-batch and the model output to the loss (None in a forward-only pass) and a value to keep."""

Passes = Sequence[tuple[str, int]]
"""Passes of packs in order, as ("forward" or "backward", pack)."""


def own_groups(packs: Sequence[TreePack], parallel: ParallelConfig) -> list[list[int]]:
    """Return this rank's groups of packs in order; larger indices are empty packs that keep the ranks in step."""
    own = rank_groups(packs, parallel_state.get_data_parallel_rank())
    every = [rank_groups(packs, rank) for rank in range(parallel.data)] if parallel.expert > 1 else [own]
    nothing: list[int] = []
    sizes = [max(map(len, groups)) for groups in zip_longest(*every, fillvalue=nothing)] or [1]
    if parallel.virtual_pipeline > 1:  # the interleaved schedule needs a multiple of the stages
        sizes += [1] * (-len(sizes) % parallel.pipeline)
    empty = count(len(packs))
    own += [nothing] * (len(sizes) - len(own))
    return [[*group, *islice(empty, size - len(group))] for group, size in zip(own, sizes, strict=True)]


def forward_order(packs: Sequence[TreePack], parallel: ParallelConfig) -> list[int]:
    """Return the indices of this rank's packs in the order of their forward passes, empty packs included."""
    return [index for group in own_groups(packs, parallel) for index in group]


def pass_order(packs: Sequence[TreePack], groups: Sequence[Sequence[int]], parallel: ParallelConfig) -> Passes:
    """Return this rank's passes without a pipeline.

    Args:
        packs: all packs, the empty ones of `groups` included.
        groups: from `own_groups`.
        parallel: layout.
    """
    if parallel.nested_packs:
        uses = last_uses(packs)
        return list(nested_order([(index, uses[index]) for group in groups for index in group]))
    return [
        step
        for group in groups
        for step in (*(("forward", index) for index in group), *(("backward", index) for index in reversed(group)))
    ]


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


def run_passes(
    chunks: Sequence[Any],
    packs: Sequence[TreePack],
    batches: MicroBatches,
    groups: Sequence[Sequence[int]],
    parallel: ParallelConfig,
    finish: LossFunction,
    *,
    temperature: float,
    forward_only: bool,
) -> list[Any]:
    """Run this rank's packs in the order of its layout.

    Args:
        chunks: the model chunks in Megatron's DistributedDataParallel; their config has the reduction of gradients.
        packs: all packs, the empty ones of `groups` included.
        batches: micro-batches of the packs; each is released after its backward pass.
        groups: from `own_groups`.
        parallel: layout.
        finish: computes the loss.
        temperature: divides the logits.
        forward_only: make no backward passes.

    Returns:
        The kept value of each pack, in the order of forward passes; none before the last pipeline stage.
    """
    if parallel.pipeline > 1:
        return run_pipeline(chunks, batches, groups, finish, temperature=temperature, forward_only=forward_only)
    order = pass_order(packs, groups, parallel)
    return run_nested(chunks[0], batches, order, finish, temperature=temperature, forward_only=forward_only)


def run_nested(
    model: Any,
    batches: MicroBatches,
    order: Passes,
    finish: LossFunction,
    *,
    temperature: float,
    forward_only: bool,
) -> list[Any]:
    """Run all packs of a rank without a pipeline, with the arguments of `run_passes` and an `order` of `pass_order`."""
    kept: list[Any] = []
    losses: list[Tensor] = []  # a stack: losses of packs that wait for their backward pass
    left = len(order) // 2
    with ExitStack() as unsynchronised:
        unsynchronised.enter_context(model.no_sync())
        for step, index in order:
            if step == "forward":
                batch = batches.make(index)
                loss, keep = finish(batch, model(*batch.inputs, temperature))
                losses += [] if loss is None else [loss]
                kept.append(keep)
                continue
            if forward_only:
                batches.done(index)
                continue
            left -= 1
            if not left:
                unsynchronised.close()  # the last backward pass may overlap with the reduction of its gradients
            losses.pop().backward()
            batches.done(index)
    if not forward_only:
        model.config.finalize_model_grads_func([model], None)
    return kept


def run_pipeline(
    chunks: Sequence[Any],
    batches: MicroBatches,
    groups: Sequence[Sequence[int]],
    finish: LossFunction,
    *,
    temperature: float,
    forward_only: bool,
) -> list[Any]:
    """Run all groups with Megatron's pipeline schedules, with the arguments of `run_passes`."""
    left = {index: len(chunks) for group in groups for index in group}

    def release_after_last_chunk(index: int) -> None:  # on one chunk
        left[index] -= 1
        if not left[index]:
            batches.done(index)

    def forward_step(iterator: Iterator[Sequence[int]], model: Any) -> tuple[Any, Any]:
        group = next(iterator)
        micro_batches = [batches.make(index) for index in group]
        output = run_group(
            model, micro_batches, temperature, [partial(release_after_last_chunk, index) for index in group]
        )
        return output, partial(group_loss, micro_batches)

    def group_loss(micro_batches: Sequence[MicroBatch], output: Any) -> tuple[Tensor, Tensor, Any]:
        done = [finish(batch, each) for batch, each in zip(micro_batches, pairs(output), strict=True)]
        loss = torch.zeros((), device=micro_batches[0].targets.device)  # with experts Megatron reads its device
        for own, _ in done:
            loss = loss if own is None else loss + own
        # The schedule's token count is not used: credits are normalised over the batch.
        return loss, torch.ones((), dtype=torch.int32, device=loss.device), [keep for _, keep in done]

    iterators = [iter(groups) for _ in chunks]
    communicator = StageCommunicator(chunks[0].config, [sum(map(batches.tokens, group)) for group in groups])
    outputs: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(groups),
        seq_length=1,  # ignored, as is the next: the shapes differ
        micro_batch_size=1,
        forward_only=forward_only,
        p2p_communicator=communicator,
        pg_collection=pipeline_groups(),
    )
    communicator.wait()
    return [keep for group in outputs for keep in group]


def sum_gradients(model: list[Any], num_tokens: Tensor | None, **groups: Any) -> None:
    """Reduce gradients as Megatron does, but without its division by tokens: credits are already normalised."""
    finalize_model_grads(model, None, **groups)
