"""The policy in training: log-probs of packs, optimizer updates, its own checkpoint. One object on every trainer rank.

All ranks call the same methods with the same packs (the controller broadcasts them); each data-parallel rank computes
its share, and results that leave a method are equal on all ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from arpo_megatron.actor.checkpoint import load_training_state, save_training_state
from arpo_megatron.actor.losses import PolicyStats, nll_loss, tree_ppo_loss
from arpo_megatron.actor.model import DTYPES, build_model
from arpo_megatron.actor.optimizer import build_optimizer, build_scheduler, clipped_step
from arpo_megatron.actor.packing import TreePack, empty_pack, share_packs
from arpo_megatron.actor.parallel import device
from arpo_megatron.config import JobConfig, OptimizerConfig
from arpo_megatron.tree import Float32Array
from arpo_megatron.weights.load import load_hf
from arpo_megatron.weights.shape import ModelShape

Loss = Literal["ppo", "nll"]


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """One optimizer update. Means are over target tokens, a shared token counted once.

    Attributes:
        loss: of the whole minibatch.
        grad_norm: global norm before clipping.
        lr: learning rate of this update.
        clip_share: share of tokens whose gradient was clipped away, in [0, 1].
        ratio_max: largest ratio of new to old probability.
        ratio_mean: its mean.
        entropy_mean: of the policy before the update, in nats.
        kl_k3: k3 estimate of KL(old || new), mean, in nats.
        tokens: target tokens.
        skipped: a gradient was not finite, so weights and optimizer state are unchanged (the schedule goes on).
    """

    loss: float
    grad_norm: float
    lr: float
    clip_share: float
    ratio_max: float
    ratio_mean: float
    entropy_mean: float
    kl_k3: float
    tokens: int
    skipped: bool


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A pack as tensors on the device.

    Attributes:
        inputs: positional arguments of `TreeGPTModel.forward`.
        positive: float32[m], like the next two from the pack.
        negative: float32[m].
        weight: float32[m].
        old_logprobs: float32[m] in nats, None where the present policy is the old one.
    """

    inputs: tuple[Tensor, ...]
    positive: Tensor
    negative: Tensor
    weight: Tensor
    old_logprobs: Tensor | None

    @classmethod
    def of(cls, pack: TreePack, old_logprobs: Float32Array | None) -> Self:
        """Copy a pack to the device of this rank."""

        def put(array: np.ndarray[Any, Any], dtype: torch.dtype | None = None) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device(), dtype)

        predictors, ids = pack.parent_index[pack.targets], pack.token_ids[pack.targets]
        return cls(
            inputs=(
                put(pack.token_ids, torch.int64),
                put(pack.position_ids, torch.int64),
                put(pack.subtree_end),
                put(predictors, torch.int64),
                put(ids, torch.int64),
            ),
            positive=put(pack.positive),
            negative=put(pack.negative),
            weight=put(pack.weight),
            old_logprobs=None if old_logprobs is None else put(old_logprobs),
        )


class Actor:
    """The model, its optimizer and its schedule on this rank.

    Args:
        config: `model.dtype`, `parallel`, `algorithm` (clipping) and `rollout.temperature` are used.
        shape: of the model at `model_path`.
        model_path: Hugging Face directory of the first weights; None: random ones, the same in every layout.
        optimizer: learning rate and schedule (supervised and policy training have different ones).
        total_updates: length of the schedule.

    `arpo_megatron.actor.parallel.initialize` comes first.
    """

    def __init__(
        self,
        config: JobConfig,
        shape: ModelShape,
        model_path: Path | None,
        *,
        optimizer: OptimizerConfig,
        total_updates: int,
    ) -> None:
        self.config = config
        self.shape = shape
        self.model = build_model(shape, config.parallel, config.model.dtype, initialize=model_path is None)
        if model_path is not None:
            load_hf(self.model, shape, model_path)
        self._dtype = DTYPES[config.model.dtype]
        self._wrapped = DistributedDataParallel(
            self.model.config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=self._dtype == torch.bfloat16),
            self.model,
        )
        self.model.config.finalize_model_grads_func = _sum_gradients
        self._data_group = parallel_state.get_data_parallel_group()
        self.reset_optimizer(optimizer, total_updates)

    def reset_optimizer(self, optimizer: OptimizerConfig, total_updates: int) -> None:
        """Start a new phase (policy training after the cold start): fresh moments, a schedule from its beginning."""
        self._optimizer_config = optimizer
        self.optimizer = build_optimizer(optimizer, self._wrapped, self._dtype)
        self.scheduler = build_scheduler(optimizer, self.optimizer, total_updates)

    @property
    def updates_done(self) -> int:
        """Updates since the schedule's beginning, skipped ones included."""
        return int(self.scheduler.num_steps)

    @torch.no_grad()
    def logprobs(self, packs: Sequence[TreePack], *, temperature: float | None = None) -> list[Float32Array]:
        """Log-probs in nats of the packs' targets under the present weights.

        The kernels and shapes are those of `update`, so that the ratio of a first on-policy update is exactly 1.

        Args:
            packs: on every rank the same ones.
            temperature: None: the job's sampling temperature.

        Returns:
            float32[m] a pack, on every rank.
        """
        if not packs:
            return []
        ends = np.cumsum([len(pack.targets) for pack in packs])
        whole = torch.zeros(int(ends[-1]), device=device())
        mine, count = self._share(packs)
        outputs = self._run(
            self._micro_batches(packs, None, mine, count),
            count,
            _keep_logprobs,
            temperature=self.config.rollout.temperature if temperature is None else temperature,
            forward_only=True,
        )
        for index, output in zip(mine, outputs, strict=False):  # padding micro-batches come last
            whole[ends[index] - len(output) : ends[index]] = output
        if self._data_group.size() > 1:
            # Every target is one rank's; the others add exact zeros.
            dist.all_reduce(whole, group=self._data_group)
        return np.split(whole.cpu().numpy(), ends[:-1])

    def update(
        self, packs: Sequence[TreePack], old_logprobs: Sequence[Float32Array] | None, loss: Loss = "ppo"
    ) -> UpdateStats:
        """One optimizer step on a minibatch, each pack a micro-batch.

        Args:
            packs: the whole minibatch; their credits are normalised over it.
            old_logprobs: from `logprobs` before the step's first update; None: the present policy is the old one.
            loss: "ppo" with the job's clipping, or "nll" (supervised; at temperature 1).

        Raises:
            ValueError: no packs, or old log-probs that do not fit them.
        """
        if not packs:
            raise ValueError("an update needs at least one pack")
        if old_logprobs is not None and [len(o) for o in old_logprobs] != [len(p.targets) for p in packs]:
            raise ValueError("old log-probs do not fit the packs")
        self._wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.scheduler.step(1)
        mine, count = self._share(packs)
        outputs = self._run(
            self._micro_batches(packs, old_logprobs, mine, count),
            count,
            _nll if loss == "nll" else self._ppo,
            temperature=1.0 if loss == "nll" else self.config.rollout.temperature,
            forward_only=False,
        )
        grad_norm, stepped = clipped_step(self.optimizer, self._optimizer_config.clip_grad)
        return self._stats(outputs, grad_norm, skipped=not stepped)

    def save(self, directory: Path) -> None:
        """Write weights, optimizer, schedule and generators to an existing empty directory (a call of all ranks)."""
        save_training_state(directory, self.model, self.optimizer, self.scheduler)

    def load(self, directory: Path) -> None:
        """Continue from `save`, in any layout; in the same one bit for bit. Configured rates win over saved ones."""
        load_training_state(directory, self.model, self.optimizer, self.scheduler)

    def _share(self, packs: Sequence[TreePack]) -> tuple[list[int], int]:
        """This data-parallel rank's packs, and the number of micro-batches that every rank runs."""
        shares = share_packs([pack.cost for pack in packs], self._data_group.size())
        return shares[self._data_group.rank()], max(len(share) for share in shares)

    def _micro_batches(
        self, packs: Sequence[TreePack], old_logprobs: Sequence[Float32Array] | None, mine: Sequence[int], count: int
    ) -> Iterator[MicroBatch]:
        """This rank's packs, then empty ones up to `count`."""
        for index in mine:
            yield MicroBatch.of(packs[index], None if old_logprobs is None else old_logprobs[index])
        for _ in range(count - len(mine)):
            yield MicroBatch.of(empty_pack(self.config.parallel.pack_multiple), None)

    def _run(
        self,
        batches: Iterator[MicroBatch],
        count: int,
        finish: Callable[..., Any],
        *,
        temperature: float,
        forward_only: bool,
    ) -> list[Any]:
        """Megatron's schedule; `finish` makes a loss (or data) of a micro-batch and the model's output."""

        def forward_step(iterator: Iterator[MicroBatch], model: Any) -> tuple[Any, Any]:
            batch = next(iterator)
            return model(*batch.inputs, temperature), partial(finish, batch)

        outputs: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches,
            model=self._wrapped,
            num_microbatches=count,
            seq_length=1,  # this and the next are for pipeline stages only
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return outputs

    def _ppo(self, batch: MicroBatch, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logprobs, entropies = output
        algorithm = self.config.algorithm
        loss, stats = tree_ppo_loss(
            logprobs,
            logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs,
            batch.positive,
            batch.negative,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            dual_clip=algorithm.dual_clip,
        )
        return loss, *_account(stats, entropies)

    def _stats(self, outputs: list[Tensor], grad_norm: float, *, skipped: bool) -> UpdateStats:
        rows = torch.stack(outputs)
        sums, ratio_max = rows[:, :-1].sum(0), rows[:, -1].max()
        if self._data_group.size() > 1:
            dist.all_reduce(sums, group=self._data_group)
            dist.all_reduce(ratio_max, dist.ReduceOp.MAX, group=self._data_group)
        loss, tokens, clipped, ratio, kl, entropy = sums.tolist()
        count = max(1.0, tokens)
        return UpdateStats(
            loss=loss,
            grad_norm=grad_norm,
            lr=float(self.optimizer.param_groups[0]["lr"]),
            clip_share=clipped / count,
            ratio_max=float(ratio_max),
            ratio_mean=ratio / count,
            entropy_mean=entropy / count,
            kl_k3=kl / count,
            tokens=int(tokens),
            skipped=skipped,
        )


def _nll(batch: MicroBatch, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    loss, stats = nll_loss(output[0], batch.weight)
    return loss, *_account(stats, output[1])


def _keep_logprobs(batch: MicroBatch, output: tuple[Tensor, Tensor], *, non_loss_data: bool) -> Tensor:
    return output[0]


def _account(stats: PolicyStats, entropies: Tensor) -> tuple[Tensor, Tensor]:
    """The token count that the schedule wants, and one row of statistics: sums, entropy sum, largest ratio."""
    row = torch.cat([stats.sums(), entropies.double().sum()[None], stats.ratio_max.double()[None]])
    return stats.tokens.int(), row


def _sum_gradients(model: list[Any], num_tokens: Tensor | None, **groups: Any) -> None:
    """Megatron's gradient reduction without its division by tokens: the credits are normalised already."""
    finalize_model_grads(model, None, **groups)
