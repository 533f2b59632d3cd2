"""A Triton kernel for the entropies of a batch of logits.

torch's operations (division, log-softmax, exponential, product, sum) read and write the logits, rows of a whole
vocabulary, about ten times. With a large batch that is a considerable part of a decoding step. The kernel reads the
logits once and writes only the result.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192
_WARPS = 16


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _kernel(logits, stride, temperatures, entropies, size, block: tl.constexpr):  # type: ignore[no-untyped-def]  # nor do values in a kernel
    row = tl.program_id(0)
    inverse = 1.0 / tl.load(temperatures + row)
    # Over the values read so far: the maximum and, with x relative to it, sum(exp(x)) and sum(x exp(x)).
    highest = -3.0e38
    total = 0.0
    weighted = 0.0
    for start in range(0, size, block):
        columns = start + tl.arange(0, block)
        values = tl.load(logits + row * stride + columns, mask=columns < size, other=float("-inf")).to(tl.float32)
        values = values * inverse
        higher = tl.maximum(highest, tl.max(values, 0))
        moved = highest - higher
        x = values - higher
        weights = tl.exp(x)
        scale = tl.exp(moved)
        weighted = (weighted + moved * total) * scale + tl.sum(tl.where(weights > 0.0, x, 0.0) * weights, 0)
        total = total * scale + tl.sum(weights, 0)
        highest = higher
    tl.store(entropies + row, tl.log(total) - weighted / total)


def fused_entropy_nats(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Return the entropy of softmax(logits / temperature) in nats: float[n, V], float32[n] -> float32[n].

    -inf logits (forbidden tokens) count as probability 0.
    """
    rows, size = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    entropies = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _kernel[(rows,)](
        logits, logits.stride(0), temperatures.contiguous(), entropies, size, block=_BLOCK, num_warps=_WARPS
    )
    return entropies
