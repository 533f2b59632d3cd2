"""Kernels of a forward pass whose result for one token depends on the other tokens of the call.

Trainer and engine compute the same token in calls of other shapes: a pack, a prefill, a step of decoding. To agree bit
for bit, the result for a row must not depend on the number of rows, nor attention on how keys are divided among calls.
"""

from collections.abc import Callable
from typing import Any

ROWS = (1, 2, 3, 8, 64, 200, 512)
"""Numbers of rows of the calls that are compared with the largest."""
WIDTH, HEADS = 128, 4


def bench_invariance(width: int = WIDTH, seed: int = 1) -> dict[str, Any]:
    """Compare each kernel's first rows in calls of `ROWS` rows, in float32 on the CPU.

    Args:
        width: hidden size; queries, keys and values have it too, in four heads.
        seed: draws weights and activations, all of unit size.

    Returns:
        For each kernel the largest difference of any element over all sizes of calls, over the largest element; 0 if
        all calls agree bit for bit. `rows_differ` are the sizes that differ from the largest call.
    """
    import torch
    from torch.nn import functional

    from arpo_megatron.hardware.onednn import product

    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    hidden, most = draw(ROWS[-1], width), ROWS[-1]
    up, down, head = draw(4 * width, width), draw(width, 4 * width), draw(1000, width)
    scale, inner = draw(width), draw(most, 4 * width)

    def attention(rows: int) -> torch.Tensor:
        """Attend from the last token of `rows` to all before it, alone, as in a step of decoding."""
        keys = hidden.view(1, most, HEADS, -1).transpose(1, 2)[:, :, :rows]
        return functional.scaled_dot_product_attention(keys[:, :, -1:], keys, keys)[0, :, -1]

    whole = hidden.view(1, most, HEADS, -1).transpose(1, 2)
    prefill = functional.scaled_dot_product_attention(whole, whole, whole, is_causal=True)[0]
    kernels: dict[str, Callable[[int], torch.Tensor]] = {
        "embedding": lambda rows: functional.embedding(torch.arange(rows) % 1000, head),
        "linear, width to 4 width": lambda rows: functional.linear(hidden[:rows], up),
        "linear, 4 width to width": lambda rows: functional.linear(inner[:rows], down),
        "linear, width to 1000 logits": lambda rows: functional.linear(hidden[:rows], head),
        "oneDNN, width to 4 width": lambda rows: product(hidden[:rows], up),
        "oneDNN, 4 width to width": lambda rows: product(inner[:rows], down),
        "oneDNN, width to 1000 logits": lambda rows: product(hidden[:rows], head),
        "RMS norm": lambda rows: functional.rms_norm(hidden[:rows], (width,), scale),
        "SiLU": lambda rows: functional.silu(inner[:rows]),
        "log-softmax": lambda rows: functional.log_softmax(inner[:rows], -1),
    }
    rows: dict[str, dict[str, Any]] = {}
    for name, kernel in kernels.items():
        reference = kernel(most)
        rows[name] = _compare({count: (kernel(count), reference[:count]) for count in ROWS[:-1]})
    rows["attention, decoding against prefill"] = _compare(
        {count: (attention(count), prefill[:, count - 1]) for count in ROWS}
    )
    return {"width": width, "threads": torch.get_num_threads(), "kernels": rows}


def _compare(calls: "dict[int, tuple[Any, Any]]") -> dict[str, Any]:
    gaps = {rows: float((own - other).abs().max() / other.abs().max()) for rows, (own, other) in calls.items()}
    return {"largest_difference": max(gaps.values()), "rows_differ": [rows for rows, gap in gaps.items() if gap]}
