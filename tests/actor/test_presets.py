"""Every preset resolves on a recipe, and its components train a model together."""

from dataclasses import replace

import numpy as np
import pytest

from arpo_megatron.actor.actor import Actor
from arpo_megatron.algorithms.base import TrainingProgress
from arpo_megatron.algorithms.replay import make_replay_buffer
from arpo_megatron.algorithms.replay.base import AddsTrees
from arpo_megatron.config import OptimizerConfig
from arpo_megatron.jobs import resolve
from arpo_megatron.packing.layout import TreePack
from arpo_megatron.registry import BUILTIN, ExtensionPoint
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.tasks.base import Task
from arpo_megatron.trainer.batch import build_batches, counterfactual_advantages, finish_credit, step_outputs
from arpo_megatron.trainer.collector import interleave
from tests.actor import cases


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", BUILTIN[ExtensionPoint.PRESET])
def test_preset_trains(name: str) -> None:
    """Two updates, with stored trees where the method has some; the second one's ratios are not 1."""
    full = {"spear_partial": ["algorithm.params.imitation_capacity=2"]}
    overrides = [f"algorithm.name={name}", "algorithm.minibatches=2", *full.get(name, [])]
    found = resolve.resolve("quickstart", overrides=overrides)
    config = cases.job(algorithm=found.algorithm)
    forest = [cases.grown(number) for number in range(4)]
    rewards = [
        np.random.default_rng(number).permutation(np.arange(len(tree.leaves())) % 2 * 2.0 - 1)
        for number, tree in enumerate(forest)
    ]
    scored = [
        ScoredTree(Task(tree.task_id, (), "1", "math", ""), tree, own, np.maximum(own, 0.0), own > 0)
        for tree, own in zip(forest, rewards, strict=True)
    ]
    store = make_replay_buffer(found.algorithm)
    if isinstance(store, AddsTrees):
        scored = [store.mix(item, 0) for item in scored]
        if name != "spear_partial":  # whose weight is 0 in step 0, where a full buffer goes all the same
            store.extra_trees(4, 0)
        stored = store.extra_trees(4, 2)
        assert stored
        scored = interleave(scored, stored)
    actor = Actor(config, cases.QWEN3, None, optimizer=OptimizerConfig(lr=1e-3), total_updates=2)
    prepared: list[TreePack] = []
    estimates = counterfactual_advantages(actor, scored, config, lambda: [1, 2], prepared.extend)
    assert (estimates is not None) is bool(prepared) is (name == "infopo")
    batches = build_batches(scored, config, actor.spec, estimates)
    old = step_outputs(actor, batches, config)
    for number, (batch, scores) in enumerate(zip(batches, old, strict=True)):
        actor.progress = TrainingProgress(number, 2, 0.5 if number else None)
        ready = finish_credit(
            actor,
            batch,
            scores.logprobs,
            config,
            on_policy=number == 0,
            entropies=scores.entropies,
            tempered_logprobs=scores.tempered_logprobs,
        )
        stats = replace(actor.update(ready.packs, ready.old_logprobs, ready.loss), **ready.statistics)
        assert not stats.skipped and stats.grad_norm > 0
        assert (stats.ratio_max == 1.0) is (number == 0)
