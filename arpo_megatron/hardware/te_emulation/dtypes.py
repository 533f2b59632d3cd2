"""The enumerations of `transformer_engine_torch` that TE's Python stores and compares, and torch's dtypes for them."""

from enum import IntEnum

import torch

DType = IntEnum(
    "DType",
    {
        "kByte": 0,
        "kInt16": 1,
        "kInt32": 2,
        "kInt64": 3,
        "kFloat32": 4,
        "kFloat16": 5,
        "kBFloat16": 6,
        "kFloat8E4M3": 7,
        "kFloat8E5M2": 8,
        "kFloat4E2M1": 10,
    },
)
"""Number formats of kernels (transformer_engine.h, `NVTEDType`)."""


class FP8FwdTensors(IntEnum):
    """Index of a forward tensor among a module's quantizers."""

    GEMM1_INPUT = 0
    GEMM1_WEIGHT = 1
    GEMM1_OUTPUT = 2
    GEMM2_INPUT = 3
    GEMM2_WEIGHT = 4
    GEMM2_OUTPUT = 5
    GEMM3_INPUT = 6
    GEMM3_WEIGHT = 7
    GEMM3_OUTPUT = 8


class FP8BwdTensors(IntEnum):
    """Index of a gradient among a module's quantizers."""

    GRAD_OUTPUT1 = 0
    GRAD_INPUT1 = 1
    GRAD_OUTPUT2 = 2
    GRAD_INPUT2 = 3
    GRAD_OUTPUT3 = 4
    GRAD_INPUT3 = 5


class Float8BlockScaleTensorFormat(IntEnum):
    """Order in memory of a blockwise tensor's data and scales."""

    GEMM_READY = 0
    COMPACT = 1
    INVALID = 2


class CommOverlapType(IntEnum):
    """Collective that a product overlaps with (not emulated, but compared)."""

    RS = 0
    AG = 1


TORCH_DTYPES = {
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}
"""torch's dtype of each format that the emulation computes with."""
LARGEST = {kind: torch.finfo(TORCH_DTYPES[kind]).max for kind in (DType.kFloat8E4M3, DType.kFloat8E5M2)}
"""Largest finite value of the FP8 formats: 448 and 57344."""
