"""AdamW and its schedule, against the formulas."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

from arpo_megatron.actor.actor import Actor
from arpo_megatron.actor.optimizer import complete_state
from arpo_megatron.actor.optimizer_state import adam_steps
from arpo_megatron.config import OptimizerConfig
from arpo_megatron.packing.packs import pack_trees
from tests.actor import cases, reference

pytestmark = pytest.mark.usefixtures("one_rank")

UPDATES = 10


def rates(config: OptimizerConfig) -> list[float]:
    actor = Actor(cases.job(), cases.QWEN3, None, optimizer=config, total_updates=UPDATES)
    found = []
    for _ in range(UPDATES):
        actor.scheduler.step(1)
        found.append(actor.optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_learning_rate_follows_the_schedule(schedule, warmup):
    config = OptimizerConfig(lr=1.0, schedule=schedule, warmup_fraction=warmup / UPDATES, min_lr_ratio=0.1)
    expected = [reference.learning_rate(schedule, k, updates=UPDATES, warmup=warmup) for k in range(1, UPDATES + 1)]
    assert rates(config) == pytest.approx(expected)


def test_update_is_adamw_with_clipping_and_without_decay_of_norms():
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1, beta1=0.8, beta2=0.9, clip_grad=0.05)
    actor = Actor(cases.job(), cases.QWEN3, None, optimizer=config, total_updates=UPDATES)
    packs = pack_trees(*cases.batch(0), token_budget=1000)
    copies = {name: torch.nn.Parameter(p.detach().double()) for name, p in actor.model.named_parameters()}
    decayed = [p for p in copies.values() if p.dim() > 1]
    plain = [p for p in copies.values() if p.dim() == 1]
    adamw = torch.optim.AdamW(
        [{"params": decayed}, {"params": plain, "weight_decay": 0.0}], lr=1e-2, weight_decay=0.1, betas=(0.8, 0.9)
    )
    for _ in range(3):
        stats = actor.update(packs, [pack.sampling_logprobs for pack in packs])
        assert stats.grad_norm > config.clip_grad
        for name, parameter in actor.model.named_parameters():  # main_grad holds the clipped gradient
            copies[name].grad = parameter.main_grad.double()
        norm = torch.stack([p.grad.norm() for p in copies.values()]).norm()
        assert float(norm) == pytest.approx(config.clip_grad, rel=1e-4)
        adamw.step()
    for name, parameter in actor.model.named_parameters():
        torch.testing.assert_close(parameter.double(), copies[name], rtol=1e-5, atol=1e-6)


def test_offloaded_state_starts_at_zero(monkeypatch):
    """Not with the moments of a random gradient, nor with weights that it has moved."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)  # doubles: it makes streams, and uses none here
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    weight = torch.nn.Parameter(torch.randn(4, 4).bfloat16())
    before = weight.detach().clone()
    adamw = torch.optim.AdamW
    offloading = HybridDeviceOptimizer(
        [weight], 1.0, cpu_optimizer_cls=adamw, gpu_optimizer_cls=adamw, param_update_in_fp32=True, lr=1.0, fused=True
    )
    optimizer = SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=offloading)])
    complete_state(optimizer)
    state = offloading.state[weight]
    assert not state["exp_avg"].any()
    assert not state["exp_avg_sq"].any()
    assert torch.equal(state["master_param"], before.float())
    assert torch.equal(weight, before)
    assert adam_steps(optimizer) == 0


def test_actor_without_optimizer_accumulates_the_same_gradients():
    packs = pack_trees(*cases.batch(0), token_budget=1000)
    alone, whole = (
        Actor(cases.job(), cases.QWEN3, None, optimizer=config, total_updates=1) for config in (None, OptimizerConfig())
    )
    for actor in (alone, whole):
        for parameter in actor.model.parameters():
            torch.nn.init.constant_(parameter, 0.01)
        actor.accumulate(packs, None)
    for ours, theirs in zip(alone.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours.main_grad, theirs.main_grad)
    with pytest.raises(ValueError, match="has no optimizer"):
        alone.update(packs, None)
