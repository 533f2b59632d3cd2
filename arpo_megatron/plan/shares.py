"""Shares of the hardware's peaks that a job reaches: assumptions until `arpo bench gpu` has measured them.

Comparisons between layouts depend on them less than seconds do.
"""

from arpo_megatron.hardware.specs import Hardware

PRODUCT_SHARE = 0.6
"""Share of the peak that large matrix products reach in training. Megatron-LM reports 40 to 50 % for whole steps on
H100."""
FP8_SHARE = 0.4
"""The same share for the layers' products in FP8, including casts. Attention and the head stay in bfloat16."""
NARROW_SHARE = 0.5
"""Factor for the experts' products: an expert is narrow and gets only a part of the tokens."""
ATTENTION_SHARE = 0.3
"""Share of the bfloat16 peak that attention reaches, counted in unmasked pairs. FlashAttention-2's forward pass reaches
0.34 to 0.37 on an H100 (arXiv 2407.08608, figure 5); here blocks have masked pairs too, and the backward pass is
slower."""
FLOAT32_SHARE = 1 / 16
"""Ratio of the float32 peak without TF32 to bfloat16's (NVIDIA H100 data sheet: 67 of 989 TFLOP/s)."""
MEMORY_SHARE = 0.7
"""Share of the memory's speed that memory-bound kernels and decoding reach."""
LINK_SHARE = 0.7
"""Share of a link's or network's speed that collectives reach."""


def memory_seconds(size: float, hardware: Hardware) -> float:
    """Return the seconds in which kernels read and write `size` bytes of a GPU's memory."""
    return size / (hardware.memory_speed * MEMORY_SHARE)


def group_speed(ranks: int, hardware: Hardware) -> float:
    """Return the bytes/s that a GPU sends in a group of `ranks` neighbouring ranks."""
    return (hardware.link if ranks <= hardware.gpus else hardware.network) * LINK_SHARE
