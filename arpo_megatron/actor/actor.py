"""The policy in training: log-probs of packs, optimizer updates and the state of a checkpoint.

Every trainer rank has one `Actor`. All ranks call the same methods with the same packs, which the controller
broadcasts. Each data-parallel rank computes its share. A public method returns the same value on all ranks unless its
docstring states an exception.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from arpo_megatron.actor.attention import use_attention_backend
from arpo_megatron.actor.losses import linear_loss, policy_loss
from arpo_megatron.actor.microbatch import ContextShard, MicroBatch, MicroBatches
from arpo_megatron.actor.model import DTYPES, TreeGPTModel, build_chunks
from arpo_megatron.actor.moe_router import ExpertBalance, begin_pass, finish_pass
from arpo_megatron.actor.optimizer import (
    build_optimizer,
    build_scheduler,
    clip_and_step,
    gather_weights,
    gradient_buffers,
    reduce_in_order,
    wait_for_head,
)
from arpo_megatron.actor.parallel import device, gather_objects, reduce_over_targets
from arpo_megatron.actor.pass_clock import PassClock
from arpo_megatron.actor.reference import ReferencePolicy
from arpo_megatron.actor.schedule import LossFunction, forward_order, own_groups, run_passes, sum_gradients
from arpo_megatron.actor.te_layers import Fp8, begin_weights, fuse_weight_gradients
from arpo_megatron.actor.training_state import TrainingSnapshot, load_training_state, snapshot
from arpo_megatron.actor.update_stats import WIDTH, UpdateStats
from arpo_megatron.algorithms.base import TokenLoss, TrainingProgress
from arpo_megatron.algorithms.components import make_policy_loss
from arpo_megatron.algorithms.credit import LossForm
from arpo_megatron.config import JobConfig, OptimizerConfig
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.packing.balance import CostModel
from arpo_megatron.packing.layout import drop_routes, new_pack
from arpo_megatron.packing.packs import TreePack
from arpo_megatron.tree import Float32Array
from arpo_megatron.weights.load import load_hf


@dataclass(frozen=True, slots=True)
class PolicyOutputs:
    """A policy's log-probs and entropies for the targets of packs."""

    logprobs: list[Float32Array]
    """float32[m] per pack, in nats."""
    entropies: list[Float32Array]
    """float32[m] per pack, in nats: entropy of the distribution that predicts each target."""
    tempered_logprobs: Sequence[Float32Array] = ()
    """float32[m] per pack at another temperature, if the loss needs them (`Tempered`)."""


class Actor:
    """The model, its optimizer and its schedule on this rank.

    Call `arpo_megatron.actor.parallel.initialize` before creating one.

    Args:
        config: the job; `model`, `parallel`, `algorithm` and `rollout.temperature` are used.
        spec: sizes of the model at `model_path`.
        model_path: Hugging Face directory of the first weights. None makes random weights, which are equal in all
            layouts without pipeline and expert parallelism.
        optimizer: learning rate and schedule; supervised and policy training have different ones. With None the actor
            computes gradients (`accumulate`) but makes no updates.
        total_updates: length of the schedule.
        keep_reference: keep the first weights in host memory as the reference policy of a KL penalty.
    """

    nonfinite_packs: list[int]
    """After a skipped update, the packs whose loss was not finite on some rank; empty if only the gradient was not."""
    progress: TrainingProgress
    """Position in the run, for losses that depend on it."""
    expert_balance: ExpertBalance | None
    """Statistics of the routers in the last pass over packs; None for a model without experts."""
    clock: PassClock

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
        self.expert_balance, self.clock = None, PassClock()
        if model_path is not None:
            load_hf(self.chunks, spec, model_path)
        self._reference = ReferencePolicy(self.chunks) if keep_reference else None
        dtype = DTYPES[config.model.dtype]
        ddp = gradient_buffers(dtype, config.parallel)
        self._wrapped = [DistributedDataParallel(chunk.config, ddp, chunk) for chunk in self.chunks]
        for chunk in self.chunks:
            chunk.fp32_head = config.model.fp32_head
            chunk.config.finalize_model_grads_func = self.clock.stopping(sum_gradients)
            chunk.config.no_sync_func = None if len(self.chunks) == 1 else [w.no_sync for w in self._wrapped]
            use_attention_backend(chunk, config.model.attention_backend)
        for wrapped in self._wrapped:
            fuse_weight_gradients(wrapped)
            reduce_in_order(wrapped)
            wait_for_head(wrapped)
        self.nonfinite_packs = []
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
        """The first chunk: the whole local model unless the pipeline is interleaved."""
        return self.chunks[0]

    @property
    def updates_done(self) -> int:
        """Updates since the start of the schedule, including skipped ones."""
        return int(self.scheduler.num_steps)

    def logprobs(
        self, packs: Sequence[TreePack], *, temperature: float | None = None, training: bool = True
    ) -> list[Float32Array]:
        """Return the log-probs of `policy_outputs`: float32[m] per pack, in nats."""
        return self.policy_outputs(packs, temperature=temperature, training=training).logprobs

    @torch.no_grad()
    def policy_outputs(
        self, packs: Sequence[TreePack], *, temperature: float | None = None, training: bool = True
    ) -> PolicyOutputs:
        """Compute log-probs and entropies of the packs' targets under the current weights.

        The kernels and shapes are those of `update`, so on a CPU the ratios of a first on-policy update are exactly 1.
        On CUDA, libraries may add in another order in each pass (`trainer.consistency`).

        Args:
            packs: packs of all data-parallel ranks.
            temperature: divides the logits; None takes the job's sampling temperature.
            training: the packs are trained next, so the routers keep the load that this pass measures. False for a
                reference policy, a probe or held-out data.
        """
        if not packs:
            return PolicyOutputs([], [])
        ends = np.cumsum([len(pack.predictors) for pack in packs])
        whole = torch.zeros(2, int(ends[-1]), device=device())
        mine = forward_order(packs, self.config.parallel)
        outputs = self._run(
            packs,
            None,
            _keep,
            temperature=self.config.rollout.temperature if temperature is None else temperature,
            forward_only=True,
            keep_load=training,
        )
        for index, (targets, values) in zip(mine, outputs, strict=False):  # only the last stage has any
            if index < len(packs):
                whole[:, targets + int(ends[index]) - len(packs[index].predictors)] = values
        logprobs, entropies = reduce_over_targets(whole).cpu().numpy()
        return PolicyOutputs(np.split(logprobs, ends[:-1]), np.split(entropies, ends[:-1]))

    def reference_logprobs(self, batches: Sequence[Sequence[TreePack]]) -> list[list[Float32Array]] | None:
        """Return `logprobs` of each batch's packs under the reference policy; None if no reference is kept.

        Call it once per step, before the first update: each call swaps the weights between host and device. Expert
        routes of the packs are ignored; the reference policy routes by itself.

        Raises:
            RuntimeError: the loss has a KL term and no reference is kept.
        """
        if self._reference is None:
            if self.config.algorithm.kl_coefficient:
                raise RuntimeError(
                    "algorithm.kl_coefficient needs a reference policy: create Actor(keep_reference=True)"
                )
            return None
        with self._reference.swap_in():
            unrouted = [[drop_routes(pack) for pack in packs] for packs in batches]
            return [self.logprobs(packs, training=False) for packs in unrouted]

    def update(
        self,
        packs: Sequence[TreePack],
        old_logprobs: Sequence[Float32Array] | None,
        loss: LossForm = "policy",
        *,
        reference_logprobs: Sequence[Float32Array] | None = None,
        check: Callable[[UpdateStats], None] | None = None,
        await_weights: bool = True,
    ) -> UpdateStats:
        """Take one optimizer step on a batch; each pack is a micro-batch.

        The step is skipped if a loss or the gradient is not finite.

        Args:
            packs: the whole batch; credits are normalised over it.
            old_logprobs: float32[m] per pack from `logprobs` before the step's first update; None if the current
                policy is the old one.
            loss: meaning of the credits (see `algorithms.credit.LossForm`).
            reference_logprobs: float32[m] per pack from `reference_logprobs`.
            check: receives the statistics before the step if all losses are finite; it may raise.
            await_weights: False if a pass over packs reads the new weights first. Their gather may overlap with it.

        Raises:
            ValueError: there are no packs, the old log-probs do not fit them, or the actor has no optimizer.
        """
        if self._optimizer_config is None:
            raise ValueError("this actor has no optimizer: create it with optimizer=OptimizerConfig(...)")
        self.scheduler.step(1)
        outputs = self.accumulate(packs, old_logprobs, loss, reference_logprobs=reference_logprobs)
        stats = self._stats(outputs)  # the same on all ranks, which agree whether all losses are finite
        finite = math.isfinite(stats.loss)
        if check is not None and finite:
            check(stats)
        grad_norm, stepped = clip_and_step(self.optimizer, self._optimizer_config.clip_grad, finite=finite)
        gather_weights(self._wrapped, wait=await_weights)
        self.nonfinite_packs = [] if stepped else self._nonfinite(packs, outputs)
        return replace(stats, grad_norm=grad_norm, skipped=not stepped)

    def accumulate(
        self,
        packs: Sequence[TreePack],
        old_logprobs: Sequence[Float32Array] | None,
        loss: LossForm = "policy",
        *,
        reference_logprobs: Sequence[Float32Array] | None = None,
    ) -> list[Tensor]:
        """Compute the gradient of a batch into every parameter's `main_grad`: the first half of `update`.

        Returns:
            One row of statistics per pack of this rank; empty before the last pipeline stage.

        Raises:
            ValueError: there are no packs, or the old log-probs do not fit them.
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
        """Return the loss of each of this rank's packs by its index.

        A collective of the context-parallel ranks, each of which computes a part of the loss.

        Args:
            packs: those of `accumulate`.
            outputs: rows that `accumulate` returned.
        """
        rows = torch.stack(list(outputs))[:, 0] if outputs else None
        if rows is not None and self.config.parallel.context > 1:
            dist.all_reduce(rows, group=parallel_state.get_context_parallel_group())
        values = [] if rows is None else rows.tolist()
        return {
            index: value
            for index, value in zip(forward_order(packs, self.config.parallel), values, strict=False)
            if index < len(packs)
        }

    def _nonfinite(self, packs: Sequence[TreePack], outputs: Sequence[Tensor]) -> list[int]:
        """Return the packs whose loss is not finite on some rank."""
        own = [index for index, value in self.losses(packs, outputs).items() if not math.isfinite(value)]
        return sorted({index for part in gather_objects(own) for index in part})

    def snapshot(self, directory: Path) -> TrainingSnapshot:
        """Copy weights, optimizer, schedule and random generators to host memory, to be written to `directory`.

        All ranks call it. The directory exists and is empty. `TrainingSnapshot.write` needs no other rank.
        """
        return snapshot(directory, self.chunks, self.optimizer, self.scheduler)

    def load(self, directory: Path) -> None:
        """Restore a written `snapshot`, from any layout; from the same layout bit for bit.

        Learning rates come from the config, not from the snapshot.
        """
        load_training_state(directory, self.chunks, self.optimizer, self.scheduler)

    def _run(
        self,
        packs: Sequence[TreePack],
        old_logprobs: Sequence[Float32Array] | None,
        finish: LossFunction,
        *,
        temperature: float,
        forward_only: bool,
        reference_logprobs: Sequence[Float32Array] | None = None,
        keep_load: bool = True,
    ) -> list[Any]:
        """Run this rank's passes and return the values that `finish` keeps, on the last pipeline stage."""
        groups = own_groups(packs, self.config.parallel)
        extra = sum(index >= len(packs) for group in groups for index in group)
        padded = [*packs, *[new_pack()] * extra]  # without tokens and loss
        nothing = [np.zeros(0, np.float32)] * extra
        old = None if old_logprobs is None else [*old_logprobs, *nothing]
        reference = None if reference_logprobs is None else [*reference_logprobs, *nothing]
        begin_pass(self.chunks, float(sum(int(pack.multiplicity.sum()) for pack in packs)))
        for chunk in self.chunks:
            begin_weights(chunk)
        with MicroBatches(padded, old, self._shard, reference) as batches, self.clock.counting():
            outputs = run_passes(
                self._wrapped,
                padded,
                batches,
                groups,
                self.config.parallel,
                finish,
                temperature=temperature,
                forward_only=forward_only,
            )
        self.expert_balance = finish_pass(self.chunks, keep_load=keep_load)
        return outputs

    @property
    def _shard(self) -> ContextShard:
        parallel = self.config.parallel
        rank, cost = parallel_state.get_context_parallel_rank(), CostModel.of(self.spec)
        return ContextShard(rank, parallel.context, self.config.pack_multiple, cost)

    def _policy(self, batch: MicroBatch, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        logprobs, entropies = output
        if not isinstance(self._loss, TokenLoss):
            raise ValueError(
                f'algorithm.loss={self.config.algorithm.loss} needs the whole batch: call update with loss="linear"'
            )
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

    def _stats(self, outputs: list[Tensor]) -> UpdateStats:
        """Return the statistics of a batch before its step."""
        rows = torch.stack(outputs) if outputs else torch.zeros(1, WIDTH, dtype=torch.float64, device=device())
        balance = self.expert_balance
        return UpdateStats.of(
            reduce_over_targets(rows[:, :-1].sum(0)),
            reduce_over_targets(rows[:, -1].max(), dist.ReduceOp.MAX),
            grad_norm=math.nan,
            lr=float(self.optimizer.param_groups[0]["lr"]),
            skipped=False,
            **({} if balance is None else balance.statistics()),
        )


def _nll(batch: MicroBatch, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    loss, stats = linear_loss(*output, batch.positive + batch.negative, batch.old_logprobs)
    return loss, stats.row()


def _keep(batch: MicroBatch, output: tuple[Tensor, Tensor]) -> tuple[None, tuple[Tensor, Tensor]]:
    return None, (batch.targets, torch.stack(output))
