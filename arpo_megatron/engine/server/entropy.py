"""Exact entropy of every sampled token, computed inside SGLang's sampler.

The sampler's logits hold the whole vocabulary, so the entropy is exact, unlike an estimate from top log-probs. It
travels through SGLang's own channel for additions (`LogitsProcessorOutput.customized_info`) and arrives as
`meta_info["entropy"]`: one number for each output token, in nats, of the distribution softmax(logits / temperature)
before top-p and top-k.
"""

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the client reads META_KEY and does without torch
    from torch import Tensor

META_KEY = "entropy"
"""Key in a response's `meta_info`."""

WITHOUT_ENTROPY = "ARPO_ENGINE_WITHOUT_ENTROPY"
"""Environment variable: an engine that has it computes no entropies (`arpo bench gpu rollout` asks what they cost)."""

_SAMPLER = "sglang.srt.layers.sampler.Sampler.forward"


def register() -> None:
    """Wrap SGLang's sampler in this process (applied by SGLang's own `load_plugins`)."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if os.environ.get(WITHOUT_ENTROPY):
        return
    HookRegistry.register(_SAMPLER, _forward_with_entropy, HookType.AROUND)


def entropy_nats(logits: "Tensor") -> "Tensor":
    """Entropy of softmax(logits) over the last axis: float32[..., V] -> float32[...], in nats.

    -inf logits (forbidden tokens) count as probability 0.
    """
    import torch

    log_probs = torch.log_softmax(logits.float(), dim=-1)
    entropy: Tensor = torch.special.entr(log_probs.exp()).sum(dim=-1)
    return entropy


def sampled_entropy_nats(logits: "Tensor", temperatures: "Tensor | None") -> "Tensor":
    """Entropy of softmax(logits / temperatures): float[n, V], float32[n, 1] or None for 1 -> float32[n], in nats.

    On a GPU one kernel computes it; should that fail, torch's operations do from then on, and the log says so.
    """
    global _fused  # noqa: PLW0603  (one process, one GPU)
    import torch

    if logits.is_cuda and _fused:
        try:
            from arpo_megatron.engine.server.entropy_kernel import fused_entropy_nats

            ones = logits.new_ones(len(logits), dtype=torch.float32)
            return fused_entropy_nats(logits, ones if temperatures is None else temperatures.view(-1))
        except Exception:  # a compiler that is missing must not end the engine
            logging.getLogger(__name__).exception("entropies are computed without their kernel, and so more slowly")
            _fused = False
    return entropy_nats(logits if temperatures is None else logits.float() / temperatures)


_fused = True


class _HostValues:
    """Numbers on their way to the host, read by the scheduler after it has waited for the forward pass.

    The copy is queued behind the forward pass on its stream, so it costs no synchronisation of its own: the scheduler
    reads any result of a batch only after the sampled token ids of that batch, queued later, have arrived.
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
