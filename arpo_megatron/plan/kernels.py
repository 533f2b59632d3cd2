"""Bytes that memory-bound kernels read and write in a pass: norms, rotary embeddings, copies, residuals, activations.

Transformer Engine's layers around FlexAttention are counted (te_layers.py): each kernel reads its inputs and writes its
outputs once, in the type of the activations. Tensors of one number per token or head are left out. Reads and writes of
products and of attention are a part of their share of the peak, FP8 casts a part of `FP8_SHARE`.
"""

from arpo_megatron.config import ParallelConfig
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.plan.activations import EXPERT_IMBALANCE, FLOAT, Widths

Bytes = dict[str, float]
"""Bytes per token of a pack by kind of kernel, for one layer on one rank."""


def forward_bytes(spec: ModelSpec, parallel: ParallelConfig, value: int) -> Bytes:
    """Return the bytes of a forward pass with `value` bytes per number."""
    w = Widths.of(spec, parallel, value)
    heads = w.queries + w.keys
    norm_of_heads = (2 * heads + 2 * w.keys) * value if spec.qk_norm else 0.0  # it copies keys to contiguous ones
    return {
        "norms": 2 * 2 * w.between * value,
        "residuals": 2 * 3 * w.between * value,
        # Queries are copied out of the product's output; queries and keys are normalised, then rotated.
        "queries_and_keys": (2 * w.queries + 2 * heads) * value + norm_of_heads,
        "padding": 2 * (w.queries + 2 * w.keys) * value,  # FlexAttention's inputs are padded copies
        "activation": 3 * w.ffn * value * _visits_here(spec, parallel, w),
        **_moved(spec, parallel, w, backward=False),
    }


def backward_bytes(spec: ModelSpec, parallel: ParallelConfig, value: int) -> Bytes:
    """Return the bytes of a backward pass, without what it computes again."""
    w = Widths.of(spec, parallel, value)
    heads, mixed = w.queries + w.keys, w.queries + 2 * w.keys
    norm_of_heads = 3 * heads * value if spec.qk_norm else 0.0
    return {
        "norms": 2 * 3 * w.between * value,
        "residuals": 2 * 3 * w.between * value,  # each sums the gradients of the residual and of the norm
        "queries_and_keys": (2 * mixed + 2 * heads) * value + norm_of_heads,  # joined for the product; rotated
        "padding": (2 * mixed + 2 * w.queries) * value,  # and the sums of output times gradient
        "activation": 5 * w.ffn * value * _visits_here(spec, parallel, w),
        **_moved(spec, parallel, w, backward=True),
    }


def repeated_bytes(spec: ModelSpec, parallel: ParallelConfig, value: int) -> float:
    """Return the bytes of the parts of the forward pass that the backward pass computes again."""
    forward = forward_bytes(spec, parallel, value)
    again = parallel.recomputed_share(spec.layers) * sum(forward.values())
    if parallel.recomputes("core_attn"):
        again += forward["padding"]
    if spec.experts is None:
        # In dense layers the norm before the MLP is a part of it.
        return again + (forward["norms"] / 2 + forward["activation"] if parallel.recomputes("mlp") else 0.0)
    again += forward["norms"] / 2 if parallel.recomputes("layernorm") else 0.0
    return again + (forward["activation"] if parallel.recomputes("moe_act") else 0.0)


def head_bytes(spec: ModelSpec, parallel: ParallelConfig, logit: int, value: int, *, backward: bool) -> float:
    """Return the bytes per predicted token of the head's softmax kernels on one rank (head_kernel.py).

    They read the logits once; in the backward pass they read them and write the gradient over them.

    Args:
        spec: the model.
        parallel: layout.
        logit: bytes per logit.
        value: bytes per parameter; gradients of wider logits are converted.
        backward: count both passes, not the forward pass alone.
    """
    rows = spec.vocabulary / parallel.tensor
    converted = logit + value if logit > value else 0
    return rows * (3 * logit + converted if backward else logit)


def vocabulary_gradient_bytes(spec: ModelSpec, parallel: ParallelConfig, value: int, *, embedding: bool) -> float:
    """Return the bytes per pack of the dense gradients of the head and, if the stage has it, of the embedding.

    The head's is zeroed in float32, then converted; the embedding's is zeroed. Both are then added to the float32
    gradient buffer.
    """
    numbers = spec.vocabulary * spec.hidden / parallel.tensor
    added = value + 2 * FLOAT
    head = FLOAT + (FLOAT + value if value < FLOAT else 0) + added
    return numbers * (head + (value + added if embedding else 0))


def _visits_here(spec: ModelSpec, parallel: ParallelConfig, w: Widths) -> float:
    """Return the visits of experts on the busiest rank, per token of the pack; 1 for a dense layer.

    Without expert parallelism each rank has a part of every expert, and all tokens of its tensor-parallel group.
    """
    if spec.experts is None:
        return 1.0
    busiest = EXPERT_IMBALANCE if parallel.expert > 1 else 1.0
    return spec.experts.top_k * busiest * parallel.expert_tensor * w.between / w.hidden


def _moved(spec: ModelSpec, parallel: ParallelConfig, w: Widths, *, backward: bool) -> Bytes:
    """Return the bytes of a mixture's router and of the kernels that move tokens to experts and back; none if dense.

    Tokens are copied in the order of the ranks, on arrival in the order of experts, back, and then summed. The backward
    pass does the same the other way round.
    """
    if spec.experts is None:
        return {}
    share, visits = w.between / w.hidden, _visits_here(spec, parallel, w)
    own = 2 * share * (1 + spec.experts.top_k) * w.hidden * w.value
    sorted_twice = 2 * 2 * visits * w.hidden * w.value if spec.experts.count > parallel.expert else 0.0
    router = share * (4 if backward else 6) * spec.experts.count * FLOAT  # logits, probabilities, map; two gradients
    return {"permutations": own + sorted_twice, "router": router}
