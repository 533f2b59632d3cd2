"""AdamW through Megatron's optimizer, and its learning-rate schedule."""

import math
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from arpo_megatron.config import OptimizerConfig


def build_optimizer(config: OptimizerConfig, wrapped_chunks: list[Any], dtype: torch.dtype) -> Any:
    """Megatron's optimizer for model chunks in Megatron's DistributedDataParallel.

    Norms and biases are not decayed. In bfloat16 the optimizer keeps float32 master weights.
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
        ),
        wrapped_chunks,
    )
    complete_state(optimizer)
    return optimizer


def complete_state(optimizer: Any) -> None:
    """Give torch's AdamW (which Megatron takes without TE and apex) its whole state and its fused kernel.

    With the state there from the beginning, a checkpoint has the same keys before and after the first update.
    """
    for part in optimizer.chained_optimizers:  # shared-out experts have one of their own
        inner = part.optimizer
        if not isinstance(inner, torch.optim.AdamW):
            continue
        for group in inner.param_groups:
            group["fused"] = True
            for parameter in group["params"]:
                state = inner.state[parameter]
                state.setdefault("step", torch.zeros((), dtype=torch.float32, device=parameter.device))
                state.setdefault("exp_avg", torch.zeros_like(parameter))
                state.setdefault("exp_avg_sq", torch.zeros_like(parameter))


def build_scheduler(config: OptimizerConfig, optimizer: Any, total_updates: int) -> Any:
    """Warm-up from 0, then constant, linear or cosine to `min_lr_ratio`; update k of n uses the rate at k/n."""
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


def clipped_step(optimizer: Any, clip_grad: float) -> tuple[float, bool]:
    """Clip by the global norm and step, unless a gradient is not finite: then nothing changes.

    Returns:
        the global gradient norm before clipping, and whether the step was taken.
    """
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if not math.isfinite(norm):
        return norm, False
    for part in optimizer.chained_optimizers:
        clip_grad_by_total_norm_fp32(part.get_parameters(), max_norm=clip_grad, total_norm=norm)
    optimizer.step_with_ready_grads()
    return norm, True
