"""Triton kernels for the softmax of the output head on CUDA.

torch's operations hold rows of a whole vocabulary in float32 and read or write each of them many times. These kernels
read bfloat16 logits once, and in the backward pass write the gradient over them. `python -m tests.actor.head_traffic`
counts the bytes and launches of both.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192
_WARPS = 16


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _statistics(logits, targets, found, rows, size, temperature, block: tl.constexpr):  # type: ignore[no-untyped-def]  # nor do values in a kernel
    row = tl.program_id(0).to(tl.int64)
    # Over the values read so far: the maximum and, with x relative to it, sum(exp(x)) and sum(x exp(x)).
    highest = -3.0e38
    total = 0.0
    weighted = 0.0
    for start in range(0, size, block):
        columns = start + tl.arange(0, block)
        there = columns < size
        values = tl.load(logits + row * size + columns, mask=there, other=float("-inf")).to(tl.float32) / temperature
        higher = tl.maximum(highest, tl.max(values, 0))
        moved = highest - higher
        x = values - higher
        weights = tl.exp(x)
        weighted = (weighted + moved * total) * tl.exp(moved) + tl.sum(tl.where(weights > 0.0, x, 0.0) * weights, 0)
        total = total * tl.exp(moved) + tl.sum(weights, 0)
        highest = higher
    target = tl.load(targets + row)
    here = (target >= 0) & (target < size)
    chosen = tl.load(logits + row * size + target, mask=here, other=0.0).to(tl.float32) / temperature
    tl.store(found + row, highest)
    tl.store(found + rows + row, total)
    tl.store(found + 2 * rows + row, weighted)
    tl.store(found + 3 * rows + row, chosen)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _gradient(  # type: ignore[no-untyped-def]  # nor do values in a kernel
    logits, targets, normalisers, entropies, by_logprob, by_entropy, size, temperature, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    normaliser = tl.load(normalisers + row)
    entropy = tl.load(entropies + row)
    of_logprob = tl.load(by_logprob + row) / temperature
    of_entropy = tl.load(by_entropy + row) / temperature
    for start in range(0, size, block):
        columns = start + tl.arange(0, block)
        there = columns < size
        place = logits + row * size + columns
        log_p = tl.load(place, mask=there, other=0.0).to(tl.float32) / temperature - normaliser
        p = tl.exp(log_p)
        gradient = of_logprob * (tl.where(columns == target, 1.0, 0.0) - p) - of_entropy * p * (log_p + entropy)
        tl.store(place, gradient.to(logits.dtype.element_ty), mask=there)


def softmax_statistics(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Return the sums that log-probs and entropies follow from.

    For each row of x = logits / temperature: its maximum a, sum(exp(x - a)), sum((x - a) exp(x - a)), x at the target.

    Args:
        logits: [n, V], contiguous.
        targets: int64[n], columns; a target outside [0, V) gives 0.
        temperature: divides the logits.

    Returns:
        float32[4, n].
    """
    rows, size = logits.shape
    found = torch.empty(4, rows, dtype=torch.float32, device=logits.device)
    if rows:
        _statistics[(rows,)](logits, targets, found, rows, size, temperature, block=_BLOCK, num_warps=_WARPS)
    return found


def write_gradient(
    logits: Tensor,
    targets: Tensor,
    normalisers: Tensor,
    entropies: Tensor,
    by_logprob: Tensor,
    by_entropy: Tensor,
    temperature: float,
) -> None:
    """Replace logits by the gradient of their rows' log-probs and entropies.

    Args:
        logits: [n, V], contiguous.
        targets: as in `softmax_statistics`.
        normalisers: float32[n], log of the sum of exp(logits / temperature) over the whole vocabulary.
        entropies: float32[n] in nats.
        by_logprob: float32[n], gradient of the loss by the log-prob of the target.
        by_entropy: float32[n], gradient of the loss by the entropy.
        temperature: divides the logits.
    """
    rows, size = logits.shape
    if rows:
        _gradient[(rows,)](
            logits,
            targets,
            normalisers,
            entropies,
            by_logprob,
            by_entropy,
            size,
            temperature,
            block=_BLOCK,
            num_warps=_WARPS,
        )
