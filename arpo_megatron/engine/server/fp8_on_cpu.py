"""FP8 products of SGLang's CPU server, which has none of its own without AMX: values are dequantized first.

Weights have a scale for each 128 x 128 block, activations one for each 128 features of a token, as in SGLang's kernels
for Hopper. Products add in float32. So rollouts differ from bfloat16 ones as much as on a GPU, in another order of
additions; speed and memory are not those of FP8.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from arpo_megatron.hardware.fp8 import BLOCK

_FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FP8).max
_SMALLEST = 1e-10
"""Least magnitude that a scale is made for, as in SGLang's `per_token_group_quant_fp8`."""


def register_hooks() -> None:
    """Register the hooks of SGLang's FP8 layers in this process; SGLang's `load_plugins` applies them."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for method, apply in (("Fp8LinearMethod", _apply_linear), ("Fp8MoEMethod", _apply_experts)):
        path = f"sglang.srt.layers.quantization.fp8.{method}"
        HookRegistry.register(f"{path}.process_weights_after_loading", _keep, HookType.REPLACE)
        HookRegistry.register(f"{path}.apply", apply, HookType.REPLACE)


def rounded(x: Tensor) -> Tensor:
    """Return activations [..., features] after a way through FP8, in float32."""
    groups = x.float().reshape(*x.shape[:-1], -1, BLOCK)
    scales = groups.abs().amax(-1, keepdim=True).clamp(_SMALLEST) / _LARGEST
    values: Tensor = (groups / scales).clamp(-_LARGEST, _LARGEST).to(_FP8).float() * scales
    return values.flatten(-2)


def dequantized(weight: Tensor, scales: Tensor) -> Tensor:
    """Return FP8 weights [rows, columns] with scales [rows / 128, columns / 128] in float32."""
    rows, columns = scales.shape
    blocks = weight.float().view(rows, BLOCK, columns, BLOCK)
    return (blocks * scales[:, None, :, None]).view(weight.shape)


def _keep(_method: Any, _layer: Any) -> None:
    """Replace `process_weights_after_loading`, which prepares weights for AMX."""


def _apply_linear(_method: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    product = linear(rounded(x), dequantized(layer.weight, layer.weight_scale_inv)).to(x.dtype)
    return product if bias is None else product + bias


def _apply_experts(_method: Any, layer: Any, dispatch_output: Any) -> Any:
    """Compute the rank's own experts; other ranks' have other numbers in `topk_ids` and add their share later."""
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x = dispatch_output.hidden_states
    shares, chosen, _ = dispatch_output.topk_output
    found = torch.zeros(x.shape, dtype=torch.float32)
    for expert in range(len(layer.w13_weight)):
        tokens, place = torch.where(chosen == expert)
        if not len(tokens):
            continue
        inner = dequantized(layer.w13_weight[expert], layer.w13_weight_scale_inv[expert])
        gate, up = linear(rounded(x[tokens]), inner).to(x.dtype).chunk(2, dim=-1)
        outer = dequantized(layer.w2_weight[expert], layer.w2_weight_scale_inv[expert])
        out = linear(rounded(silu(gate) * up), outer).to(x.dtype)
        found.index_add_(0, tokens, out * shares[tokens, place, None].float())
    return StandardCombineInput(hidden_states=found.to(x.dtype))
