"""The kernels of SGLang's CPU server for a dense model, one by one, to compare them with a trainer's.

Import this module after `cpu.install_stubs`, in a process without an engine: the server's patches stay.
"""

from types import SimpleNamespace

import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_context
from torch import Tensor

from arpo_megatron.engine.server import cpu

cpu.register_hooks()
load_plugins()


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """int64[n], [vocabulary, width] -> [n, width]."""
    found: Tensor = UnquantizedEmbeddingMethod().embedding(SimpleNamespace(weight=weight), token_ids)
    return found


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise [..., width] over the last dimension."""
    norm = RMSNorm(len(weight), eps)
    norm.weight.data = weight
    found: Tensor = norm.forward_cpu(hidden)
    return found


def linear(inputs: Tensor, weight: Tensor) -> Tensor:
    """[n, k] @ [m, k].T -> [n, m]."""
    found: Tensor = UnquantizedLinearMethod().apply(SimpleNamespace(weight=weight), inputs)
    return found


def rotary(positions: Tensor, query: Tensor, key: Tensor, base: float) -> tuple[Tensor, Tensor]:
    """Rotate query [n, heads, head_dim] and key [n, groups, head_dim] to their positions, int64[n]."""
    size, longest = query.shape[-1], int(positions.max()) + 1
    with get_context().override_server_args():
        rope = RotaryEmbedding(size, size, longest, int(base), True, query.dtype)
    found = rope.forward_cpu(positions, query.flatten(1), key.flatten(1))
    return found[0].view_as(query), found[1].view_as(key)


def prefill_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attend causally within one request: query [n, heads, head_dim], key and value [n, groups, head_dim]."""
    count = len(query)
    return _attend(query, key, value, [count], scale, extend=count)


def decode_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Compute `prefill_attention` as one step of decoding per token."""
    return _attend(query, key, value, list(range(1, len(query) + 1)), scale, extend=None)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float, *, extend: int | None
) -> Tensor:
    """Run one request per length over the same tokens."""
    requests, sizes = torch.arange(len(lengths)), torch.tensor(lengths)
    tokens = torch.arange(len(key)).expand(len(lengths), -1)
    common = (query, torch.empty_like(query), key, value, tokens, requests, sizes)
    options = {"scaling": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    backend = object.__new__(TorchNativeAttnBackend)  # without a model runner, which these methods do not use
    if extend is None:
        found: Tensor = backend._run_sdpa_forward_decode(*common, **options)
    else:
        prefix, new = torch.zeros_like(sizes), torch.tensor([extend])
        found = backend._run_sdpa_forward_extend(*common, prefix, new, causal=True, **options)
    return found


def silu_and_mul(inputs: Tensor) -> Tensor:
    """Return silu of the first half of [n, 2 k], times the second half."""
    with get_context().override_server_args():
        found: Tensor = SiluAndMul().forward_cpu(inputs)
    return found


def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """[n, width] @ [vocabulary, width].T -> [n, vocabulary]."""
    plain = SimpleNamespace(use_fp32_lm_head=False, rl_on_policy_target=None)
    found: Tensor = LogitsProcessor._compute_lm_head(plain, hidden, SimpleNamespace(weight=weight))
    return found


def logprobs(values: Tensor) -> Tensor:
    """Return the log-probs of logits [n, vocabulary] at temperature 1, as `Sampler.forward` computes them."""
    return torch.log(torch.softmax(values, dim=-1))
