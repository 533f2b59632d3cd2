"""Matrix products on a CPU through oneDNN, for the trainer and the engine.

torch's float32 products go to MKL, which keeps to AVX2 on processors that are not Intel's. oneDNN uses what is there,
AVX-512 for instance.
"""

import torch
from torch import Tensor


def product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right.t() for matrices [m, k] and [n, k], without a gradient of its own."""
    if left.dtype != torch.float32 or left.is_cuda or not torch.backends.mkldnn.is_available() or not left.numel():
        return left @ right.t()
    result: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")
    return result
