"""Script of test_pretended_gpu.py: compile attention for sm_90 and print one JSON object per head shape.

Arguments: the compiled guard, then head shapes as HEADS,GROUPS,DIM and options of FlexAttention as NAME=VALUE, all
with commas between them. The kernels are those that `AttentionKernels` compiles ahead on a GPU.
"""

import ctypes
import json
import os
import sys
import time
from functools import partial
from typing import Any

os.environ.pop("TORCHDYNAMO_DISABLE", None)
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # for BACKEND=FLASH, which compiles under fake tensors too
ctypes.CDLL(sys.argv[1])  # before torch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.actor.sm90 import pretend

LENGTHS = (4096, 8192)
"""Padded queries and keys of the compiled kernels: a pack that inherits half of its keys."""


def main() -> None:
    pretend.install()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    from arpo_megatron.actor import flex_attention, warm_up

    plan, move = pretend.attention_functions(mode)
    warm_up.flex_plan, flex_attention.move = plan, move
    for shape in sys.argv[2:]:
        (heads, groups, width), options = parsed(shape)
        flex_attention.kernel_options = partial(lambda given, backend: given, options or None)
        kernels = warm_up.AttentionKernels(heads, groups, width, torch.bfloat16)
        before, started = len(pretend.KERNELS), time.monotonic()
        with mode:
            kernels.compile(LENGTHS)
            first = len(pretend.KERNELS)
            kernels.compile(LENGTHS)
        again, seconds = len(pretend.KERNELS) - first, round(time.monotonic() - started, 1)
        row = {"shape": shape, "seconds": seconds, "kernels": pretend.KERNELS[before:first], "again": again}
        print(json.dumps(row), flush=True)


def parsed(shape: str) -> tuple[list[int], dict[str, Any]]:
    """Return the sizes and the options of an argument."""
    sizes, options = list[int](), dict[str, Any]()
    for part in shape.split(","):
        name, given, value = part.partition("=")
        if given:
            options[name] = int(value) if value.isdecimal() else value
        else:
            sizes.append(int(name))
    return sizes, options


if __name__ == "__main__":
    main()
