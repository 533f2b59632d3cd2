"""Router replay: routes of a pack choose the experts; weights, gradients and load follow."""

import numpy as np
import pytest
import torch

from arpo_megatron.actor.actor import Actor
from arpo_megatron.actor.model import build_model
from arpo_megatron.actor.moe_router import begin_pass, finish_pass
from arpo_megatron.config import AlgorithmConfig, OptimizerConfig, ParallelConfig
from arpo_megatron.packing.layout import join_packs, lay_out
from arpo_megatron.packing.packs import pack_trees
from arpo_megatron.tree import RolloutTree
from tests.actor import cases, reference
from tests.actor.cases import QWEN3_MOE
from tests.actor.test_experts import CLIP, WEIGHT, assert_same, evaluate, ppo

pytestmark = pytest.mark.usefixtures("one_rank")
SHAPE = (QWEN3_MOE.layers, QWEN3_MOE.experts.top_k)


def built(dtype: str, **layout):
    torch.manual_seed(3)
    model = build_model(QWEN3_MOE, ParallelConfig(**layout), dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def own_routes(model, tree: RolloutTree) -> list[np.ndarray]:
    """Return the choices of the model's float64 reference for each segment of a tree, shuffled."""
    parameters = {name: p.detach().double() for name, p in model.named_parameters()}
    rng = np.random.default_rng(0)
    found = [np.zeros((len(segment), *SHAPE), np.int16) for segment in tree.segments]
    for leaf in tree.leaves():
        ids = torch.from_numpy(tree.trajectory(leaf).token_ids).long()
        layers: list = []
        reference.logits(parameters, ids, QWEN3_MOE, layers)
        chosen = rng.permuted(np.stack([choice.numpy() for _, choice in layers], axis=1), axis=-1)
        ends = np.cumsum([len(tree.segments[index]) for index in tree.path(leaf)])
        for index, end in zip(tree.path(leaf), ends, strict=True):
            found[index][:] = chosen[end - len(found[index]) : end]
    return found


def packings(forest: list[RolloutTree], advantages: list[np.ndarray]) -> dict:
    credits = [cases.plain_credit(t, a, WEIGHT) for t, a in zip(forest, advantages, strict=True)]
    return {
        "one pack": pack_trees(forest, credits, token_budget=10**6),
        "cut, ancestors inherited": pack_trees(forest, credits, token_budget=16),
        "cut, ancestors repeated": pack_trees(forest, credits, token_budget=24, inherit=False),
    }


def forest_of(count: int = 3) -> tuple[list[RolloutTree], list[np.ndarray]]:
    forest = [cases.grown(seed) for seed in range(count)]
    return forest, [cases.dyadic_advantages(tree, index) for index, tree in enumerate(forest)]


def figures(model, packs):
    begin_pass([model], float(sum(int(pack.multiplicity.sum()) for pack in packs)))
    loss, gradients = cases.backward(model, packs, ppo)
    return loss, gradients, finish_pass([model], keep_load=False)


def test_replay_of_the_routers_own_routes_changes_no_bit():
    model = built("float32")
    forest, advantages = forest_of()
    replayed = [cases.routed(tree, own_routes(model, tree)) for tree in forest]
    for name, packs in packings(forest, advantages).items():
        loss, gradients, free = figures(model, packs)
        again, same, forced = figures(model, packings(replayed, advantages)[name])
        assert torch.equal(loss, again), name
        assert all(torch.equal(gradient, same[key]) for key, gradient in gradients.items()), name
        assert (free.replayed, free.differing, forced.replayed, forced.differing) == pytest.approx((0, 0, 1, 0))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_replayed_routes_give_the_reference_loss_and_gradients(recompute):
    model = built("float64", recompute=recompute)
    forest, advantages = forest_of()
    routes = [cases.other_routes(tree, seed) for seed, tree in enumerate(forest)]
    replayed = [cases.routed(tree, known) for tree, known in zip(forest, routes, strict=True)]
    parameters = dict(model.named_parameters())
    flat = sum(
        reference.flat_ppo(parameters, t, a, WEIGHT, QWEN3_MOE, **CLIP, routes=known)
        for t, a, known in zip(forest, advantages, routes, strict=True)
    )
    expected = evaluate(flat, model)
    unforced = cases.backward(model, packings(forest, advantages)["one pack"], ppo)[0]
    assert (unforced - expected[0]).abs() > 1e-4  # the routes do matter
    for name, packs in packings(replayed, advantages).items():
        loss, gradients, balance = figures(model, packs)
        torch.testing.assert_close(loss, expected[0], rtol=1e-10, atol=1e-10, msg=name)
        assert_same(gradients, expected[1])
        # Two of six experts at random: a third of them by chance.
        assert 0.7 < balance.replayed < 0.9
        assert 0.5 < balance.differing < 0.8


def test_shared_prompt_takes_the_routes_of_the_first_tree():
    forest, advantages = forest_of(2)
    prompt = np.arange(20) % cases.VOCABULARY
    alike = []
    for tree in forest:
        longer = RolloutTree(tree.task_id, np.concatenate([prompt, tree.prompt_ids]))
        for segment in tree.segments[1:]:
            longer.add(segment.parent, segment.role, segment.token_ids, logprobs=segment.logprobs)
        alike.append(longer)
    first = cases.routed(alike[0], cases.other_routes(alike[0]))
    credits = [cases.plain_credit(t, a, WEIGHT) for t, a in zip(alike, advantages, strict=True)]
    pack = join_packs([lay_out(i, tree, credits[i]) for i, tree in enumerate([first, alike[1]])], len(prompt))
    assert len(pack) == sum(tree.unique_tokens for tree in alike) - len(prompt)
    assert pack.routes.shape == (len(pack), *SHAPE)
    assert (pack.routes[: len(prompt)] == first.segments[0].routes[: len(prompt)]).all()
    assert (pack.routes[first.unique_tokens :] == -1).all()


def test_replay_keeps_ratios_at_one_and_skips_the_reference_policy():
    job = cases.job(algorithm=AlgorithmConfig(kl_coefficient=0.1))
    torch.manual_seed(7)
    actor = Actor(job, QWEN3_MOE, None, optimizer=OptimizerConfig(lr=1e-3), total_updates=2, keep_reference=True)
    forest, advantages = forest_of()
    free = packings(forest, advantages)["one pack"]
    forced = packings([cases.routed(tree, cases.other_routes(tree)) for tree in forest], advantages)["one pack"]
    old, own = actor.logprobs(forced), actor.logprobs(free)
    assert not np.array_equal(old[0], own[0])
    [[given]] = actor.reference_logprobs([forced])
    assert np.array_equal(given, own[0])
    stats = actor.update(forced, old, reference_logprobs=[given])
    assert (stats.ratio_max, stats.kl_old) == (1.0, 0.0)
    assert 0.7 < stats.routes_replayed < 0.9


def test_routes_of_another_model_are_refused():
    forest, advantages = forest_of(1)
    routes = [np.zeros((len(segment), SHAPE[0] + 1, 1), np.int16) for segment in forest[0].segments]
    packs = packings([cases.routed(forest[0], routes)], advantages)["one pack"]
    with pytest.raises(ValueError, match="routes of 3 layers and 1 experts a token for a model of 2 and 2"):
        figures(built("float32"), packs)
