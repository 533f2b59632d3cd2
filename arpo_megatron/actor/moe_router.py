"""The router of a mixture of experts, balanced over trajectories instead of tree tokens.

In the load of experts and in the balancing loss (global-batch balance, arXiv 2501.11873, as Qwen3 was trained), a token
that m trajectories share counts m times and padding counts 0 times. For a layer with E experts, tokens t of all packs
of a batch, multiplicities m_t with sum M, and router softmax p_te,

    loss = coefficient * sum_t m_t / M * E * sum_e load_e * p_te

where the constant load_e is the share of all choices that fell on expert e in the last whole pass over packs. (Choices
have no gradient in any such loss.) The loss is a sum over tokens, so it and its gradient do not depend on packing,
micro-batches or layout, and a tree's loss equals that of its flattened trajectories exactly. Taking load_e from the
current packs would make the loss depend on the packing, because it would be a product of two sums.

In reinforcement learning, the log-prob pass over the step's packs comes first, so the first update uses the load of the
current weights. Before any pass the load is level. A level load has no gradient, because sum_e p_te is 1.

Router replay (arXiv 2510.11370): a token whose pack has routes goes to those experts, which the engine chose. Its
weights come from this router's softmax, through which the gradient flows; load and loss count the engine's choice.
Megatron's `RouterReplay` hands out routes first in, first out, but the packs of a cut tree return in nested order. Here
the routes are part of the pack's context, which its handle finds in any order and in recomputation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from arpo_megatron.actor.context import PackContext
from arpo_megatron.actor.linear import linear


@dataclass(frozen=True, slots=True)
class ExpertBalance:
    """Balance of the experts in one pass, over the tokens of trajectories."""

    busiest: float
    """Load of the busiest expert of any layer over the mean load; 1 is level, the number of experts is the maximum."""
    loss: float
    """Mean over layers of E * sum_e load_e * mean_t p_te, without the coefficient; 1 is level."""
    replayed: float
    """Share of tokens that went to the engine's experts."""
    differing: float
    """Share of the replayed choices that this router would not have made; 0 if nothing is replayed."""

    def statistics(self) -> dict[str, float]:
        """Return the fields by their names in `UpdateStats`."""
        return {
            "expert_busiest": self.busiest,
            "expert_loss": self.loss,
            "routes_replayed": self.replayed,
            "routes_differing": self.differing,
        }


class TreeTopKRouter(TopKRouter):  # type: ignore[misc]  # Megatron has no types
    """Megatron's router with the choice of transformers' Qwen3-MoE and the loss above. No token is ever dropped."""

    load: Tensor
    """float64[experts], share of all choices per expert in the last finished pass; a buffer, saved in checkpoints."""
    logical_tokens: float | None
    """Sum of the multiplicities of all packs of this pass on all ranks; `begin_pass` sets it."""
    choices: Tensor
    """float64[experts], choices of this pass on this rank so far."""
    scores: Tensor
    """float64[experts], sums of the softmax of this pass on this rank so far."""
    replay: Tensor
    """float64[2], tokens with given routes so far, and the sum over them of the share of choices that differ."""

    def __init__(self, config: Any, pg_collection: Any = None, **newer: Any) -> None:
        super().__init__(config=config, pg_collection=pg_collection, **newer)  # 0.19 gives more arguments
        count = config.num_moe_experts
        device = torch.cuda.current_device()
        self.register_buffer("load", torch.full((count,), 1 / count, dtype=torch.float64, device=device))
        self.logical_tokens = None
        self.choices = torch.zeros(count, dtype=torch.float64, device=device)
        self.scores = torch.zeros_like(self.choices)
        self.replay = torch.zeros(2, dtype=torch.float64, device=device)

    def gating(self, hidden: Tensor) -> Tensor:
        """Return logits [n, 1, experts] of hidden states [n, 1, hidden], in the dtype of the model as in transformers
        and SGLang.

        Megatron's own method needs a function of Transformer Engine.
        """
        return linear(hidden, self.weight)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose the experts of every token, and their weights.

        Args:
            logits: [n, 1, experts] of this rank's tokens.
            padding_mask: unused; padding has multiplicity 0.

        Returns:
            Weights [n, experts], zero for experts that are not chosen, in float32 (float64 for float64 logits); and the
            choice, bool[n, experts].
        """
        logits = logits.flatten(0, -2)
        # float32 as in transformers and SGLang. Megatron's own softmax would round float64 to it.
        scores = logits.softmax(-1, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)
        multiplicity = self._multiplicity(len(scores))
        given = self._given(len(scores))
        # Given experts are sorted by score too, so equal choices are summed in equal order, bit for bit.
        allowed = scores if given is None else scores.masked_fill(~_choosable(scores, given), -1.0)
        weights, experts = allowed.topk(self.topk, dim=-1)
        if given is not None and multiplicity is not None:
            self._count_replay(scores, given, multiplicity)
        if not self.config.moe_router_pre_softmax:
            weights = weights / weights.sum(-1, keepdim=True)
        routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter(1, experts, True)
        probabilities = torch.zeros_like(scores).scatter(1, experts, weights)
        if multiplicity is not None:
            # Recomputation counts every token twice, which does not change the shares.
            self.choices += multiplicity @ routing_map.double()
            self.scores += multiplicity @ scores.detach().double()
        if self.config.moe_aux_loss_coeff and self.training and torch.is_grad_enabled():
            loss = self._balance_loss(scores, multiplicity)
            probabilities = MoEAuxLossAutoScaler.apply(probabilities, loss)
        return probabilities, routing_map

    def _multiplicity(self, tokens: int) -> Tensor | None:
        """Return the multiplicity of this rank's tokens, float64[tokens]."""
        context = PackContext.current  # set by the attention of the same layer
        return None if context is None else self._mine(context.multiplicity, tokens).double()

    def _given(self, tokens: int) -> Tensor | None:
        """Return the given experts of this rank and layer, int64[tokens, k], -1 without routes; None if the pack has
        none.

        Raises:
            ValueError: the routes are of a model with another number of layers or another k.
        """
        context = PackContext.current
        if context is None or context.routes is None:
            return None
        if context.routes.shape[1:] != (self.config.num_layers, self.topk):
            raise ValueError(
                f"routes of {context.routes.shape[1]} layers and {context.routes.shape[2]} experts a token for a model "
                f"of {self.config.num_layers} and {self.topk}"
            )
        return self._mine(context.routes, tokens)[:, self.layer_number - 1].long()

    def _mine(self, whole: Tensor, tokens: int) -> Tensor:
        """Return the rows of this rank's tokens; under sequence parallelism a slice of the pack's."""
        first = 0 if len(whole) == tokens else self.tp_group.rank() * tokens
        return whole[first : first + tokens]

    def _count_replay(self, scores: Tensor, given: Tensor, multiplicity: Tensor) -> None:
        own = torch.zeros_like(scores).scatter(1, scores.topk(self.topk, dim=-1).indices, 1.0)
        replayed = multiplicity * (given[:, 0] >= 0)
        equal = own.gather(1, given.clamp(min=0)).double().mean(-1)
        self.replay += torch.stack([replayed.sum(), replayed @ (1.0 - equal)])

    def _balance_loss(self, scores: Tensor, multiplicity: Tensor | None) -> Tensor:
        if multiplicity is None or self.logical_tokens is None:
            raise RuntimeError("the router's loss needs begin_pass and the multiplicities of the pack")
        share = multiplicity / max(self.logical_tokens, 1.0)
        scale = self.config.moe_aux_loss_coeff * self.config.num_moe_experts
        return (scores * torch.outer(share, scale * self.load).to(scores.dtype)).sum()


def begin_pass(chunks: Sequence[nn.Module], logical_tokens: float) -> None:
    """Reset the counts before the packs of a batch run.

    Args:
        chunks: this rank's model.
        logical_tokens: sum of the multiplicities over the packs of all ranks.
    """
    for router in _routers(chunks):
        router.logical_tokens = logical_tokens
        router.choices.zero_()
        router.scores.zero_()
        router.replay.zero_()


def finish_pass(chunks: Sequence[nn.Module], *, keep_load: bool) -> ExpertBalance | None:
    """Sum the counts after all packs of a pass have run; a collective of all ranks of a model with experts.

    Args:
        chunks: this rank's model.
        keep_load: balance the next training pass by the load of this one. False for passes with other weights or data
            than those that are trained.

    Returns:
        The balance of the pass; None without experts or without counted tokens.
    """
    routers = list(_routers(chunks))
    if not routers:
        return None
    sums = torch.stack([torch.stack([router.choices, router.scores]) for router in routers])
    dist.all_reduce(sums, group=routers[0].tp_dp_cp_group)
    replay = torch.stack([router.replay for router in routers]).sum(0)
    dist.all_reduce(replay, group=routers[0].tp_dp_cp_group)
    totals = sums.sum(-1, keepdim=True)
    if not bool((totals > 0).all()):
        return None
    load, probability = (sums / totals).unbind(1)
    if keep_load:
        for router, shares in zip(routers, load, strict=True):
            router.load.copy_(shares)
    experts = load.shape[1]
    losses = experts * (load * probability).sum(-1)
    tokens = totals[:, 1].sum()  # every token's softmax sums to 1
    mean = torch.stack([losses.sum(), losses.new_tensor(float(len(losses))), tokens, *replay])
    busiest = experts * load.max()
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    dist.all_reduce(mean, group=pipeline)
    dist.all_reduce(busiest, dist.ReduceOp.MAX, group=pipeline)
    loss, layers, passed, replayed, differing = mean.tolist()
    return ExpertBalance(
        busiest=float(busiest),
        loss=loss / layers,
        replayed=replayed / passed,
        differing=differing / max(replayed, 1.0),
    )


def _choosable(scores: Tensor, given: Tensor) -> Tensor:
    """Return the given experts of each token as bool[tokens, experts]; all experts for a token without routes."""
    free = given[:, :1] < 0
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, given.clamp(min=0), True) | free


def _routers(chunks: Sequence[nn.Module]) -> Iterator[TreeTopKRouter]:
    return (module for chunk in chunks for module in chunk.modules() if isinstance(module, TreeTopKRouter))
