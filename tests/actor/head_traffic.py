"""Print launches and bytes of the output head's softmax: by torch's operations, and by the kernels of head_kernel.py.

    python -m tests.actor.head_traffic

Bytes are those of reads and writes of whole rows of the vocabulary, per logit in bfloat16, with a temperature and a
gradient of the entropy. Each of torch's operations is a launch, except views and allocations. The kernels run in
Triton's interpreter, which counts what they load and store. Prints one JSON object per row.
"""

import json
import os
from collections.abc import Callable
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
import triton.runtime.interpreter as interpreter
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from arpo_megatron.actor import logprobs
from arpo_megatron.actor.head_kernel import softmax_statistics, write_gradient

ROWS, SIZE = 4, 20_001
TEMPERATURE = 0.7
_FREE = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default, torch.ops.aten._unsafe_view.default)
_FEW = (torch.ops.aten.gather.default, torch.ops.aten.scatter_add_.default)
"""Operations on one element of each row."""


class Traffic(TorchDispatchMode):
    """Counts launches, and the bytes of tensors as large as the logits; kernels add theirs."""

    launches = 0
    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count it."""
        found = func(*args, **(kwargs or {}))
        if func.is_view or func in _FREE:
            return found
        self.launches += 1
        read, written = (
            [t for t in tree_leaves(values) if isinstance(t, Tensor) and t.numel() == ROWS * SIZE]
            for values in ((args, kwargs), found)
        )
        if func not in _FEW:
            self.bytes += sum(t.nbytes for t in [*read, *written])
        return found


def count_kernels(traffic: Traffic) -> None:
    """Let Triton's interpreter add launches, and loads and stores of bfloat16, which only the logits have."""
    builder: Any = interpreter.InterpreterBuilder
    run, load, store = interpreter.GridExecutor.__call__, builder.create_masked_load, builder.create_masked_store

    def counted_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        traffic.launches += 1
        with torch.utils._python_dispatch._disable_current_modes():
            return run(self, *args, **kwargs)

    def counted_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        traffic.bytes += _bytes(pointers, mask)
        return load(self, pointers, mask, *rest)

    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        traffic.bytes += _bytes(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    interpreter.GridExecutor.__call__ = counted_run
    builder.create_masked_load, builder.create_masked_store = counted_load, counted_store


def _bytes(pointers: Any, mask: Any) -> int:
    wide = pointers.data.size > 1  # the target's logit is read once more
    return 2 * int(mask.data.sum()) if wide and pointers.get_element_ty().is_bf16() else 0


def main() -> None:
    torch.manual_seed(0)
    logits = torch.randn(ROWS, SIZE).to(torch.bfloat16)
    targets = torch.randint(SIZE, (ROWS,))
    normalisers, entropies, by_logprob, by_entropy = torch.rand(4, ROWS)
    inputs = (targets, normalisers, entropies, by_logprob, by_entropy, TEMPERATURE)
    passes: dict[str, dict[str, Callable[[Tensor], Any]]] = {
        "forward": {
            "torch": lambda x: logprobs._statistics(x, targets, TEMPERATURE),
            "kernel": lambda x: softmax_statistics(x, targets, TEMPERATURE),
        },
        "backward": {
            "torch": lambda x: logprobs._gradient(x, *inputs),
            "kernel": lambda x: write_gradient(x, *inputs),
        },
    }
    traffic = Traffic()
    count_kernels(traffic)
    for name, ways in passes.items():
        for way, function in ways.items():
            traffic.launches, traffic.bytes, own = 0, 0, logits.clone()
            with traffic:
                function(own)
            size = traffic.bytes / logits.numel()
            print(json.dumps({"pass": name, "by": way, "launches": traffic.launches, "bytes_per_logit": size}))


if __name__ == "__main__":
    main()
