"""Bytes of memory-bound kernels, counted by hand from the shapes of each kernel's inputs and outputs."""

from dataclasses import replace

import pytest

from arpo_megatron.config import ParallelConfig
from arpo_megatron.models.known import KNOWN_MODELS
from arpo_megatron.plan.kernels import (
    backward_bytes,
    forward_bytes,
    head_bytes,
    repeated_bytes,
    vocabulary_gradient_bytes,
)

DENSE, MIXTURE = KNOWN_MODELS["Qwen/Qwen3-8B"], KNOWN_MODELS["Qwen/Qwen3-30B-A3B"]
ONE = ParallelConfig()


def test_kernels_of_a_dense_layer() -> None:
    """Width 4096, 32 query and 8 key heads of width 128, MLP 12288, two bytes per number."""
    hidden, queries, keys, ffn = 4096, 4096, 1024, 12288
    assert forward_bytes(DENSE, ONE, 2) == {
        "norms": 2 * 2 * (hidden + hidden),
        "residuals": 2 * 2 * (hidden + hidden + hidden),
        # copies of queries and keys, norms of both, rotations of both
        "queries_and_keys": 2 * (2 * (queries + keys) + 2 * (queries + keys) + 2 * (queries + keys)),
        "padding": 2 * (2 * queries + 2 * keys + 2 * keys),
        "activation": 2 * (2 * ffn + ffn),
    }
    assert backward_bytes(DENSE, ONE, 2) == {
        "norms": 2 * 2 * (hidden + hidden + hidden),
        "residuals": 2 * 2 * (hidden + hidden + hidden),
        # joined with the values, norms (input, two gradients), rotations
        "queries_and_keys": 2 * (2 * (queries + 2 * keys) + 3 * (queries + keys) + 2 * (queries + keys)),
        "padding": 2 * (2 * (queries + 2 * keys) + queries + queries),
        "activation": 2 * (2 * ffn + ffn + 2 * ffn),
    }


def test_models_without_norms_of_heads_copy_queries_only() -> None:
    plain = KNOWN_MODELS["meta-llama/Llama-3.1-8B-Instruct"]
    queries, keys = 4096, 1024
    assert forward_bytes(plain, ONE, 2)["queries_and_keys"] == 2 * (2 * queries + 2 * (queries + keys))


def test_sequence_parallelism_divides_all_kernels_and_tensor_parallelism_alone_not_the_residual_stream() -> None:
    one, whole, divided = (
        forward_bytes(DENSE, ParallelConfig(tensor=tensor, sequence=sequence), 2)
        for tensor, sequence in ((1, False), (4, False), (4, True))
    )
    assert divided == {name: size / 4 for name, size in one.items()}
    for name, size in whole.items():
        assert size == (one[name] if name in ("norms", "residuals") else one[name] / 4)


def test_kernels_of_a_mixture() -> None:
    """8 of 128 experts of width 768 per token of width 2048; the busiest rank has 1.3 times the mean visits."""
    one = forward_bytes(MIXTURE, ONE, 2)
    assert one["activation"] == 8 * 2 * 3 * 768
    assert one["permutations"] == 2 * (2 * (1 + 8) * 2048 + 2 * 2 * 8 * 2048)
    assert one["router"] == 6 * 128 * 4
    spread = ParallelConfig(tensor=4, sequence=True, data=2, expert=8)
    four = forward_bytes(MIXTURE, spread, 2)
    assert four["activation"] == pytest.approx(1.3 * one["activation"] / 4)
    assert four["permutations"] == pytest.approx(2 * (2 * 9 + 1.3 * 4 * 8) * 2048 / 4)
    single = forward_bytes(MIXTURE, replace(spread, tensor=8, data=16, expert=128), 2)
    assert single["permutations"] == 2 * 2 * 9 * 2048 / 8, "a rank with one expert does not sort"
    # Experts that tensor-parallel ranks divide: each has all tokens of the group, and a part of the width.
    divided = forward_bytes(MIXTURE, ParallelConfig(tensor=4, sequence=True), 2)
    assert divided["activation"] == one["activation"] / 4
    assert divided["permutations"] == 2 * (2 * 9 / 4 + 4 * 8) * 2048


@pytest.mark.parametrize(
    ("modules", "kinds"),
    [(("mlp",), {"activation": 1, "norms": 0.5}), (("core_attn",), {"padding": 1}), (("moe_act", "layernorm"), {})],
)
def test_recomputed_modules_of_a_dense_layer(modules: tuple[str, ...], kinds: dict[str, float]) -> None:
    layout = ParallelConfig(recompute="selective", recompute_modules=modules)  # type: ignore[arg-type]
    forward = forward_bytes(DENSE, ONE, 2)
    assert repeated_bytes(DENSE, layout, 2) == sum(share * forward[name] for name, share in kinds.items())


def test_recomputed_modules_of_a_mixture_and_recomputed_layers() -> None:
    forward = forward_bytes(MIXTURE, ONE, 2)
    cheap = ParallelConfig(recompute="selective", recompute_modules=("layernorm", "moe_act"))
    assert repeated_bytes(MIXTURE, cheap, 2) == forward["norms"] / 2 + forward["activation"]
    some = ParallelConfig(recompute="full", recompute_layers=12)
    assert repeated_bytes(MIXTURE, some, 2) == pytest.approx(12 / 48 * sum(forward.values()))
    assert repeated_bytes(MIXTURE, ONE, 2) == 0


def test_kernels_of_the_head() -> None:
    """151,936 logits of two bytes: read in the forward pass; read and overwritten in the backward pass."""
    assert head_bytes(DENSE, ONE, 2, 2, backward=False) == 2 * 151_936
    assert head_bytes(DENSE, ONE, 2, 2, backward=True) == 3 * 2 * 151_936
    four = ParallelConfig(tensor=4)
    assert head_bytes(DENSE, four, 4, 2, backward=True) == (3 * 4 + 4 + 2) * 151_936 / 4, "float32 logits are converted"


def test_dense_gradients_of_head_and_embedding() -> None:
    """float32: zeros 4, read 4, converted 2; then both gradients: read 2, sum read 4 and written 4; zeros 2."""
    numbers = 151_936 * 4096
    assert vocabulary_gradient_bytes(DENSE, ONE, 2, embedding=False) == (10 + 10) * numbers
    assert vocabulary_gradient_bytes(DENSE, ONE, 2, embedding=True) == (10 + 10 + 2 + 10) * numbers
    assert vocabulary_gradient_bytes(DENSE, ParallelConfig(tensor=2), 4, embedding=False) == (4 + 12) * numbers / 2
