"""Every change to Transformer Engine's Python and to torch that lets TE run without CUDA.

TE names CUDA where it means the device of this rank, and asserts it. The table was checked against one version; others
are refused, because a half-patched layer may compute other numbers without failing.
"""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from arpo_megatron.hardware.patching import Patch, Replace, Retarget, apply
from arpo_megatron.hardware.te_emulation import kernels
from arpo_megatron.hardware.te_emulation.extension import NotEmulated, make_extension
from arpo_megatron.hardware.transformer_engine import check_emulation

_DEVICE = {"cuda": "cpu"}
_NAMESPACE = {"cuda": "cpu"}
"""torch.cpu has the functions of torch.cuda that are called here."""
_ON_CPU = {"is_cuda": "is_cpu"}
_BUFFER = "allocates a buffer on the device of the rank"
_ASSERTS = "asserts that tensors are on a GPU"
_TRITON = "is a Triton kernel"
_HOPPER = SimpleNamespace(
    name="emulated", major=9, minor=0, total_memory=80 << 30, multi_processor_count=132, warp_size=32
)


_coalescing_manager: Any = vars(torch.distributed)["_coalescing_manager"]


class _Finished:
    def wait(self) -> None:
        """Return at once: the collectives inside have run."""


@contextmanager
def _one_after_another(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
    """Run TE's collectives, which name a device, as they are called; leave Megatron's, which gloo can join."""
    if device is None:
        with _coalescing_manager(group, async_ops=async_ops) as joined:
            yield joined
        return
    yield _Finished()


def _kernel(name: str) -> Replace:
    return Replace(f"transformer_engine.pytorch.triton.permutation:{name}", getattr(kernels, name), _TRITON)


_TE = "transformer_engine.pytorch."
PATCHES: tuple[Patch, ...] = (
    Replace("torch:cuda.get_device_properties", lambda device=None: _HOPPER, "chooses kernels by the GPU"),
    Replace("torch:cuda.get_device_capability", lambda device=None: (9, 0), "chooses kernels by the GPU"),
    Replace("torch:cuda.is_current_stream_capturing", lambda: False, "asks whether a CUDA graph is captured"),
    Replace("torch:cuda.nvtx.range_push", lambda message: None, "names a range for a profiler"),
    Replace("torch:cuda.nvtx.range_pop", lambda: None, "names a range for a profiler"),
    Replace("torch:distributed._coalescing_manager", _one_after_another, "joins collectives by device; gloo cannot"),
    Replace(_TE + "quantization:check_fp8_support", lambda: (True, ""), "reads the version of CUDA"),
    Replace(_TE + "quantization:check_fp8_block_scaling_support", lambda: (True, ""), "reads the version of CUDA"),
    Replace(
        _TE + "distributed:_get_cuda_rng_state",
        lambda device=None, clone=False, graph_safe=True: torch.get_rng_state(),
        "the device's generator is the CPU's",
    ),
    Replace(
        _TE + "distributed:_set_cuda_rng_state",
        lambda new_state, device=-1, graph_safe=True: torch.set_rng_state(new_state),
        "the device's generator is the CPU's",
    ),
    Retarget(_TE + "utils:_empty_tensor", {}, _BUFFER, _NAMESPACE),
    Retarget(_TE + "module.base:get_dummy_wgrad", _DEVICE, _BUFFER),
    Retarget(_TE + "module.base:TransformerEngineBaseModule.__init__", {}, "asserts that there is a GPU", _NAMESPACE),
    Retarget(_TE + "module.base:TransformerEngineBaseModule.prepare_forward", {}, _ASSERTS, _ON_CPU),
    Retarget(_TE + "module.base:TransformerEngineBaseModule.set_extra_state", _DEVICE, "loads to the device"),
    Retarget(_TE + "quantization:FP8GlobalStateManager.set_skip_fp8_weight_update_tensor", _DEVICE, _BUFFER),
    Retarget(_TE + "quantization:Float8CurrentScalingRecipeState.__init__", _DEVICE, _BUFFER),
    Retarget(_TE + "quantization:Float8BlockScalingRecipeState.__init__", _DEVICE, _BUFFER),
    Retarget(_TE + "tensor.float8_tensor:Float8CurrentScalingQuantizer.make_empty", _DEVICE, _BUFFER),
    Retarget(_TE + "tensor.float8_blockwise_tensor:Float8BlockQuantizer.make_empty", _DEVICE, _BUFFER),
    Retarget(_TE + "distributed:_all_gather_fp8", _DEVICE, _BUFFER),
    Retarget(_TE + "optimizers.fused_adam:FusedAdam.__init__", _DEVICE, _BUFFER),
    *map(
        _kernel,
        (
            "make_row_id_map",
            "permute_with_mask_map",
            "unpermute_with_mask_map",
            "make_chunk_sort_map",
            "sort_chunks_by_map",
        ),
    ),
    Retarget(_TE + "permutation:_moe_permute_mask_map.forward", {}, _ASSERTS, _ON_CPU),
    Retarget(_TE + "permutation:_moe_unpermute_mask_map.forward", {}, _ASSERTS, _ON_CPU),
    Retarget(_TE + "permutation:_moe_chunk_sort.forward", {}, _ASSERTS, _ON_CPU),
)


@cache
def install() -> None:
    """Make `transformer_engine` and Megatron's layers of it importable without CUDA. Call it before importing Megatron.

    Raises:
        UserError: transformer-engine is missing or has an unchecked version.
    """
    check_emulation()
    os.environ["NVTE_TORCH_COMPILE"] = "0"  # its fused functions run as they are
    sys.modules["transformer_engine_torch"] = make_extension()
    # The name of no framework: the package's first import neither loads an extension nor warns that there is none.
    with patch.dict(os.environ, NVTE_PROJECT_BUILDING="1", NVTE_FRAMEWORK="none"):
        common = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda framework: None  # type: ignore[attr-defined]  # a module has no types
    onnx = f"{_TE}onnx_extensions"
    sys.modules[onnx] = _Onnx(onnx)
    importlib.import_module("transformer_engine.pytorch")
    apply(PATCHES)


class _Onnx(ModuleType):
    """Takes the place of TE's export to ONNX, which would import two more packages."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return NotEmulated(name)
