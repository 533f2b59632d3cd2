"""AEPO from packs to gradients, against flat float64: the old policy's entropies, token factors and the clip."""

import pytest
import torch

from arpo_megatron.actor.actor import Actor
from arpo_megatron.config import AlgorithmConfig, OptimizerConfig
from arpo_megatron.packing.packs import pack_trees
from arpo_megatron.trainer.batch import Batch, finish_credit
from tests.actor import cases, reference

pytestmark = pytest.mark.usefixtures("one_rank")

LOW, HIGH, SHARE = 0.1, 0.2, 0.4
ALGORITHM = AlgorithmConfig(
    advantage="entropy_aware",
    loss="aepo",
    params={"entropy_advantage": SHARE},
    clip_low=LOW,
    clip_high=HIGH,
    dual_clip=None,
    entropy_coefficient=0.05,
)


def flat_aepo(now, step, forest, advantages) -> torch.Tensor:
    """arXiv 2510.14545, one copy of a token at a time."""
    rows = []
    for tree, own in zip(forest, advantages, strict=True):
        for leaf, advantage in zip(tree.leaves(), own, strict=True):
            trajectory = tree.trajectory(leaf)
            ids = torch.from_numpy(trajectory.token_ids).long()
            mask = torch.from_numpy(trajectory.loss_mask[1:]).bool()
            tables = [torch.log_softmax(reference.logits(w, ids, cases.QWEN3), -1)[:-1] for w in (now, step)]
            new, old = (table.gather(1, ids[1:, None])[:, 0][mask] for table in tables)
            entropies = [-(table.exp() * table).sum(-1)[mask] for table in tables]
            rows.append((new, old.detach(), entropies[0], entropies[1].detach(), float(advantage)))
    then = torch.cat([row[3] for row in rows])
    total = torch.zeros((), dtype=torch.float64)
    for new, old, entropy, before, advantage in rows:
        scaled = advantage * (1 + SHARE * (before - then.mean()) / then.std(correction=0))
        ratio = (new - old).exp()
        above = torch.where(ratio > 1 + HIGH, (1 + HIGH) / ratio.detach() * ratio, ratio)
        objective = torch.where(scaled >= 0, above, ratio.clamp(min=1 - LOW)) * scaled
        total = total - (objective + ALGORITHM.entropy_coefficient * entropy).sum() / len(then)
    return total


@pytest.mark.parametrize("budget", [10**6, 24])
def test_gradient_equals_that_of_the_flattened_trajectories(budget):
    torch.manual_seed(1)
    actor = Actor(cases.job(algorithm=ALGORITHM), cases.QWEN3, None, optimizer=OptimizerConfig(), total_updates=1)
    forest, credits = cases.batch(2)
    advantages = [cases.dyadic_advantages(tree, i) for i, tree in enumerate(forest)]
    packs = pack_trees(forest, credits, token_budget=budget)
    step, old = cases.parameters_of(actor), actor.policy_outputs(packs)
    cases.move(actor)
    now = cases.parameters_of(actor)
    exact = flat_aepo(now, step, forest, advantages)
    exact.backward()

    batch = Batch(packs, forest, advantages)
    ready = finish_credit(actor, batch, old.logprobs, actor.config, on_policy=False, entropies=old.entropies)
    stats = actor._stats(actor.accumulate(ready.packs, ready.old_logprobs, ready.loss))
    assert stats.loss == pytest.approx(float(exact.detach()), rel=1e-4, abs=5e-6)  # float32 terms of both signs
    assert stats.clip_high_share > 0 and stats.clip_low_share > 0
    cases.assert_gradients(actor, now)


def test_update_refuses_a_loss_of_the_wrong_kind():
    actor = Actor(
        cases.job(algorithm=AlgorithmConfig(loss="gspo")),
        cases.QWEN3,
        None,
        optimizer=OptimizerConfig(),
        total_updates=1,
    )
    packs = pack_trees(*cases.batch(2), token_budget=100)
    with pytest.raises(ValueError, match="gspo needs the whole batch: call update"):
        actor.accumulate(packs, None, "policy")
