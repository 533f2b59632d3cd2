"""Log-probs and entropies of target tokens from hidden states, without holding all logits [targets, vocabulary].

One autograd function does the head's matrix product, the softmax over the vocabulary shards and the choice of the
target. It works in chunks of targets and recomputes each chunk's logits in the backward pass.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from arpo_megatron.actor.linear import weight_gradient
from arpo_megatron.hardware.onednn import product

CHUNK_ELEMENTS = 1 << 26
"""Largest number of logits in one chunk on one rank (256 MiB in float32)."""


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
        first = 0 if group is None else dist.get_rank(group) * len(weight)
        dtype = sum_dtype(weight.dtype)
        logprobs, entropies, normalisers = torch.empty(3, len(hidden), dtype=dtype, device=hidden.device)
        for rows in _chunks(len(hidden), len(weight)):
            logits = _logits(hidden[rows], weight, temperature, fp32_logits)
            top = logits.amax(-1)
            if ranks > 1:
                dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
            logits -= top[:, None]
            local, mine = _local(targets[rows], first, len(weight))
            chosen = logits.gather(1, local[:, None])[:, 0] * mine
            exponentials = logits.exp()
            sums = torch.stack([exponentials.sum(-1), (exponentials * logits).sum(-1), chosen])
            if ranks > 1:
                dist.all_reduce(sums, group=group)
            log_sum = sums[0].log()
            logprobs[rows] = sums[2] - log_sum
            entropies[rows] = log_sum - sums[1] / sums[0]
            normalisers[rows] = top + log_sum
        ctx.save_for_backward(hidden, weight, targets, normalisers, entropies)
        ctx.temperature, ctx.first, ctx.fp32_logits = temperature, first, fp32_logits
        ctx.set_materialize_grads(False)  # unused entropies then cost no gradient
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalisers, entropies = ctx.saved_tensors
        by_logprob, by_entropy = gradients
        scaled = (torch.zeros_like(normalisers) if by_logprob is None else by_logprob) / ctx.temperature
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=normalisers.dtype)
        for rows in _chunks(len(hidden), len(weight)):
            log_p = _logits(hidden[rows], weight, ctx.temperature, ctx.fp32_logits).sub_(normalisers[rows, None])
            # dH/dlogit = -p (log p + H)
            of_entropy = None if by_entropy is None else log_p.exp() * (log_p + entropies[rows, None])
            grad = log_p.exp_().neg_()
            local, mine = _local(targets[rows], ctx.first, len(weight))
            grad.scatter_add_(1, local[:, None], mine[:, None].to(grad.dtype))
            grad = grad.mul_(scaled[rows, None])
            if of_entropy is not None and by_entropy is not None:
                grad -= of_entropy.mul_(by_entropy[rows, None] / ctx.temperature)
            grad = grad.to(weight.dtype)
            grad_hidden[rows] = product(grad, weight.t())
            grad_weight += weight_gradient(grad, hidden[rows])
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums over values of `dtype`: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _logits(hidden: Tensor, weight: Tensor, temperature: float, fp32: bool) -> Tensor:
    if not fp32 or weight.dtype != torch.bfloat16:
        logits = product(hidden, weight).to(sum_dtype(weight.dtype))
    elif weight.is_cuda:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        logits = product(hidden.float(), weight.float())
    return logits if temperature == 1.0 else logits.div_(temperature)


def _local(targets: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return each target's row on this rank (0 for targets of other ranks), and whether this rank has it."""
    local = targets - first
    mine = (local >= 0) & (local < rows)
    return local * mine, mine


def _chunks(rows: int, width: int) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS // max(1, width))
    return [slice(low, min(low + size, rows)) for low in range(0, rows, size)]
