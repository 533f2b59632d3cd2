"""Large products of SGLang's CPU server through oneDNN, as the trainer's: 1.3 to 1.9 times as fast as torch's own."""

from collections.abc import Callable
from typing import Any

_MIN_WEIGHTS = 2**18
"""A call of oneDNN costs some 15 microseconds more than one of torch's product; smaller matrices do not earn them."""


def register() -> None:
    """Have SGLang's unquantized layers take it in this process (applied by SGLang's own `load_plugins`)."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    name = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply"
    HookRegistry.register(name, _apply, HookType.AROUND)


def _apply(original: Callable[..., Any], method: Any, layer: Any, x: Any, bias: Any = None) -> Any:
    """`UnquantizedLinearMethod.apply`: x [..., k] -> [..., n]."""
    from arpo_megatron.hardware.onednn import product

    weight = layer.weight
    if weight.numel() < _MIN_WEIGHTS:
        return original(method, layer, x, bias)
    result = product(x.flatten(0, -2), weight).view(*x.shape[:-1], len(weight))
    return result if bias is None else result + bias
