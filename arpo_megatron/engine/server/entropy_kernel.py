"""Entropies of a batch of logits in one pass over them, on a GPU.

The sampler's logits are rows of a whole vocabulary. In torch's own operations (division, log-softmax, exponential,
product, sum) they are read and written about ten times, which at a large batch takes as long as a good part of the
decoding step; here they are read once and nothing is written but the result.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192
_WARPS = 16


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(logits, stride, temperatures, entropies, size, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    inverse = 1.0 / tl.load(temperatures + row)
    # Of what was read: its maximum, and with x counted from there sum(exp(x)) and sum(x exp(x)).
    highest = -3.0e38
    total = 0.0
    weighted = 0.0
    for start in range(0, size, block):
        places = start + tl.arange(0, block)
        values = tl.load(logits + row * stride + places, mask=places < size, other=float("-inf")).to(tl.float32)
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
    """Entropy of softmax(logits / temperature) in nats: float[n, V], float32[n] -> float32[n].

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
