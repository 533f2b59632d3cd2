"""Log-probs and entropies of target tokens from hidden states, without holding all logits [targets, vocabulary].

One autograd function does the head's matrix product, the softmax over the vocabulary shards and the choice of the
target. It works in chunks of targets and recomputes each chunk's logits in the backward pass. On CUDA two Triton
kernels compute the softmax and its gradient (head_kernel.py). Vocabulary-parallel ranks exchange their sums once for
all chunks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from arpo_megatron.actor.linear import WeightGradient
from arpo_megatron.hardware.onednn import product

CUDA_CHUNK_ELEMENTS = 1 << 28
"""Largest number of logits in one chunk on one rank: 512 MiB in bfloat16. Each chunk reads and writes the whole
gradient of the head's weight."""
CHUNK_ELEMENTS = CUDA_CHUNK_ELEMENTS if torch.cuda.is_available() else 1 << 26
"""The same on this machine; on a CPU 256 MiB in float32."""


def target_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    group: Any = None,
    fp32_logits: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return log softmax(hidden @ weight.T / temperature) at the targets, and the entropy of the softmax.

    Args:
        hidden: [m, width], whole on every rank of `group`. Its gradient is this rank's share; the caller sums the
            shares.
        weight: [vocabulary / ranks, width], this rank's rows of the head.
        targets: int64[m], ids in the whole vocabulary.
        temperature: divides the logits, as in sampling.
        group: tensor-parallel process group; None for one rank.
        fp32_logits: do not round the logits of bfloat16 weights to bfloat16.

    Returns:
        Log-probs [m] and entropies [m] in nats, both differentiable; float32, or float64 for float64 weights.
    """
    result: tuple[Tensor, Tensor] = _TargetLogprobs.apply(  # type: ignore[no-untyped-call]  # untyped in torch
        hidden, weight, targets, temperature, group, fp32_logits
    )
    return result


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        group: Any,
        fp32_logits: bool,
    ) -> tuple[Tensor, Tensor]:
        ranks = 1 if group is None else dist.get_world_size(group)
        local = targets - (0 if group is None else dist.get_rank(group) * len(weight))
        found = torch.empty(4, len(hidden), dtype=sum_dtype(weight.dtype), device=hidden.device)
        for rows in _chunks(len(hidden), len(weight)):
            found[:, rows] = _statistics(_logits(hidden[rows], weight, fp32_logits), local[rows], temperature)
        top, sums = found[0], found[1:]
        if ranks > 1:  # once for all chunks
            highest = top.clone()
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
            moved = top - highest
            sums[1] += moved * sums[0]
            sums[:2] *= moved.exp()
            dist.all_reduce(sums, group=group)
            top = highest
        log_sum = sums[0].log()
        normalisers = top + log_sum
        logprobs, entropies = sums[2] - normalisers, log_sum - sums[1] / sums[0]
        ctx.save_for_backward(hidden, weight, local, normalisers, entropies)
        ctx.temperature, ctx.fp32_logits = temperature, fp32_logits
        ctx.set_materialize_grads(False)  # unused entropies then cost no gradient
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, local, normalisers, entropies = ctx.saved_tensors
        by_logprob, by_entropy = gradients
        by_logprob = torch.zeros_like(normalisers) if by_logprob is None else by_logprob
        grad_hidden = torch.empty_like(hidden)
        grad_weight = WeightGradient(weight, normalisers.dtype)
        for rows in _chunks(len(hidden), len(weight)):
            grad = _gradient(
                _logits(hidden[rows], weight, ctx.fp32_logits),
                local[rows],
                normalisers[rows],
                entropies[rows],
                by_logprob[rows],
                None if by_entropy is None else by_entropy[rows],
                ctx.temperature,
            ).to(weight.dtype)
            grad_hidden[rows] = product(grad, weight.t())
            grad_weight.add(grad, hidden[rows])
        return grad_hidden, grad_weight.total.to(weight.dtype), None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, fp32: bool) -> Tensor:
    if not fp32 or weight.dtype != torch.bfloat16:
        return product(hidden, weight)
    if weight.is_cuda:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return product(hidden.float(), weight.float())


def _statistics(logits: Tensor, local: Tensor, temperature: float) -> Tensor:
    """Return the rows' maxima, sums and target values as `head_kernel.softmax_statistics` does."""
    if logits.is_cuda:
        from arpo_megatron.actor.head_kernel import softmax_statistics

        return softmax_statistics(logits, local, temperature)
    x = _scaled(logits, temperature)
    mine = (local >= 0) & (local < x.shape[1])
    chosen = x.gather(1, (local * mine)[:, None])[:, 0] * mine
    top = x.amax(-1)
    x -= top[:, None]
    exponentials = x.exp()
    return torch.stack([top, exponentials.sum(-1), (exponentials * x).sum(-1), chosen])


def _gradient(
    logits: Tensor,
    local: Tensor,
    normalisers: Tensor,
    entropies: Tensor,
    by_logprob: Tensor,
    by_entropy: Tensor | None,
    temperature: float,
) -> Tensor:
    """Return the gradient of a chunk's logits, in their dtype; they are overwritten."""
    if logits.is_cuda:
        from arpo_megatron.actor.head_kernel import write_gradient

        none = torch.zeros_like(by_logprob) if by_entropy is None else by_entropy.contiguous()
        write_gradient(logits, local, normalisers, entropies, by_logprob.contiguous(), none, temperature)
        return logits
    log_p = _scaled(logits, temperature).sub_(normalisers[:, None])
    # dH/dlogit = -p (log p + H)
    of_entropy = None if by_entropy is None else log_p.exp() * (log_p + entropies[:, None])
    grad = log_p.exp_().neg_()
    mine = (local >= 0) & (local < grad.shape[1])
    grad.scatter_add_(1, (local * mine)[:, None], mine[:, None].to(grad.dtype))
    grad = grad.mul_(by_logprob[:, None] / temperature)
    if of_entropy is not None and by_entropy is not None:
        grad -= of_entropy.mul_(by_entropy[:, None] / temperature)
    return grad.to(logits.dtype)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums over values of `dtype`: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    wide = logits.to(sum_dtype(logits.dtype))
    return wide if temperature == 1.0 else wide.div_(temperature)


def _chunks(rows: int, width: int) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS // max(1, width))
    return [slice(low, min(low + size, rows)) for low in range(0, rows, size)]
