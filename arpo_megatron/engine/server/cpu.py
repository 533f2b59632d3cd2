"""Patches and stubs that SGLang's CPU server needs besides SGLang itself, for the version in `engine/version.py`.

- Stubs. `sgl_kernel` has no wheel that works without CUDA, and PyPI's `torchvision` is linked against CUDA and breaks
  `transformers` next to a CPU build of torch. SGLang imports names of both at module level. Each name is declared here
  and raises when it is called, so a server that starts with stubs computes exactly what it would with the packages.
- oneDNN for large matrix products: 1.3 to 1.9 times as fast as torch's own, and the same as the trainer's.
- Expert routes: SGLang stores them in pinned memory, which exists only with an accelerator.
"""

import importlib.machinery
import importlib.metadata
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from arpo_megatron.engine.version import SGLANG_VERSION
from arpo_megatron.errors import UserError

STUBS: Mapping[str, Mapping[str, str]] = {
    # Imported by the KV-cache and speculative-decoding modules; called by speculative decoding and by CPUs with AMX.
    "sgl_kernel": {
        "copy_all_layer_kv_cache_cpu": "moves KV pages (page size > 1, disaggregation)",
        "assign_req_to_token_pool_cpu": "speculative decoding",
        "assign_extend_cache_locs_cpu": "speculative decoding",
        "assign_draft_cache_locs_contiguous_cpu": "speculative decoding",
        "fill_accept_out_cache_loc_cpu": "speculative decoding",
        "fill_bonus_tokens_cpu": "speculative decoding",
        "build_tree_kernel_efficient_cpu": "speculative decoding",
        "verify_tree_greedy_cpu": "speculative decoding",
        "rotate_input_ids_cpu": "speculative decoding",
    },
    "torchvision": {},
    "torchvision.io": {"decode_jpeg": "images in prompts (sglang.srt.utils.common)"},
    "torchvision.transforms": {"InterpolationMode": "image models (sglang.srt.configs.deepseek_ocr)"},
    "torchvision.transforms.functional": {"InterpolationMode": "image models (sglang.srt.multimodal.internvl_utils)"},
}
"""Module -> name -> what would call it."""

_MIN_ONEDNN_WEIGHTS = 2**18
"""A oneDNN call costs about 15 microseconds more than torch's product, which smaller matrices do not win back."""


def install_stubs() -> None:
    """Put the stubs into this process's `sys.modules`; a second call changes nothing.

    Raises:
        UserError: SGLang has another version than `SGLANG_VERSION`, or torchvision is installed.
    """
    installed = importlib.metadata.version("sglang")
    if installed != SGLANG_VERSION:
        raise UserError(f"CPU rollouts need sglang {SGLANG_VERSION}, not {installed}: pip install the right one")
    if STUBS.keys() <= sys.modules.keys():
        return
    from transformers.utils.import_utils import is_torchvision_available

    # transformers caches the answer "no" and so never inspects the stub.
    if is_torchvision_available():
        raise UserError("CPU rollouts need an environment without torchvision: pip uninstall torchvision")
    for module_name, names in STUBS.items():
        _add_module(module_name, names)
    _disable_image_processors()


def register_hooks() -> None:
    """Register the hooks for oneDNN and expert routes in this process; SGLang's `load_plugins` applies them."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    linear = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply"
    HookRegistry.register(linear, _apply_linear, HookType.AROUND)
    cache = "sglang.srt.state_capturer.base.BaseHostCache.__init__"
    HookRegistry.register(cache, _init_unpinned_cache, HookType.REPLACE)


def _add_module(module_name: str, names: Mapping[str, str]) -> None:
    module = types.ModuleType(module_name, doc=f"stub of {__name__}")
    module.__spec__ = importlib.machinery.ModuleSpec(module_name, loader=None, is_package=True)
    module.__path__ = []
    for name, purpose in names.items():
        setattr(module, name, _raises(f"{module_name}.{name}", purpose))
    sys.modules[module_name] = module
    parent, _, child = module_name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


def _disable_image_processors() -> None:
    """Let SGLang register an image processor although transformers has none without torchvision.

    `transformers.AutoImageProcessor` is then a placeholder that raises on any use, and importing SGLang registers
    Janus-Pro's processor with it (sglang.srt.configs.janus_pro).
    """
    import sglang  # noqa: F401  (it replaces the transformers module, so it must be imported first)
    import transformers

    processor = type("AutoImageProcessor", (), {"register": staticmethod(lambda *_args, **_kwargs: None)})
    transformers.AutoImageProcessor = processor


def _raises(name: str, purpose: str) -> Callable[..., NoReturn]:
    def stub(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} ({purpose}) is not available on a CPU without that package")

    stub.__name__ = name
    return stub


def _apply_linear(original: Callable[..., Any], method: Any, layer: Any, x: Any, bias: Any = None) -> Any:
    """`UnquantizedLinearMethod.apply` with oneDNN for large weights: x [..., k] -> [..., n]."""
    from arpo_megatron.hardware.onednn import product

    weight = layer.weight
    if weight.numel() < _MIN_ONEDNN_WEIGHTS:
        return original(method, layer, x, bias)
    result = product(x.flatten(0, -2), weight).view(*x.shape[:-1], len(weight))
    return result if bias is None else result + bias


def _init_unpinned_cache(cache: Any, num_tokens: int, num_layers: int, topk_size: int, name: str) -> None:
    """`BaseHostCache.__init__` with ordinary memory: a row of experts for each slot of the KV pool."""
    import torch

    cache.buffer = torch.zeros((num_tokens, num_layers, topk_size), dtype=torch.int32)
    cache.num_tokens, cache.num_layers, cache.topk_size, cache.name = num_tokens, num_layers, topk_size, name
    cache._log_allocation()
