"""The actor on one rank: promises of an update."""

import dataclasses

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from arpo_megatron.actor import context
from arpo_megatron.actor.actor import Actor
from arpo_megatron.algorithms.credit import supervised_credit
from arpo_megatron.config import AlgorithmConfig, OptimizerConfig, RolloutConfig
from arpo_megatron.packing.packs import pack_trees
from arpo_megatron.trainer.consistency import check_on_policy
from arpo_megatron.weights.export import hf_tensors
from tests.actor import cases, reference

pytestmark = pytest.mark.usefixtures("one_rank")


def new_actor(lr=1e-2, updates=10, dtype="float32", seed=1, **fields) -> Actor:
    torch.manual_seed(seed)
    job = cases.job(dtype=dtype, **fields)
    return Actor(job, cases.QWEN3, None, optimizer=OptimizerConfig(lr=lr), total_updates=updates)


def packs_of(seed: int, budget: int = 120):
    return pack_trees(*cases.batch(seed), token_budget=budget)


def weights(actor: Actor) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in actor.model.named_parameters()}


def assert_equal_weights(one: Actor, two: Actor) -> None:
    for (name, left), right in zip(one.model.named_parameters(), two.model.parameters(), strict=True):
        assert torch.equal(left, right), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_first_on_policy_ratio_is_exactly_one(dtype):
    actor = new_actor(dtype=dtype)
    packs = packs_of(0)
    assert len(packs) > 1
    for _ in range(2):  # after an update too
        old = actor.logprobs(packs)
        stats = actor.update(packs, old)
        assert (stats.ratio_max, stats.ratio_mean, stats.kl_old, stats.clip_high_share) == (1.0, 1.0, 0.0, 0.0)
    assert actor.update(packs, old).ratio_max != 1.0


def test_failed_check_takes_no_step():
    actor, packs = new_actor(), packs_of(0)
    before, old = weights(actor), actor.logprobs(packs)
    off = [values + np.float32(0.1) for values in old]

    def check(stats):
        check_on_policy(stats, exact=False)

    with pytest.raises(RuntimeError, match="do not compute the same thing"):
        actor.update(packs, off, check=check)
    assert all(torch.equal(value, before[name]) for name, value in weights(actor).items())
    assert not actor.update(packs, old, check=check).skipped


def test_update_without_old_logprobs_takes_the_current_policy_as_old():
    explicit, implicit = new_actor(), new_actor()
    packs = packs_of(0)
    first = explicit.update(packs, explicit.logprobs(packs))
    assert implicit.update(packs, None) == first
    assert_equal_weights(explicit, implicit)


def test_logprobs_equal_those_of_each_trajectory_at_the_sampling_temperature():
    actor = new_actor(rollout=RolloutConfig(temperature=0.7))
    parameters = {name: p.detach().double() for name, p in actor.model.named_parameters()}
    tree = cases.grown(3)
    credit = supervised_credit([tree])
    (pack,) = pack_trees([tree], credit, token_budget=1000)
    (found,) = actor.logprobs([pack])
    expected = {}
    for leaf in tree.leaves():
        values = reference.trajectory_logprobs(parameters, tree, leaf, cases.QWEN3, temperature=0.7)
        trajectory = tree.trajectory(leaf)
        for position in np.flatnonzero(trajectory.loss_mask):
            expected[tuple(trajectory.token_ids[: position + 1])] = float(values[position - 1])
    for value, predictor, target in zip(found, pack.predictors, pack.target_ids, strict=True):
        path = [k for k in range(predictor + 1) if predictor < pack.subtree_end[k]]
        assert value == pytest.approx(expected[(*pack.token_ids[path], target)], abs=2e-5)


def test_gradient_norm_and_loss_equal_those_of_the_trajectories():
    algorithm = AlgorithmConfig(clip_low=0.2, clip_high=0.28, dual_clip=1.5)
    actor = new_actor(algorithm=algorithm)
    forest, credits = cases.batch(1)
    parameters = cases.parameters_of(actor)
    clip = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.5}
    loss = sum(
        reference.flat_ppo(parameters, tree, cases.dyadic_advantages(tree, 1 + i), 2.0**-7, cases.QWEN3, **clip)
        for i, tree in enumerate(forest)
    )
    loss.backward()
    norm = sum(p.grad.square().sum() for p in parameters.values()).sqrt()
    packs = pack_trees(forest, credits, token_budget=120)
    stats = actor.update(packs, [pack.sampling_logprobs for pack in packs])
    assert stats.loss == pytest.approx(float(loss), rel=1e-5)
    assert stats.grad_norm == pytest.approx(float(norm), rel=1e-5)
    assert 0 < stats.clip_high_share < 1 and stats.ratio_max > 1 > 0 < stats.kl_old
    assert 0.9 * np.log(cases.VOCABULARY) < stats.entropy_mean <= np.log(cases.VOCABULARY)
    assert stats.tokens == sum(len(pack.predictors) for pack in packs)


def test_actor_loads_weights_from_the_hugging_face_directory(tmp_path):
    source = new_actor()
    save_file({n: t.contiguous() for n, t in hf_tensors([source.model], cases.QWEN3)}, tmp_path / "model.safetensors")
    torch.manual_seed(99)
    loaded = Actor(cases.job(), cases.QWEN3, tmp_path, optimizer=OptimizerConfig(lr=1e-2), total_updates=10)
    packs = packs_of(0)
    assert loaded.update(packs, None) == source.update(packs, None)
    assert_equal_weights(loaded, source)


def test_supervised_training_learns_the_demonstrations():
    actor = new_actor(updates=40)
    forest = [cases.grown(seed, samples=1) for seed in range(3)]
    packs = pack_trees(forest, supervised_credit(forest), token_budget=1000)
    losses = [actor.update(packs, None, "nll").loss for _ in range(40)]
    assert losses[0] == pytest.approx(np.log(cases.VOCABULARY), rel=0.1)
    assert losses[-1] < 0.2 * losses[0]


def test_supervised_training_ignores_the_sampling_temperature():
    packs = packs_of(2)
    warm, cool = new_actor(rollout=RolloutConfig(temperature=0.5)), new_actor()
    assert warm.update(packs, None, "nll") == cool.update(packs, None, "nll")


def test_nonfinite_gradient_changes_nothing_and_is_reported():
    actor, other = new_actor(), new_actor()
    good, bad = (
        packs_of(0),
        [dataclasses.replace(pack, positive=pack.positive * np.float32(np.nan)) for pack in packs_of(1)],
    )
    for each in (actor, other):
        each.update(good, None, "nll")
    before = weights(actor)
    stats = actor.update(bad, None, "nll")
    assert stats.skipped and not np.isfinite(stats.grad_norm)
    assert all(torch.equal(value, before[name]) for name, value in actor.model.named_parameters())
    assert actor.updates_done == 2
    assert not actor.update(good, None, "nll").skipped
    other.update(good, None, "nll")
    assert_equal_weights(actor, other)  # the skipped update left no trace in the optimizer either


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resumed_run_equals_the_uninterrupted_run_bit_for_bit(dtype, tmp_path):
    batches = [packs_of(seed) for seed in range(4)]

    def train(actor: Actor, some) -> list:
        return [actor.update(packs, actor.logprobs(packs)) for packs in some for _ in range(2)]

    straight = new_actor(dtype=dtype)
    expected = train(straight, batches)
    first = new_actor(dtype=dtype)
    train(first, batches[:2])
    cases.save(first, tmp_path)
    resumed = new_actor(dtype=dtype, seed=99)
    resumed.load(tmp_path)
    assert resumed.updates_done == 4
    assert train(resumed, batches[2:]) == expected[4:]
    assert_equal_weights(resumed, straight)


def test_checkpoint_before_the_first_update_can_be_resumed(tmp_path):
    saved, resumed = new_actor(), new_actor(seed=99)
    cases.save(saved, tmp_path)
    resumed.load(tmp_path)
    packs = packs_of(0)
    assert saved.update(packs, None) == resumed.update(packs, None)
    assert_equal_weights(saved, resumed)


def test_resumed_run_follows_its_config_not_the_saved_one(tmp_path):
    saved = new_actor(lr=1e-2)
    saved.update(packs_of(0), None)
    cases.save(saved, tmp_path)
    resumed = new_actor(lr=3e-4)
    resumed.load(tmp_path)
    assert resumed.update(packs_of(1), None).lr == 3e-4


def test_actor_refuses_impossible_calls():
    actor = new_actor()
    with pytest.raises(ValueError, match="at least one pack"):
        actor.update([], None)
    packs = packs_of(0)
    with pytest.raises(ValueError, match="do not fit"):
        actor.update(packs, actor.logprobs(packs)[:-1])
    assert actor.logprobs([]) == []


def test_cut_tree_trains_like_a_whole_one_and_leaves_no_context():
    whole, cut = new_actor(), new_actor()
    forest, credits = cases.batch(1)
    stats = whole.update(pack_trees(forest, credits, token_budget=10**6), None)
    packs = pack_trees(forest, credits, token_budget=24)
    assert sum(pack.inherited for pack in packs) > 0
    again = cut.update(packs, cut.logprobs(packs))
    assert (again.ratio_max, again.kl_old) == (1.0, 0.0)  # inherited keys are the same in both passes
    assert again.loss == pytest.approx(stats.loss, rel=1e-5) and again.grad_norm == pytest.approx(
        stats.grad_norm, rel=1e-5
    )
    assert not context._registered and context.PackContext.current is None
