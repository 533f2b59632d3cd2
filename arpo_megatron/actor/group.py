"""The packs of a cut tree as one micro-batch of a pipeline.

A stage computes them one after the other and hands all hidden states to the next stage at once. The backward passes run
in reverse: a pack's gradient needs those that later packs return for its keys and values (context.py).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from arpo_megatron.actor.microbatch import MicroBatch

Outputs = tuple[Tensor, ...]
"""Log-probs and entropies of one pack; before the last stage its hidden states."""


def run_group(
    model: Any, batches: Sequence[MicroBatch], temperature: float, release: Sequence[Callable[[], None]]
) -> Tensor | Outputs:
    """Run the forward passes of a group on one chunk of the model, whose input is set.

    Args:
        model: the chunk, in Megatron's DistributedDataParallel.
        batches: the packs in order.
        temperature: divides the logits.
        release: one function per pack, called when the pack is no longer needed: after its backward pass, or after all
            forward passes if no gradients are computed. A group of one pack is not released here: it keeps no keys and
            values for others, so its small context may wait for the end of all passes.

    Returns:
        Log-probs and entropies of the packs in turn; before the last stage, the hidden states of all packs.
    """
    if len(batches) == 1:
        output: Tensor | Outputs = model(*batches[0].inputs, temperature)
        return output
    decoder, config = model.module.decoder, model.config
    received = decoder.input_tensor
    divisor = config.tensor_model_parallel_size if config.sequence_parallel else 1
    sizes = [len(batch.inputs[0]) // divisor for batch in batches]

    def forward(inputs: Sequence[Tensor | None]) -> list[Outputs]:
        outputs = []
        for batch, own in zip(batches, inputs, strict=True):
            decoder.set_input_tensor(own)
            found = model(*batch.inputs, temperature)
            outputs.append((found,) if isinstance(found, Tensor) else found)
        return outputs

    if torch.is_grad_enabled():
        # The first stage receives nothing; something must require a gradient.
        start = torch.zeros(0, requires_grad=True) if received is None else received
        joined: Outputs = _Group.apply(start, received is not None, sizes, forward, release)  # type: ignore[no-untyped-call]  # untyped in torch
    else:
        joined = _join(forward([None] * len(sizes) if received is None else received.split(sizes)))
        for call in release:
            call()
    return joined if len(joined) > 1 else joined[0]


def pairs(outputs: Outputs) -> list[tuple[Tensor, Tensor]]:
    """Return log-probs and entropies of each pack, from those of a group."""
    return list(zip(outputs[::2], outputs[1::2], strict=True))


def _join(outputs: Sequence[Outputs]) -> Outputs:
    """Return all hidden states as one tensor, or the log-probs and entropies of all packs."""
    if len(outputs[0]) == 1:
        return (torch.cat([hidden for (hidden,) in outputs]),)
    return tuple(value for output in outputs for value in output)


class _Group(torch.autograd.Function):
    """Run a group's passes as one operation, so that its backward passes have an order."""

    @staticmethod
    def forward(
        ctx: Any,
        received: Tensor,
        receives: bool,
        sizes: Sequence[int],
        forward: Callable[[Sequence[Tensor | None]], list[Outputs]],
        release: Sequence[Callable[[], None]],
    ) -> Outputs:
        inputs: list[Tensor | None] = [None] * len(sizes)
        if receives:
            inputs = [part.detach().requires_grad_() for part in received.split(list(sizes))]
        with torch.enable_grad():
            outputs = forward(inputs)
        ctx.inputs, ctx.outputs, ctx.release = inputs, outputs, release
        ctx.set_materialize_grads(False)
        joined = _join(outputs)
        # The schedule frees what it has sent, so hidden states must not be a view.
        return joined if len(joined) == 1 else tuple(value.detach() for value in joined)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        parts: list[tuple[Tensor | None, ...]]
        if len(ctx.outputs[0]) == 1:
            assert gradients[0] is not None
            parts = [(part,) for part in gradients[0].split([len(hidden) for (hidden,) in ctx.outputs])]
        else:
            parts = [gradients[first : first + 2] for first in range(0, len(gradients), 2)]
        while ctx.outputs:
            outputs = ctx.outputs.pop()
            given = [
                (value, own) for value, own in zip(outputs, parts[len(ctx.outputs)], strict=True) if own is not None
            ]
            torch.autograd.backward([value for value, _ in given], [own for _, own in given])
            ctx.release[len(ctx.outputs)]()
        received = None if ctx.inputs[0] is None else torch.cat([part.grad for part in ctx.inputs])
        ctx.inputs = None
        return received, None, None, None, None
