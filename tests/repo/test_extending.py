"""The package that docs/guides/extending.md builds, taken from the page: installed, found, resolved, trained with."""

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from arpo_megatron.actor.actor import Actor
from arpo_megatron.algorithms.base import LossTokens
from arpo_megatron.algorithms.branching import ForkPoint, make_branch_policy
from arpo_megatron.algorithms.components import make_policy_loss
from arpo_megatron.algorithms.replay import make_replay_buffer
from arpo_megatron.config import OptimizerConfig
from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.rewards import make_reward
from arpo_megatron.rewards.base import Response, ResponseGroup
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.selectors.base import make_task_selector
from arpo_megatron.trainer.batch import build_batches, finish_credit
from tests.actor import cases

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "guides" / "extending.md").read_text()
LISTINGS = re.findall(r"`((?:src/)?[\w/]+\.(?:py|toml))`[^`]*?:\n\n```\w+\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
"""(name, text) of each file that the page shows."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the page's package is installed."""
    target, source = tmp_path_factory.mktemp("installed"), tmp_path_factory.mktemp("source")
    assert len(LISTINGS) == 3
    for path, text in LISTINGS:
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_text(text)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", target]
    subprocess.run([*pip, source], check=True)
    return target


@pytest.fixture
def installed(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(target))


def test_page_shows_signatures_of_protocols() -> None:
    (block,) = re.findall(r"```python protocols\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    modules = dict(re.findall(r"class (\w+)\(Protocol\):  # ([\w.]+)", block))
    for shown in ast.parse(block).body:
        assert isinstance(shown, ast.ClassDef)
        protocol = getattr(importlib.import_module(modules[shown.name]), shown.name)
        methods = {each.name: each for each in shown.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
        own = {
            name for name, value in vars(protocol).items() if isinstance(value, property) or inspect.isfunction(value)
        }
        assert set(methods) == {name for name in own if not name.startswith("_") or name == "__call__"}, shown.name
        for name, method in methods.items():
            found = vars(protocol)[name]
            assert isinstance(found, property) is bool(method.decorator_list)
            signature = inspect.signature(found.fget if isinstance(found, property) else found)
            assert [each.arg for each in method.args.args] == list(signature.parameters)


def test_preset_is_unknown_without_its_package() -> None:
    with pytest.raises(UserError, match="unknown preset 'median'"):
        resolve.resolve("quickstart", overrides=["algorithm.name=median"])


@pytest.mark.usefixtures("installed", "one_rank")
def test_installed_method_trains() -> None:
    algorithm = resolve.resolve("quickstart", overrides=["algorithm.name=median", "algorithm.minibatches=2"]).algorithm
    assert (algorithm.branching, algorithm.advantage, algorithm.params) == ("arpo", "median", {"median_scale": 0.5})
    with pytest.raises(UserError, match="median_scale must be positive"):
        resolve.resolve("quickstart", overrides=["algorithm.name=median", "algorithm.params.median_scale=0"])

    rng = np.random.default_rng(0)
    forest = [cases.grown(number) for number in range(4)]
    rewards = [rng.integers(0, 3, len(tree.leaves())).astype(float) for tree in forest]
    scored = [
        ScoredTree(Task(tree.task_id, (), "1", "math", ""), tree, own, own, own > 0)
        for tree, own in zip(forest, rewards, strict=True)
    ]
    actor = Actor(
        cases.job(algorithm=algorithm), cases.QWEN3, None, optimizer=OptimizerConfig(lr=1e-3), total_updates=2
    )
    batches = build_batches(scored, actor.config, actor.spec)
    assert len(batches) == 2
    every = [found for batch in batches for found in batch.advantages]
    for found, given in zip(every, rewards, strict=True):
        np.testing.assert_allclose(found, (given - np.median(given)) / 0.5)
    old = [actor.policy_outputs(batch.packs) for batch in batches]
    for number, (batch, scores) in enumerate(zip(batches, old, strict=True)):
        ready = finish_credit(actor, batch, scores.logprobs, actor.config, on_policy=number == 0)
        stats = actor.update(ready.packs, ready.old_logprobs, ready.loss)
        assert not stats.skipped and stats.grad_norm > 0
        assert (stats.ratio_max == 1.0) is (number == 0)


@pytest.mark.usefixtures("installed")
def test_installed_component_of_each_other_kind_works() -> None:
    overrides = ["algorithm.selector=failed_first", "algorithm.branching=first_result", "algorithm.loss=plain"]
    overrides += ["algorithm.replay=last_success", "reward.kind=last_number"]
    job = resolve.resolve(
        "quickstart", overrides=[*overrides, "reward.terms={brief: 0.5}", "reward.params.number_reward=2"]
    )
    reward = make_reward(job.reward, max_response_tokens=100)
    tasks = [Task(f"t{number}", (), "5", "math", "") for number in range(6)]
    found = reward.score_group(ResponseGroup(tasks[0], [Response("4, so 5", 60), Response("5, so 4", 50)]))
    assert [(score.reward, score.accuracy) for score in found] == [(2.0, 1.0), (0.5, 0.0)]

    selector, resumed = (make_task_selector(job.algorithm, tasks, seed=3) for _ in range(2))
    for task in selector.next_batch(3):
        selector.record_result(task.id, [0.0, 1.0 if task.id == "t0" else 0.0])
    resumed.load_state_dict(json.loads(json.dumps(selector.state_dict())))
    for _ in range(4):
        drawn = [task.id for task in selector.next_batch(4)]
        assert len(set(drawn)) == 4 and drawn == [task.id for task in resumed.next_batch(4)]
    with pytest.raises(UserError, match="only 6 training tasks"):
        selector.next_batch(7)

    policy, none = make_branch_policy(job.algorithm, vocabulary_size=32, seed=3), np.zeros(0, np.float32)
    forks = [policy.decide(ForkPoint("t0", 0, path, none, none, none, budget=1)).siblings for path in [(0, 0, 0), (0,)]]
    assert forks == [1, 0] and policy.total == job.algorithm.group_size

    store, other = make_replay_buffer(job.algorithm), make_replay_buffer(job.algorithm)
    assert store is not None and other is not None
    tree = cases.grown(1)
    leaves = len(tree.leaves())

    def scored(accuracy: float) -> ScoredTree:
        values = np.full(leaves, accuracy)
        return ScoredTree(tasks[0], tree, values, values, values >= 0)

    assert store.mix(scored(1.0), 0).replayed == 0
    other.restore(store.snapshot()())
    assert [each.mix(scored(0.0), 1).replayed for each in (store, other)] == [1, 1]
    assert other.metrics() == {"replay/trees": 1, "replay/stored": 1}

    ones = torch.ones(2)
    factors = make_policy_loss(job.algorithm).factors(LossTokens(-ones, ones, ones, ones, -ones, ones))
    assert factors.gain.tolist() == factors.cost.tolist() == [-1.0, -1.0]
