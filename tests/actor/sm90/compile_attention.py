"""Script of test_pretended_gpu.py: compile attention for sm_90 and print one JSON object per head shape.

Arguments: the compiled guard, then head shapes as HEADS,GROUPS,DIM. The kernels are those that `AttentionKernels`
compiles ahead on a GPU.
"""

import ctypes
import json
import os
import sys

os.environ.pop("TORCHDYNAMO_DISABLE", None)
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
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
        heads, groups, width = map(int, shape.split(","))
        kernels = warm_up.AttentionKernels(heads, groups, width, torch.bfloat16)
        before = len(pretend.KERNELS)
        with mode:
            kernels.compile(LENGTHS)
            first = len(pretend.KERNELS)
            kernels.compile(LENGTHS)
        again = len(pretend.KERNELS) - first
        print(json.dumps({"shape": shape, "kernels": pretend.KERNELS[before:first], "again": again}), flush=True)


if __name__ == "__main__":
    main()
