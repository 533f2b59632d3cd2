"""Expert routes from SGLang's CPU server: its store of them asks for pinned memory, which only an accelerator has."""

from typing import Any


def register() -> None:
    """Give SGLang's host-side store ordinary memory in this process (applied by SGLang's own `load_plugins`)."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.state_capturer.base.BaseHostCache.__init__", _unpinned, HookType.REPLACE)


def _unpinned(cache: Any, num_tokens: int, num_layers: int, topk_size: int, name: str) -> None:
    """`BaseHostCache.__init__` with a buffer that is not pinned: a row of experts for every slot of the KV pool."""
    import torch

    cache.buffer = torch.zeros((num_tokens, num_layers, topk_size), dtype=torch.int32)
    cache.num_tokens, cache.num_layers, cache.topk_size, cache.name = num_tokens, num_layers, topk_size, name
    cache._log_allocation()
