"""The CPU platform layer: every change to torch and megatron-core that lets training run without CUDA.

megatron-core runs on gloo, but names CUDA where it means the device of this rank. `PATCHES` lists every such occurrence
and its replacement.

With CUDA, `install` does nothing. Each checked version of megatron-core has its table. Other versions are refused on a
CPU, because a half-patched optimizer may train wrongly without failing.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from arpo_megatron.hardware.patching import Patch, PresetAttribute, Replace, Retarget, apply, check_version

CHECKED_MEGATRON_CORE = "0.16.1"
"""The pinned version of megatron-core, whose table is `PATCHES`."""
NEWEST_MEGATRON_CORE = "0.19.2"
"""The newest version with a table, for Python 3.12 (`make test-newest`)."""


_CPU = torch.device("cpu")
_DEVICE = {"cuda": "cpu"}
_FP32_NAME = {"torch.cuda.FloatTensor": "torch.FloatTensor"}
_HALF_NAMES = {
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}
_STATE = "allocates a scalar or a loss-scale tensor on the device of the rank"
_TYPES = "chooses parameter groups by the name of the tensor type"


def _split_sizes_for_gloo(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
    """Convert the split sizes that the all-to-all dispatcher copies to the host on CUDA; here they are on the host."""
    if point == self.cuda_dtoh_point:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            if isinstance(sizes := getattr(self, name), torch.Tensor):
                setattr(self, name, sizes.numpy())
    return tokens_per_expert


_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher."

PATCHES: tuple[Patch, ...] = (
    Replace("torch:cuda.current_device", lambda: _CPU, "named as the device of every new buffer"),
    Replace("torch:cuda.synchronize", lambda device=None: None, "CPU kernels are synchronous"),
    Replace(
        "torch:cuda.get_rng_state", lambda device=None: torch.get_rng_state(), "the device's generator is the CPU's"
    ),
    Replace(
        "torch:cuda.random.get_rng_state", lambda device=None: torch.get_rng_state(), "the same, by its other name"
    ),
    Replace("torch:cuda.manual_seed", torch.manual_seed, "the same generator is seeded"),
    Replace("torch:Tensor.cuda", lambda self, *args, **kwargs: self, "moves gathered optimizer state to the device"),
    Replace(
        "megatron.core.tensor_parallel.random:_set_cuda_rng_state",
        lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state),
        "restores the generator by a private CUDA call (recomputation, tensor-parallel initialisation)",
    ),
    PresetAttribute(_DISPATCHER + "cuda_dtoh_stream", "none", "would be a new CUDA stream, for copies to the host"),
    Retarget(_DISPATCHER + "__init__", _DEVICE, "places the indices of the fused permutation on the device"),
    Replace(_DISPATCHER + "_maybe_dtoh_and_synchronize", _split_sizes_for_gloo, "copies to the host on that stream"),
    Retarget("megatron.core.utils:local_multi_tensor_l2_norm", _DEVICE, "returns the norm on the device"),
    Retarget("megatron.core.optimizer.clip_grads:get_grad_norm_fp32", _DEVICE, _STATE),
    Retarget(
        "megatron.core.optimizer.clip_grads:clip_grad_by_total_norm_fp32",
        _DEVICE | _FP32_NAME,
        _STATE + " and asserts the gradient's type by name",
    ),
    Retarget("megatron.core.optimizer.clip_grads:count_zeros_fp32", _DEVICE, _STATE),
    Retarget("megatron.core.optimizer.optimizer:FP32Optimizer.__init__", _DEVICE, _STATE),
    Retarget("megatron.core.optimizer.optimizer:MixedPrecisionOptimizer.__init__", _DEVICE, _STATE),
    Retarget(
        "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params.__init__", _HALF_NAMES | _FP32_NAME, _TYPES
    ),
    Retarget(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._build_model_and_main_param_groups",
        _HALF_NAMES | _FP32_NAME,
        _TYPES,
    ),
    Retarget("megatron.core.pipeline_parallel.schedules:forward_backward_no_pipelining", _DEVICE, _STATE),
    Retarget(
        "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving", _DEVICE, _STATE
    ),
    Retarget(
        "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving", _DEVICE, _STATE
    ),
)
TABLES: Mapping[str, tuple[Patch, ...]] = {
    CHECKED_MEGATRON_CORE: PATCHES,
    NEWEST_MEGATRON_CORE: (
        *PATCHES,
        Replace("torch:cuda.current_stream", lambda device=None: None, "would wait for graphs; there are none"),
    ),
}
"""Patches by version of megatron-core."""


@cache
def install() -> None:
    """Apply the version's patches once per process; do nothing if CUDA is available.

    Raises:
        UserError: megatron-core is missing or has an unchecked version.
    """
    if torch.cuda.is_available():
        return
    apply(TABLES[check_version("megatron-core", *TABLES)])
