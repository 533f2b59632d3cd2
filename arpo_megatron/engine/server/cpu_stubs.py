"""Everything SGLang 0.5.18 wants of a GPU installation although a CPU server never uses it.

Two packages are left out on a CPU: `sgl_kernel` has no wheel that works without CUDA, and PyPI's `torchvision` is
linked against CUDA and breaks `transformers` beside a CPU build of torch. SGLang names parts of both in module-level
imports. Each name below is declared, and using it raises: nothing is computed here, so a server that starts with
these stand-ins computes exactly what it would compute with the packages.
"""

import importlib.machinery
import importlib.metadata
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from arpo_megatron.errors import UserError

SGLANG_VERSION = "0.5.18"
"""The version whose imports were read and whose server was run with these stand-ins."""

STANDINS: Mapping[str, Mapping[str, str]] = {
    # Drawn in by the KV-cache and speculative-decoding modules; called by speculative decoding and by CPUs with AMX.
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


def install() -> None:
    """Put the stand-ins in place in this process; a second call changes nothing.

    Raises:
        UserError: another SGLang version than the one these were checked against, or an installed torchvision.
    """
    found = importlib.metadata.version("sglang")
    if found != SGLANG_VERSION:
        raise UserError(
            f"CPU rollouts are checked with sglang {SGLANG_VERSION}, but {found} is installed: install that one"
        )
    if STANDINS.keys() <= sys.modules.keys():
        return
    from transformers.utils.import_utils import is_torchvision_available

    # transformers remembers the answer "no", and so never looks into the stand-in module.
    if is_torchvision_available():
        raise UserError("CPU rollouts need an environment without torchvision: pip uninstall torchvision")
    for module_name, names in STANDINS.items():
        _add_module(module_name, names)
    _forget_image_processors()


def _add_module(module_name: str, names: Mapping[str, str]) -> None:
    module = types.ModuleType(module_name, doc=f"stand-in of {__name__}")
    module.__spec__ = importlib.machinery.ModuleSpec(module_name, loader=None, is_package=True)
    module.__path__ = []
    for name, purpose in names.items():
        setattr(module, name, _raises(f"{module_name}.{name}", purpose))
    sys.modules[module_name] = module
    parent, _, child = module_name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


def _forget_image_processors() -> None:
    """Let SGLang register an image processor with a transformers that has none.

    Without torchvision `transformers.AutoImageProcessor` is a placeholder that raises on any use, and SGLang registers
    Janus-Pro's processor with it on import (sglang.srt.configs.janus_pro).
    """
    import sglang  # noqa: F401  (it puts a fresh transformers module in place, so it must come first)
    import transformers

    processor = type("AutoImageProcessor", (), {"register": staticmethod(lambda *_args, **_kwargs: None)})
    transformers.AutoImageProcessor = processor  # type: ignore[misc, assignment]  # a stand-in


def _raises(name: str, purpose: str) -> Callable[..., NoReturn]:
    def stand_in(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} ({purpose}) is not available on a CPU without that package")

    stand_in.__name__ = name
    return stand_in
