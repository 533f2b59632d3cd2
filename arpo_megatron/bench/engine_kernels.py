"""The trainer's kernels compared with those of SGLang's CPU server, each on the same inputs and weights.

A forward pass of the trainer over one chain of tokens records inputs and output of each kernel of the first layer, and
of the kernels before and after the layers. The engine's kernel then computes the same inputs: all tokens in one call,
as in a prefill, and one token per call, as in decoding a single request.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from arpo_megatron.actor import parallel
from arpo_megatron.actor.actor import Actor
from arpo_megatron.actor.logprobs import target_logprobs
from arpo_megatron.algorithms.credit import supervised_credit
from arpo_megatron.config import JobConfig
from arpo_megatron.hardware.onednn import product
from arpo_megatron.models.known import KNOWN_MODELS
from arpo_megatron.packing.packs import pack_trees
from arpo_megatron.tree import Role, RolloutTree

SHAPE = KNOWN_MODELS["Qwen/Qwen3-8B"]
VOCABULARY = 128
Kernel = Callable[[Tensor], Tensor]
Differences = dict[str, dict[str, float]]


def bench_engine_kernels(config: JobConfig, tokens: int = 96, seed: int = 1) -> dict[str, Any]:
    """Compare each kernel, in float32 with random weights.

    Args:
        config: sizes of the model.
        tokens: length of the chain.
        seed: draws tokens and weights.

    Returns:
        For each kernel and both ways of calling it, the largest difference of an element, that difference over the
        largest element, and the share of elements that differ.
    """
    weights, calls = _recorded_pass(config, tokens, seed)
    kernels = _engine_kernels()

    def by_rows(kernel: Kernel, inputs: Tensor, expected: Tensor) -> Differences:
        return _compare(expected, kernel(inputs), torch.cat([kernel(row) for row in inputs.split(1)]))

    def layer(name: str, kernel: Kernel) -> Differences:
        (inputs, *_), output = calls[name]
        return by_rows(kernel, inputs, output)

    def norm(name: str) -> Differences:
        return layer(name, lambda x: kernels.rms_norm(x, weights[name], SHAPE.norm_eps))

    def linear(name: str) -> Differences:
        return layer(name, lambda x: kernels.linear(x, weights[name]))

    (query, key, value, *_), attended = calls["core_attention"]
    attention = (query, key, value, query.shape[-1] ** -0.5)
    plain = calls["q_layernorm"][1], calls["k_layernorm"][1]
    rotated = torch.cat(kernels.rotary(torch.arange(tokens), *plain, SHAPE.rope_theta), 1)
    last, head = calls["final_layernorm"][1], weights["output_layer"]
    logits = product(last, head)
    found = {
        "embedding": layer("word_embeddings", lambda ids: kernels.embedding(ids, weights["word_embeddings"])),
        "RMS norm of hidden states": norm("input_layernorm"),
        "product to queries, keys, values": linear("linear_qkv"),
        "RMS norm of queries": norm("q_layernorm"),
        "rotary embedding": _compare(torch.cat([query, key], 1), rotated, rotated),
        "attention": _compare(attended, kernels.prefill_attention(*attention), kernels.decode_attention(*attention)),
        "product after attention": linear("linear_proj"),
        "first product of the MLP": linear("linear_fc1"),
        "SiLU and product of halves": by_rows(kernels.silu_and_mul, calls["linear_fc1"][1], calls["linear_fc2"][0][0]),
        "second product of the MLP": linear("linear_fc2"),
        "head": by_rows(lambda x: kernels.logits(x, head), last, logits),
        "log-softmax": by_rows(kernels.logprobs, logits, _all_logprobs(logits)),
    }
    return {
        "hidden": config.model.hidden_size,
        "ffn": config.model.ffn_size,
        "tokens": tokens,
        "threads": torch.get_num_threads(),
        "kernels": found,
    }


def _engine_kernels() -> Any:
    """Import the engine's kernels. SGLang reads the variable when it is imported."""
    from arpo_megatron.engine.server import cpu

    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    cpu.install_stubs()
    from arpo_megatron.engine.server import kernels

    return kernels


def _all_logprobs(logits: Tensor) -> Tensor:
    """Return the trainer's log-prob of every token of the vocabulary, [n, vocabulary] as the logits."""
    count, vocabulary = logits.shape
    rows, targets = logits.repeat_interleave(vocabulary, 0), torch.arange(vocabulary).repeat(count)
    return target_logprobs(rows, torch.eye(vocabulary), targets)[0].view_as(logits)


def _recorded_pass(
    config: JobConfig, tokens: int, seed: int
) -> tuple[dict[str, Tensor], dict[str, tuple[tuple[Tensor, ...], Tensor]]]:
    """Run the trainer over one chain; return weights, and inputs and output of each kernel, by the module's name."""
    own = config.model
    spec = replace(
        SHAPE,
        layers=1,
        hidden=own.hidden_size,
        heads=own.heads,
        kv_heads=own.kv_heads,
        head_dim=own.hidden_size // own.heads,
        ffn=own.ffn_size,
        vocabulary=VOCABULARY,
        max_positions=tokens,
    )
    ids = np.random.default_rng(seed).integers(VOCABULARY, size=tokens)
    tree = RolloutTree("chain", ids[:1])
    tree.add(0, Role.MODEL, ids[1:])
    calls: dict[str, tuple[tuple[Tensor, ...], Tensor]] = {}
    weights: dict[str, Tensor] = {}
    config = replace(config, model=replace(own, dtype="float32"))
    parallel.initialize(config.parallel, seed)
    try:
        actor = Actor(config, spec, None, optimizer=None, total_updates=1)
        generator = torch.Generator().manual_seed(seed)
        for path, module in actor.model.named_modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, nn.Parameter):  # scales of norms are 1 so far
                weight.data += 0.05 * torch.randn(weight.shape, generator=generator)
                weights[path.rpartition(".")[2]] = weight.data
            module.register_forward_hook(_recorder(calls, path.rpartition(".")[2]))
        packs = pack_trees([tree], supervised_credit([tree]), token_budget=tokens)
        actor.logprobs(packs, temperature=1.0, training=False)
    finally:
        parallel.destroy()
    return weights, calls


def _recorder(calls: dict[str, tuple[tuple[Tensor, ...], Tensor]], name: str) -> Callable[..., None]:
    """Return a hook that records a call without the dimension of batches, which is 1."""

    def flat(value: Tensor) -> Tensor:
        value = value.detach().squeeze(0 if len(value) == 1 else 1) if value.dim() > 1 else value.detach()
        return value.clone()

    def record(_module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        whole = output[0] if isinstance(output, tuple) else output
        if isinstance(whole, Tensor):
            calls[name] = tuple(flat(value) for value in inputs if isinstance(value, Tensor)), flat(whole)

    return record


def _compare(expected: Tensor, prefill: Tensor, decode: Tensor) -> Differences:
    return {"prefill": _difference(expected, prefill), "decode": _difference(expected, decode)}


def _difference(expected: Tensor, found: Tensor) -> dict[str, float]:
    gap = (expected - found.detach().view_as(expected)).abs()
    largest = float(gap.max())
    return {
        "largest": largest,
        "over_largest_element": largest / float(expected.abs().max()),
        "share_that_differs": float((gap > 0).double().mean()),
    }
