"""The policy in training: log-probs of packs, optimizer updates, its own checkpoint. One object on every trainer rank.

All ranks call the same methods with the same packs (the controller broadcasts them); each data-parallel rank computes
its share, and results that leave a method are equal on all ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from torch import Tensor

from arpo_megatron.actor.losses import linear_loss, policy_loss
from arpo_megatron.actor.microbatch import ContextShard, MicroBatch, MicroBatches
from arpo_megatron.actor.model import DTYPES, TreeGPTModel, build_chunks
from arpo_megatron.actor.moe_router import ExpertBalance, begin_pass, finish_pass
from arpo_megatron.actor.optimizer import build_optimizer, build_scheduler, clipped_step, gradient_buffers
from arpo_megatron.actor.parallel import device, gather_objects
from arpo_megatron.actor.reference import ReferencePolicy
from arpo_megatron.actor.schedule import Finish, run_nested, run_pipeline
from arpo_megatron.actor.te_layers import Fp8
from arpo_megatron.actor.training_state import Snapshot, load_training_state, snapshot
from arpo_megatron.actor.update_stats import WIDTH, UpdateStats
from arpo_megatron.algorithms.base import TokenLoss, TrainingProgress
from arpo_megatron.algorithms.components import make_policy_loss
from arpo_megatron.algorithms.credit import Loss
from arpo_megatron.config import JobConfig, OptimizerConfig
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.packing.balance import CostModel
from arpo_megatron.packing.layout import drop_routes, new_pack
from arpo_megatron.packing.packs import TreePack, last_uses
from arpo_megatron.tree import Float32Array
from arpo_megatron.weights.load import load_hf


@dataclass(frozen=True, slots=True)
class Scores:
    """What a policy makes of packs: float32[m] a pack, in nats, of its targets."""

    logprobs: list[Float32Array]
    entropies: list[Float32Array]


class Actor:
    """The model, its optimizer and its schedule on this rank.

    Args:
        config: `model.dtype`, `parallel`, `algorithm` (clipping) and `rollout.temperature` are used.
        spec: of the model at `model_path`.
        model_path: Hugging Face directory of the first weights; None: random ones, the same in layouts
            without pipeline and expert parallelism.
        optimizer: learning rate and schedule (supervised and policy training have different ones); None: there are
            gradients (`accumulate`) and no updates.
        total_updates: length of the schedule.
        keep_reference: the first weights stay in host memory, as the reference policy of a KL penalty.

    `arpo_megatron.actor.parallel.initialize` comes first.

    Attributes:
        nonfinite_packs: after a skipped update, indices of its packs whose loss was not finite on some rank; empty if
            only the gradient was not.
        course: where the run stands, for losses that depend on it.
    """

    def __init__(
        self,
        config: JobConfig,
        spec: ModelSpec,
        model_path: Path | None,
        *,
        optimizer: OptimizerConfig | None,
        total_updates: int,
        keep_reference: bool = False,
    ) -> None:
        self.config = config
        self.spec = spec
        self._loss = make_policy_loss(config.algorithm)
        balance = config.model.router_aux_loss
        if balance == "model":
            balance = 0.0 if spec.experts is None else spec.experts.balance_coefficient
        self.chunks = build_chunks(
            spec,
            config.parallel,
            config.model.dtype,
            initialize=model_path is None,
            balance_coefficient=balance,
            fp8=Fp8.of(config.model),
        )
        self.expert_balance: ExpertBalance | None = None  # of the last pass over packs; None without experts
        if model_path is not None:
            load_hf(self.chunks, spec, model_path)
        self._reference = ReferencePolicy(self.chunks) if keep_reference else None
        dtype = DTYPES[config.model.dtype]
        ddp = gradient_buffers(dtype, distributed=config.parallel.distributed_optimizer)
        self._wrapped = [DistributedDataParallel(chunk.config, ddp, chunk) for chunk in self.chunks]
        for chunk in self.chunks:
            chunk.config.finalize_model_grads_func = _sum_gradients
            chunk.config.no_sync_func = None if len(self.chunks) == 1 else [w.no_sync for w in self._wrapped]
        self.nonfinite_packs: list[int] = []
        self.progress = TrainingProgress()
        self._optimizer_config = optimizer
        self.optimizer: Any = None
        self.scheduler: Any = None
        if optimizer is not None:
            self.optimizer = build_optimizer(
                optimizer, self._wrapped, dtype, distributed=config.parallel.distributed_optimizer
            )
            self.scheduler = build_scheduler(optimizer, self.optimizer, total_updates)

    @property
    def model(self) -> TreeGPTModel:
        """The only chunk of a rank without a virtual pipeline."""
        return self.chunks[0]

    @property
    def updates_done(self) -> int:
        """Updates since the schedule's beginning, skipped ones included."""
        return int(self.scheduler.num_steps)

    def logprobs(
        self, packs: Sequence[TreePack], *, temperature: float | None = None, training: bool = True
    ) -> list[Float32Array]:
        """`scores` without the entropies: float32[m] a pack, on every rank."""
        return self.scores(packs, temperature=temperature, training=training).logprobs

    @torch.no_grad()
    def scores(self, packs: Sequence[TreePack], *, temperature: float | None = None, training: bool = True) -> Scores:
        """Log-probs of the packs' targets under the present weights, and the entropies of their distributions.

        The kernels and shapes are those of `update`, so that the ratio of a first on-policy update is exactly 1.

        Args:
            packs: on every rank the same ones.
            temperature: None: the job's sampling temperature.
            training: these packs are about to be trained; False for a reference policy, a probe, held-out data.

        Returns:
            the same on every rank.
        """
        if not packs:
            return Scores([], [])
        ends = np.cumsum([len(pack.predictors) for pack in packs])
        whole = torch.zeros(2, int(ends[-1]), device=device())
        mine = self._indices(packs)
        outputs = self._run(
            packs,
            None,
            _keep,
            temperature=self.config.rollout.temperature if temperature is None else temperature,
            forward_only=True,
            keep_load=training,
        )
        for index, (targets, values) in zip(mine, outputs, strict=False):  # padding micro-batches come last
            if index < len(packs):
                whole[:, targets + int(ends[index]) - len(packs[index].predictors)] = values
        logprobs, entropies = self._sum(whole).cpu().numpy()
        return Scores(np.split(logprobs, ends[:-1]), np.split(entropies, ends[:-1]))

    def reference_logprobs(self, minibatches: Sequence[Sequence[TreePack]]) -> list[list[Float32Array]] | None:
        """`logprobs` of each minibatch's packs under the reference policy; None where none is kept.

        Weights move between host and device once a call, so it is made once a step, before the step's first update.
        """
        if self._reference is None:
            if self.config.algorithm.kl_coefficient:
                raise RuntimeError(
                    "algorithm.kl_coefficient without a reference policy: the actor was told to keep none"
                )
            return None
        with self._reference.swapped_in():
            free = [[drop_routes(pack) for pack in packs] for packs in minibatches]  # its own routers choose
            return [self.logprobs(packs, training=False) for packs in free]

    def update(
        self,
        packs: Sequence[TreePack],
        old_logprobs: Sequence[Float32Array] | None,
        loss: Loss = "policy",
        *,
        reference_logprobs: Sequence[Float32Array] | None = None,
    ) -> UpdateStats:
        """One optimizer step on a minibatch, each pack a micro-batch.

        Args:
            packs: the whole minibatch; their credits are normalised over it.
            old_logprobs: from `logprobs` before the step's first update; None: the present policy is the old one.
            loss: what the credits mean.
            reference_logprobs: from the method of that name.

        Raises:
            ValueError: no packs, old log-probs that do not fit them, or no optimizer.
        """
        if self._optimizer_config is None:
            raise ValueError("an actor without an optimizer makes no updates")
        self.scheduler.step(1)
        outputs = self.accumulate(packs, old_logprobs, loss, reference_logprobs=reference_logprobs)
        nonfinite = [index for index, value in self.losses(packs, outputs).items() if not np.isfinite(value)]
        grad_norm, stepped = clipped_step(self.optimizer, self._optimizer_config.clip_grad, sound=not nonfinite)
        self.nonfinite_packs = (
            [] if stepped else sorted({index for part in gather_objects(nonfinite) for index in part})
        )
        return self._stats(outputs, grad_norm, skipped=not stepped)

    def accumulate(
        self,
        packs: Sequence[TreePack],
        old_logprobs: Sequence[Float32Array] | None,
        loss: Loss = "policy",
        *,
        reference_logprobs: Sequence[Float32Array] | None = None,
    ) -> list[Tensor]:
        """The first half of `update`: afterwards every parameter's `main_grad` is the gradient of the whole minibatch.

        Returns:
            a row of statistics for each of this rank's packs, none before the last stage of a pipeline.
        """
        if not packs:
            raise ValueError("an update needs at least one pack")
        if old_logprobs is not None and [len(o) for o in old_logprobs] != [len(p.predictors) for p in packs]:
            raise ValueError("old log-probs do not fit the packs")
        for chunk in self._wrapped:
            chunk.zero_grad_buffer()
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        return self._run(
            packs,
            old_logprobs,
            {"policy": self._policy, "linear": self._linear, "nll": _nll}[loss],
            reference_logprobs=reference_logprobs,
            temperature=1.0 if loss == "nll" else self.config.rollout.temperature,
            forward_only=False,
        )

    def losses(self, packs: Sequence[TreePack], outputs: Sequence[Tensor]) -> dict[int, float]:
        """The loss of each of this rank's packs by its index, from what `accumulate` returned.

        With context parallelism a collective of the ranks that share a pack, each of which computes a part.
        """
        rows = torch.stack(list(outputs))[:, 0] if outputs else None
        if rows is not None and self.config.parallel.context > 1:
            dist.all_reduce(rows, group=parallel_state.get_context_parallel_group())
        values = [] if rows is None else rows.tolist()
        return {index: value for index, value in zip(self._indices(packs), values, strict=False) if index < len(packs)}

    def snapshot(self, directory: Path) -> Snapshot:
        """Weights, optimizer, schedule and generators for an existing empty directory, copied to host memory.

        A call of all ranks; what it returns is written without them.
        """
        return snapshot(directory, self.chunks, self.optimizer, self.scheduler)

    def load(self, directory: Path) -> None:
        """Continue from what a `snapshot` wrote, in any layout; in the same one bit for bit.

        Configured rates win over saved ones.
        """
        load_training_state(directory, self.chunks, self.optimizer, self.scheduler)

    def _indices(self, packs: Sequence[TreePack]) -> list[int]:
        """This rank's packs in order, and beyond the last index empty ones that keep ranks in step with each other."""
        parallel = self.config.parallel
        own = [i for i, pack in enumerate(packs) if pack.data_rank == parallel_state.get_data_parallel_rank()]
        counts = [sum(pack.data_rank == rank for pack in packs) for rank in range(parallel.data)]
        count = max(1, *counts) if parallel.expert > 1 else max(1, len(own))
        count += -count % parallel.pipeline if parallel.virtual_pipeline > 1 else 0
        return own + list(range(len(packs), len(packs) + count - len(own)))

    def _run(
        self,
        packs: Sequence[TreePack],
        old_logprobs: Sequence[Float32Array] | None,
        finish: Finish,
        *,
        temperature: float,
        forward_only: bool,
        reference_logprobs: Sequence[Float32Array] | None = None,
        keep_load: bool = True,
    ) -> list[Any]:
        """This rank's passes; what `finish` keeps, on the last stage of a pipeline."""
        mine = self._indices(packs)
        extra = sum(index >= len(packs) for index in mine)
        padded = [*packs, *[new_pack()] * extra]  # without tokens and loss
        nothing = [np.zeros(0, np.float32)] * extra
        old = None if old_logprobs is None else [*old_logprobs, *nothing]
        reference = None if reference_logprobs is None else [*reference_logprobs, *nothing]
        begin_pass(self.chunks, float(sum(int(pack.multiplicity.sum()) for pack in packs)))
        with MicroBatches(padded, old, self._shard, reference) as batches:
            outputs = self._passes(padded, mine, batches, finish, temperature=temperature, forward_only=forward_only)
        self.expert_balance = finish_pass(self.chunks, keep_load=keep_load)
        return outputs

    def _passes(
        self,
        padded: Sequence[TreePack],
        mine: Sequence[int],
        batches: MicroBatches,
        finish: Finish,
        *,
        temperature: float,
        forward_only: bool,
    ) -> list[Any]:
        for chunk in self.chunks:
            chunk.set_is_first_microbatch()  # FP8: weights are quantized anew, once a pass
        if self.config.parallel.pipeline > 1:
            return run_pipeline(
                self._wrapped, batches.make, mine, finish, temperature=temperature, forward_only=forward_only
            )
        uses = last_uses(padded)
        return run_nested(
            self._wrapped[0],
            batches,
            [(index, uses[index]) for index in mine],
            finish,
            temperature=temperature,
            forward_only=forward_only,
        )

    @property
    def _shard(self) -> ContextShard:
        parallel = self.config.parallel
        rank, cost = parallel_state.get_context_parallel_rank(), CostModel.of(self.spec)
        return ContextShard(rank, parallel.context, self.config.pack_multiple, cost)

    def _sum(self, values: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
        """Combine over ranks that hold different targets; stages before the last one bring zeros."""
        for group in (
            parallel_state.get_data_parallel_group(with_context_parallel=True),
            parallel_state.get_pipeline_model_parallel_group(),
        ):
            if group.size() > 1:
                dist.all_reduce(values, operation, group=group)
        return values

    def _policy(self, batch: MicroBatch, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        logprobs, entropies = output
        if not isinstance(self._loss, TokenLoss):
            raise ValueError(f"algorithm.loss={self.config.algorithm.loss} is one of whole minibatches: update(linear)")
        loss, stats = policy_loss(
            self._loss,
            logprobs,
            entropies,
            logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs,
            batch.positive,
            batch.negative,
            batch.weight,
            self.config.algorithm,
            batch.reference_logprobs,
            self.progress,
        )
        return loss, stats.row()

    def _linear(self, batch: MicroBatch, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        loss, stats = linear_loss(
            *output,
            batch.positive + batch.negative,
            batch.old_logprobs,
            weight=batch.weight,
            config=self.config.algorithm,
            reference_logprobs=batch.reference_logprobs,
        )
        return loss, stats.row()

    def _stats(self, outputs: list[Tensor], grad_norm: float, *, skipped: bool) -> UpdateStats:
        rows = torch.stack(outputs) if outputs else torch.zeros(1, WIDTH, dtype=torch.float64, device=device())
        balance = self.expert_balance
        return UpdateStats.of(
            self._sum(rows[:, :-1].sum(0)),
            self._sum(rows[:, -1].max(), dist.ReduceOp.MAX),
            grad_norm=grad_norm,
            lr=float(self.optimizer.param_groups[0]["lr"]),
            skipped=skipped,
            expert_busiest=None if balance is None else balance.busiest,
            expert_loss=None if balance is None else balance.loss,
            routes_replayed=None if balance is None else balance.replayed,
            routes_differing=None if balance is None else balance.differing,
        )


def _nll(batch: MicroBatch, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    loss, stats = linear_loss(*output, batch.positive + batch.negative, batch.old_logprobs)
    return loss, stats.row()


def _keep(batch: MicroBatch, output: tuple[Tensor, Tensor]) -> tuple[None, tuple[Tensor, Tensor]]:
    return None, (batch.targets, torch.stack(output))


def _sum_gradients(model: list[Any], num_tokens: Tensor | None, **groups: Any) -> None:
    """Megatron's gradient reduction without its division by tokens: the credits are normalised already."""
    finalize_model_grads(model, None, **groups)
