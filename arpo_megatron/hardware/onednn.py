"""Matrix products on a CPU with oneDNN, for the trainer and the engine.

torch computes float32 products with MKL, which uses at most AVX2 on other processors than Intel's. oneDNN uses all
instructions of the processor, for example AVX-512.
"""

import torch
from torch import Tensor


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right.t() for matrices [m, k] and [n, k]. The oneDNN call has no gradient."""
    if left.dtype != torch.float32 or left.is_cuda or not torch.backends.mkldnn.is_available() or not left.numel():
        return left @ right.t()
    result: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")
    return result
