"""AdamW through Megatron's optimizer, optionally divided among data-parallel ranks, and its learning-rate schedule."""

import gc
import math
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from arpo_megatron.actor.optimizer_state import inner_optimizers
from arpo_megatron.config import OptimizerConfig, ParallelConfig


def gradient_buffers(dtype: torch.dtype, parallel: ParallelConfig) -> DistributedDataParallelConfig:
    """Configure gradient buffers: accumulation in float32, reduction to all ranks or only to the owners.

    Each part of the gradient is reduced as soon as the last backward pass of a batch has completed it. That needs one
    last backward pass with all parameters, and a group of packs in a pipeline has several. Experts and packs without
    tokens take part: their gradients are zero. In the same layouts the distributed optimizer's gather of new weights
    can overlap with the next forward pass (`gather_weights`).

    Args:
        dtype: dtype of the parameters.
        parallel: layout.
    """
    overlap = parallel.data * parallel.context > 1 and parallel.pipeline == 1
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=dtype == torch.bfloat16,
        use_distributed_optimizer=parallel.distributed_optimizer,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap and parallel.distributed_optimizer,
        align_param_gather=True,  # a layer that waits for its weights does not start the gather of others
    )


def reduce_in_order(wrapped: Any) -> None:
    """Let all ranks start the overlapped reductions of a communicator in one order, whatever that of their gradients.

    Autograd has no fixed order for the weights of one operation, such as a grouped product of experts: it depends on
    the rest of the graph, and a rank without packs has another graph. Megatron starts a reduction when the last
    gradient of its part is there, so ranks would add different parts. Here a part also waits for the parts before it.
    """
    if wrapped.ddp_config.overlap_grad_reduce:
        for groups in (wrapped.bucket_groups, wrapped.expert_parallel_bucket_groups):
            for group in groups:
                group.start_grad_sync = partial(_start_in_order, groups, group)


def _start_in_order(groups: list[Any], own: Any, **options: Any) -> None:
    # In the first batch Megatron counts the gradients, and starts all parts in order at the end.
    for group in [own] if own.is_first_batch else groups:
        if group.grad_reduce_handle is not None:
            continue
        if not own.is_first_batch and group.per_param_grad_ready_counts != group.golden_per_param_grad_ready_counts:
            break
        type(group).start_grad_sync(group, **options)


def wait_for_head(wrapped: Any) -> None:
    """Let the norm before the output head wait for the head's weights.

    Megatron lets each layer wait for its own when it is called. The head's weight is read without a call of its layer.
    """
    if wrapped.use_forward_hook:
        wait, model = wrapped._make_forward_pre_hook(), wrapped.module
        model.decoder.final_layernorm.register_forward_pre_hook(lambda *_: wait(model.output_layer))


def gather_weights(wrapped_chunks: list[Any], *, wait: bool) -> None:
    """Gather new weights, if the optimizer's step has not done so.

    Dense parts come first, then the parts of experts on several ranks, which have a communicator of their own. Each of
    the two is in the order in which a forward pass needs them.

    Args:
        wrapped_chunks: made with `gradient_buffers`.
        wait: return when all are there. Otherwise only a forward pass may read them, whose layers wait for their own.
    """
    for wrapped in wrapped_chunks:
        if not wrapped.use_forward_hook:
            continue
        started = [
            group
            for groups in (wrapped.bucket_groups, wrapped.expert_parallel_bucket_groups)
            for group in reversed(groups)
        ]
        for group in started:
            group.start_param_sync()
        for group in started if wait else ():
            group.finish_param_sync(skip_next_bucket_dispatch=True)


def build_optimizer(
    config: OptimizerConfig, wrapped_chunks: list[Any], dtype: torch.dtype, *, distributed: bool = False
) -> Any:
    """Build Megatron's optimizer for model chunks in Megatron's DistributedDataParallel.

    Norms and biases have no weight decay. In bfloat16 the optimizer keeps float32 master weights.

    Args:
        config: learning rate, decay, clipping and offloading.
        wrapped_chunks: made with `gradient_buffers` of the same `dtype` and layout.
        dtype: dtype of the parameters.
        distributed: divide moments and master weights among the data-parallel ranks.
    """
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.lr * config.min_lr_ratio,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=distributed,
            optimizer_cpu_offload=config.offload,
            optimizer_offload_fraction=config.offload_fraction if config.offload else 0.0,
            # The offloading optimizer finds its master weights only in this form.
            use_precision_aware_optimizer=config.offload,
            overlap_cpu_optimizer_d2h_h2d=config.offload,
        ),
        wrapped_chunks,
    )
    if config.offload:
        gc.collect()  # the distributed optimizer replaces the offloading one, whose copies are in reference cycles
    complete_state(optimizer)
    return optimizer


def optimizer_name(optimizer: Any) -> str:
    """Name the Adam implementation (Transformer Engine, apex or torch) and the location of its state, for the log."""
    makers = {"transformer_engine": "Transformer Engine", "apex": "apex", "torch": "torch"}
    found = []
    for inner in inner_optimizers(optimizer):
        kind = type(inner)
        fused = isinstance(inner, torch.optim.AdamW) and any(group.get("fused") for group in inner.param_groups)
        maker = makers.get(kind.__module__.partition(".")[0], kind.__module__)
        found.append(f"{maker} {kind.__name__}{' (fused)' if fused else ''}")
    offloaded = any(isinstance(part.optimizer, HybridDeviceOptimizer) for part in optimizer.chained_optimizers)
    return ", ".join(dict.fromkeys(found)) + (", state in host memory" if offloaded else "")


def complete_state(optimizer: Any) -> None:
    """Create the whole state of every Adam before the first update, and select torch's fused kernel.

    A checkpoint then has the same tensors before and after the first update, and can be loaded in place.
    """
    for part in optimizer.chained_optimizers:
        inner = part.optimizer
        if isinstance(inner, HybridDeviceOptimizer):
            # Its own `dummy_step` is an update with a random gradient, whose moments would stay.
            for each in inner.sub_optimizers:
                _complete(each)
            inner._sync_sub_optimizers_state_to_hdo()
        elif isinstance(inner, torch.optim.AdamW):
            _complete(inner)
        elif inner is not None:  # Transformer Engine's and apex's
            part.init_state_fn(inner, part.config)


def _complete(inner: torch.optim.Optimizer) -> None:
    for group in inner.param_groups:
        if isinstance(inner, torch.optim.AdamW):  # the others are fused and count their steps by group
            group["fused"] = True
        for parameter in group["params"]:
            state = inner.state[parameter]
            if isinstance(inner, torch.optim.AdamW):
                state.setdefault("step", torch.zeros((), dtype=torch.float32, device=parameter.device))
            state.setdefault("exp_avg", torch.zeros_like(parameter))
            state.setdefault("exp_avg_sq", torch.zeros_like(parameter))


def build_scheduler(config: OptimizerConfig, optimizer: Any, total_updates: int) -> Any:
    """Build the schedule: warm-up from 0, then constant, linear or cosine to `min_lr_ratio`.

    Update k of n uses the rate at k/n.
    """
    total = max(2, total_updates)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.lr * config.min_lr_ratio,
        lr_warmup_steps=min(round(config.warmup_fraction * total), total - 1),
        lr_decay_steps=total,
        lr_decay_style=config.schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=total,
        wd_incr_style="constant",
    )


def gradient_norm(optimizer: Any) -> float:
    """Return the global norm of the accumulated gradient; the optimizer is then ready to clip and step."""
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


def clip_and_step(optimizer: Any, clip_grad: float, *, finite: bool = True) -> tuple[float, bool]:
    """Clip by the global norm and step. If anything is not finite on any rank, change nothing.

    Args:
        optimizer: has accumulated the gradient of a whole batch.
        clip_grad: largest norm.
        finite: the losses were finite; equal on all ranks.

    Returns:
        The global gradient norm before clipping, and whether the step was taken; equal on all ranks.
    """
    norm = gradient_norm(optimizer)
    if not (finite and math.isfinite(norm)):
        return norm, False
    for part in optimizer.chained_optimizers:
        if parameters := part.get_parameters():
            clip_grad_by_total_norm_fp32(
                parameters,
                max_norm=clip_grad,
                total_norm=norm,
                use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )
    optimizer.step_with_ready_grads()
    return norm, True
