"""The reference policy of the KL penalty: its log-probs, and when a step swaps it in."""

from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import torch

from arpo_megatron.actor.actor import Actor
from arpo_megatron.actor.reference import ReferencePolicy
from arpo_megatron.actor.warm_up import AttentionKernels
from arpo_megatron.config import AlgorithmConfig, OptimizerConfig, TrainConfig
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.monitor.events import EventLog
from arpo_megatron.monitor.profiler import StepProfiler
from arpo_megatron.packing.packs import pack_trees
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.tasks.base import Task
from arpo_megatron.train import train
from arpo_megatron.trainer.run import TrainingRun
from arpo_megatron.trainer.setup import ActorSession
from tests.actor import cases

pytestmark = pytest.mark.usefixtures("one_rank")

STEPS, MINIBATCHES = 2, 2


def new_actor(**algorithm) -> Actor:
    torch.manual_seed(1)
    job = cases.job(
        algorithm=AlgorithmConfig(minibatches=MINIBATCHES, **algorithm),
        train=TrainConfig(steps=STEPS, tasks_per_step=4, token_budget=4096),
    )
    optimizer = OptimizerConfig(lr=1e-2, schedule="constant")
    keep = job.algorithm.kl_coefficient > 0
    return Actor(job, cases.QWEN3, None, optimizer=optimizer, total_updates=10, keep_reference=keep)


def packs_of(seed: int):
    return pack_trees(*cases.batch(seed), token_budget=120)


def weights(actor: Actor) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in actor.model.named_parameters()}


class Steps(TrainingRun):
    """A training run without engine and checkpoints: trees are given, and the results of the updates are kept."""

    def __init__(self, actor: Actor, directory: RunDirectory) -> None:
        session = ActorSession(
            config=actor.config,
            directory=directory,
            phase="train",
            start=directory.path,
            actor=actor,
            checkpoints=None,
            events=EventLog(directory.events, enabled=False),
            metrics=None,
            profiler=StepProfiler(None, directory.path),
            closing=ExitStack(),
            kernels=AttentionKernels.of(actor.config, actor.spec),
        )
        super().__init__(session, sync=None, controller=None, held_out=())
        self.current, self.updates = "", []

    @contextmanager
    def phase(self, name):
        self.current = name
        yield
        self.current = ""

    def rollout(self):
        return [scored(seed) for seed in range(4)]

    def end_step(self, trees, batches, old_logprobs, updates):
        self.state.step += 1
        self.updates.append(updates)

    def save_if_due(self):
        pass

    def stop_if_asked(self):
        pass

    def push_weights(self, version):
        pass

    def evaluate(self):
        pass

    def export(self):
        pass


def scored(seed: int) -> ScoredTree:
    tree = cases.grown(seed)
    rewards = np.random.default_rng(seed).random(len(tree.leaves()))
    return ScoredTree(Task("task", (), "1", "math", "?"), tree, rewards, rewards, rewards >= 0)


def test_step_swaps_the_reference_in_once_before_its_updates(tmp_path, monkeypatch):
    run = Steps(new_actor(kl_coefficient=0.1), RunDirectory(tmp_path))
    swap_in, seen = ReferencePolicy.swap_in, []

    def watched(policy):
        seen.append(run.current)
        return swap_in(policy)

    monkeypatch.setattr(ReferencePolicy, "swap_in", watched)
    train(run)
    assert seen == ["logprobs"] * STEPS
    assert [len(updates) for updates in run.updates] == [MINIBATCHES] * STEPS
    first, *later = [update for updates in run.updates for update in updates]
    # Before any update the policy is the reference, to the bit: the same packs go through the same kernels.
    assert (first.kl_reference, first.ratio_max, first.kl_old) == (0.0, 1.0, 0.0)
    assert all(update.kl_reference > 0 for update in later)


def test_reference_is_the_first_policy_and_changes_nothing():
    actor = new_actor(kl_coefficient=0.1)
    packs = packs_of(0)
    first = actor.logprobs(packs)
    for seed in range(2):
        actor.update(packs_of(seed), None)
    before = weights(actor)
    for now, then in zip(actor.reference_logprobs([packs])[0], first, strict=True):
        assert np.array_equal(now, then)
    assert all(torch.equal(now, before[name]) for name, now in weights(actor).items())
    with pytest.raises(RuntimeError, match="stop"), actor._reference.swap_in():
        raise RuntimeError("stop")
    assert all(torch.equal(now, before[name]) for name, now in weights(actor).items())
    assert new_actor().reference_logprobs([packs]) is None
    forgotten = Actor(actor.config, cases.QWEN3, None, optimizer=OptimizerConfig(), total_updates=1)
    with pytest.raises(RuntimeError, match="keep_reference=True"):
        forgotten.reference_logprobs([packs])


def test_kl_penalty_keeps_the_policy_near_the_reference():
    distances = {}
    for coefficient in (0.0, 10.0):
        actor = new_actor(kl_coefficient=coefficient)
        packs = packs_of(0)
        first = actor.logprobs(packs)
        for _ in range(6):
            stats = actor.update(packs, first, reference_logprobs=first)
        assert stats.kl_reference > 0 and (stats.loss_kl > 0) == (coefficient > 0)
        after = actor.logprobs(packs)
        distances[coefficient] = sum(float(np.square(a - b).sum()) for a, b in zip(after, first, strict=True))
    assert distances[10.0] < 0.5 * distances[0.0]
