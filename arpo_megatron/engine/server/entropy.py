"""Exact entropies of sampled tokens, computed inside SGLang's sampler.

The sampler has the logits of the whole vocabulary, so the entropies are exact, unlike estimates from top log-probs.
`LogitsProcessorOutput.customized_info`, SGLang's channel for additions, carries them to `meta_info["entropy"]`: one
number for each output token, in nats, of softmax(logits / temperature) before top-p and top-k.
"""

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the client imports META_KEY without torch
    from torch import Tensor

META_KEY = "entropy"
"""Key in a response's `meta_info`."""

WITHOUT_ENTROPY = "ARPO_ENGINE_WITHOUT_ENTROPY"
"""Environment variable that switches entropies off (`arpo bench gpu rollout` measures what they cost)."""

_SAMPLER = "sglang.srt.layers.sampler.Sampler.forward"


def register_hooks() -> None:
    """Register the hook of the sampler in this process; SGLang's `load_plugins` applies it."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if os.environ.get(WITHOUT_ENTROPY):
        return
    HookRegistry.register(_SAMPLER, _forward_with_entropy, HookType.AROUND)


def entropy_nats(logits: "Tensor") -> "Tensor":
    """Return the entropy of softmax(logits) over the last axis: float32[..., V] -> float32[...], in nats.

    -inf logits (forbidden tokens) count as probability 0.
    """
    import torch

    log_probs = torch.log_softmax(logits.float(), dim=-1)
    entropy: Tensor = torch.special.entr(log_probs.exp()).sum(dim=-1)
    return entropy


def sampled_entropy_nats(logits: "Tensor", temperatures: "Tensor | None") -> "Tensor":
    """Return the entropy of softmax(logits / temperatures) in nats.

    A Triton kernel computes it on a GPU. If the kernel fails, torch's operations are used from then on, with an entry
    in the log.

    Args:
        logits: float[n, V].
        temperatures: float32[n, 1]; None: 1.

    Returns:
        float32[n].
    """
    global _fused  # noqa: PLW0603  (one process, one GPU)
    import torch

    if logits.is_cuda and _fused:
        try:
            from arpo_megatron.engine.server.entropy_kernel import fused_entropy_nats

            ones = logits.new_ones(len(logits), dtype=torch.float32)
            return fused_entropy_nats(logits, ones if temperatures is None else temperatures.view(-1))
        except Exception:  # a missing compiler must not end the engine
            logging.getLogger(__name__).exception("the entropy kernel failed; torch computes entropies instead")
            _fused = False
    return entropy_nats(logits if temperatures is None else logits.float() / temperatures)


_fused = True


class _HostValues:
    """Values that are copied to the host without a synchronisation.

    The copy is queued on the stream after the forward pass. The scheduler reads results of a batch only after the
    batch's sampled token ids, which are queued later, have arrived.
    """

    __slots__ = ("_tensor", "_values")

    def __init__(self, tensor: "Tensor") -> None:
        self._tensor = tensor.to("cpu", non_blocking=True)
        self._values: list[float] | None = None

    def __getitem__(self, index: int) -> float:
        if self._values is None:
            self._values = self._tensor.tolist()
        return self._values[index]


def _forward_with_entropy(
    original: Callable[..., "Tensor"], sampler: Any, logits_output: Any, sampling_info: Any, *args: Any, **kwargs: Any
) -> "Tensor":
    """`Sampler.forward`, with the entropy added to `logits_output`."""
    # Before the call: the sampler overwrites the logits with probabilities in place.
    logits = logits_output.next_token_logits
    temperatures = None if sampling_info.is_all_greedy else sampling_info.temperatures
    entropy = _HostValues(sampled_entropy_nats(logits, temperatures))
    token_ids = original(sampler, logits_output, sampling_info, *args, **kwargs)
    logits_output.customized_info = {META_KEY: entropy}
    return token_ids
