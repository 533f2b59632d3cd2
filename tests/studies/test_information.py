"""Information per call: derivatives along u, the gradient of a tree, and the figure on a problem with a known value."""

import itertools
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from arpo_megatron.algorithms.advantages.group import group_advantages
from arpo_megatron.algorithms.credit import tree_credits
from arpo_megatron.errors import UserError
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.studies.information import report
from arpo_megatron.studies.information.directional import DirectionalModel
from arpo_megatron.studies.information.report import figures, ratio, trees_needed
from arpo_megatron.studies.information.samples import CREDITS, TreeSample
from arpo_megatron.studies.information.sampling import ARMS, SamplingPlan, _Sampler, read_direction, read_samples
from arpo_megatron.tasks.base import Task
from arpo_megatron.tree import BranchRecord, Role, RolloutTree
from tests.models import tiny_models


def forked_tree(rng: np.random.Generator) -> RolloutTree:
    """Two trajectories with a shared call, one on its own, and one without a call; two begin alike."""
    tree = RolloutTree("task", [3, 4, 5])
    asks = tree.add(0, Role.MODEL, [7, 8, 9])
    told = tree.add(asks, Role.TOOL, rng.integers(2, tiny_models.VOCABULARY, 4))
    for _ in range(2):
        tree.add(told, Role.MODEL, rng.integers(2, tiny_models.VOCABULARY, 3))
    alone = tree.add(tree.add(0, Role.MODEL, [7, 8, 6]), Role.TOOL, [11, 12])
    tree.add(alone, Role.MODEL, [13])
    tree.add(0, Role.MODEL, rng.integers(2, tiny_models.VOCABULARY, 5))
    return tree


def sample_of(tree: RolloutTree, rewards: list[float], derivatives: np.ndarray) -> TreeSample:
    return TreeSample.of(tree, np.array(rewards), derivatives)


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3"])
def test_derivatives_are_those_of_flattened_trajectories(tmp_path: Path, case: str) -> None:
    """By autograd, one padding-free forward pass per trajectory."""
    flat = tiny_models.make(tmp_path, case).double()
    rng = np.random.default_rng(1)
    trees, model = [forked_tree(rng) for _ in range(2)], DirectionalModel(tmp_path, temperature=0.7)
    direction = torch.from_numpy(rng.normal(0, 1, sum(p.numel() for p in model.parameters)))
    direction /= direction.norm()
    for tree, found in zip(trees, model.derivatives(trees, direction), strict=True):
        expected = np.zeros(len(tree.segments))
        for leaf in tree.leaves():
            path = tree.trajectory(leaf)
            ids = torch.from_numpy(path.token_ids.astype(np.int64))
            logprobs = (flat(ids[None]).logits[0, :-1] / 0.7).log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            for segment in tree.path(leaf):
                if tree.segments[segment].role is Role.MODEL:
                    flat.zero_grad()
                    logprobs[torch.from_numpy(path.segment_of_token[1:] == segment)].sum().backward(retain_graph=True)
                    gradient = torch.cat([p.grad.reshape(-1) for p in flat.parameters()])
                    expected[segment] = float(gradient @ direction)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3 * np.abs(expected).max())


def test_gradient_of_a_direction_is_the_sum_of_its_derivatives(tmp_path: Path) -> None:
    """The g of `add_gradient`, which makes u, is the g whose product with u the study measures."""
    tiny_models.make(tmp_path, "qwen3")
    rng = np.random.default_rng(2)
    tree, rewards, model = forked_tree(rng), [1.0, 0.0, 0.0, 1.0], DirectionalModel(tmp_path)
    model.add_gradient(tree, np.array(rewards))
    gradient = model.take_gradient()
    direction = torch.from_numpy(rng.normal(0, 1, len(gradient)))
    direction /= direction.norm()
    (derivatives,) = model.derivatives([tree], direction)
    ((value, _),) = sample_of(tree, rewards, derivatives).gradients("token-mean")
    assert value == pytest.approx(float(gradient @ direction), abs=2e-3 * np.abs(derivatives).max())
    assert float(model.take_gradient().abs().max()) == 0.0


@pytest.mark.parametrize("credit", CREDITS)
def test_credit_is_that_of_training(credit: str) -> None:
    """Training's coefficients of a batch of one tree, without the 1 / tokens that `token-mean` leaves out."""
    rng = np.random.default_rng(3)
    tree, rewards = forked_tree(rng), [1.0, 0.0, 0.0, 1.0]
    aggregation, _, shared = credit.partition(", ")
    (trained,) = tree_credits(
        [tree], [group_advantages(rewards)], aggregation=aggregation, shared_advantage=shared or "hard"
    )
    coefficients = trained.positive.astype(np.float64) + trained.negative
    starts = np.cumsum([0, *(len(segment) for segment in tree.segments)])
    derivatives = np.where([s.role is Role.MODEL for s in tree.segments], rng.normal(0, 1, len(tree.segments)), 0)
    expected = sum(coefficients[starts[n]] * d for n, d in enumerate(derivatives))
    scale = (
        sum(
            sum(len(tree.segments[s]) for s in tree.path(leaf) if tree.segments[s].role is Role.MODEL)
            for leaf in tree.leaves()
        )
        / 4
        if credit == "token-mean"
        else 1.0
    )
    ((value, calls),) = sample_of(tree, rewards, derivatives).gradients(credit)
    assert value == pytest.approx(float(expected) * scale, rel=1e-6)
    assert calls == 2


def choices(rewards: tuple[int, ...]) -> TreeSample:
    """Independent trajectories of a policy with one parameter t, P(right) = 1 / (1 + exp(-t)) at t = 0, a call each.

    d log P / dt is +1/2 for a right and -1/2 for a wrong choice.
    """
    leaves = [3 * number + 3 for number in range(len(rewards))]
    shape = [(0, 1, 0, 0.0), (None, 0, 1, 0.0), (None, 1, 0, None)]
    rows = [(-1, 0, 0, 0.0)]
    for number, right in enumerate(rewards):
        for place, (parent, tokens, calls, derivative) in enumerate(shape):
            above = 3 * number + place if parent is None else parent
            rows.append((above, tokens, calls, right - 0.5 if derivative is None else derivative))
    parents, tokens, calls, derivatives = (list(column) for column in zip(*rows, strict=True))
    return TreeSample("task", parents, tokens, calls, derivatives, leaves, [float(r) for r in rewards], [])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_estimate_over_all_outcomes_is_the_exact_information(size: int) -> None:
    """At t = 0 all outcomes are equally likely, so their list is a sample whose moments are exact."""
    outcomes = list(itertools.product((0, 1), repeat=size))
    exact = []  # g.u = mean of A_i (r_i - 1/2), with A of the group
    for rewards in outcomes:
        deviation = np.std(rewards, ddof=1)
        exact.append(0.0 if deviation == 0 else np.mean((rewards - np.mean(rewards)) ** 2) / (deviation + 1e-6))
    expected = np.mean(exact) ** 2 / np.var(exact) / size
    found = figures([choices(rewards).gradients("token-mean") for rewards in outcomes])
    assert found.information == pytest.approx(expected, rel=1e-12)
    assert (found.calls, found.trees) == (size, len(outcomes))
    # The same from the parts of larger groups, each of which is a uniform sample again.
    larger = itertools.product((0, 1), repeat=2 * size)
    parts = figures([choices(rewards).gradients("token-mean", size) for rewards in larger])
    assert parts.information == pytest.approx(expected, rel=1e-12)


def test_interval_of_a_ratio_covers_the_exact_one_and_the_needed_trees_shrink_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """40 studies of 200 trees: M 4 against M 2 on the problem above; the exact ratio comes from all outcomes."""
    groups = {
        size: [choices(rewards).gradients("token-mean") for rewards in itertools.product((0, 1), repeat=size)]
        for size in (2, 4)
    }
    exact = ratio(*(figures(groups[size]) for size in (4, 2)))[0]
    rng, covered, needed = np.random.default_rng(5), 0, []
    for study in range(40):
        drawn = {size: [own[index] for index in rng.integers(0, len(own), 200)] for size, own in groups.items()}
        arm, control = (figures(drawn[size], seed=2 * study + number) for number, size in enumerate((4, 2)))
        _, low, high = ratio(arm, control)
        covered += low <= exact <= high
        needed.append(trees_needed(arm, control))
    assert covered >= 34  # of 40 at a nominal 95 %: 33 or fewer have a chance of 0.3 %
    # With that many trees the standard error of the log-ratio is log(2) / 3.24.
    count = round(np.median(needed))
    monkeypatch.setattr(report, "RESAMPLES", 1)  # of the figures below only the estimate is used
    logs = []
    for _ in range(100):
        values = []
        for own in groups.values():
            values.append(figures([own[index] for index in rng.integers(0, len(own), count)]).information)
        logs.append(math.log(values[1] / values[0]))
    assert np.std(logs) == pytest.approx(math.log(2) / 3.242, rel=0.25)


def test_page_names_arms_with_trees_and_a_study_without_grpo_is_a_user_error(tmp_path: Path) -> None:
    study = tmp_path / "policy"
    study.mkdir()
    np.savez(study / "direction.npz", first=np.array([1.0, 0.0]), second=np.array([1.0, 1.0]), trees=7)
    (study / "study.json").write_text('{"command": "`command`"}')
    with pytest.raises(UserError, match="fewer than 16 trees of grpo"):
        report.render([study], "made by hand")
    rows = [choices((1, 0) * 8), choices((1, 1, 1, 0) * 4), choices((0,) * 16)] * 8
    for arm in ("grpo", "arpo"):
        (study / f"{arm}.jsonl").write_text("".join(row.line() + "\n" for row in rows))
    page = report.render([study], "made by hand")
    assert "The reference has 7 trees; the cosine of its two halves is 0.71. 0 trees could not be finished." in page
    assert "| grpo, M 4 | 24 | 4.0 |" in page
    assert "| arpo | 24 | 16.0 |" in page


def test_study_without_a_policy_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.path"):
        SamplingPlan.create("trails", [], tmp_path)


class FakeServices:
    """Rollouts, scorer and model at once: grows a tree per task, except of one task, and notes what it grew.

    calls: of `grow_trees`, after which it is interrupted.
    """

    def __init__(self, calls: float) -> None:
        self.calls = calls
        self.grown: list[tuple[str, int]] = []
        self.rates: list[float | None] = []
        self.parameters = [torch.zeros(3)]

    def grow_trees(self, tasks: list[Task], *, step: int, settings: Any, **_others: Any) -> Any:
        if not self.calls:
            raise KeyboardInterrupt
        self.calls -= 1
        self.grown += [(task.id, step) for task in tasks]
        self.rates.append(settings.branching.params.get("fork_rate"))
        trees = []
        for task in tasks:
            tree = RolloutTree(task.id, [1], step=step)
            record = BranchRecord(dH=0.0, probability=0.25, draw=0.5, why="draw")
            tree.add(0, Role.MODEL, [2], branch=record if settings.branching.branching == "arpo" else None)
            trees.append(tree)
        failed = [SimpleNamespace(reason="no answer") for tree in trees if tree.task_id == "3"]
        return SimpleNamespace(trees=[tree for tree in trees if tree.task_id != "3"], failed=failed)

    def score(self, trees: list[RolloutTree], tasks: list[Task], *, step: int) -> list[ScoredTree]:
        assert [tree.task_id for tree in trees] == [task.id for task in tasks]
        ones = np.ones(1)
        return [ScoredTree(task, tree, ones, ones, ones > 0) for tree, task in zip(trees, tasks, strict=True)]

    def add_gradient(self, _tree: RolloutTree, rewards: np.ndarray) -> None:
        self.gradient = torch.from_numpy(rewards).repeat(3)

    def take_gradient(self) -> torch.Tensor:
        return self.gradient

    def derivatives(self, trees: list[RolloutTree], _direction: torch.Tensor) -> list[np.ndarray]:
        return [np.zeros(len(tree.segments)) for tree in trees]


def test_interrupted_sampling_continues_and_no_tree_has_the_draws_of_another(tmp_path: Path) -> None:
    """20 trees of each arm and 10 of the reference; the first call is interrupted. Draws depend on task and step."""
    tasks = [Task(str(number), (), "answer", "qa", "prompt") for number in range(30)]
    grown, rates = [], []
    for calls, interrupted in ((4, pytest.raises(KeyboardInterrupt)), (math.inf, nullcontext())):
        services: Any = FakeServices(calls)
        plan = SamplingPlan.create("trails", [f"model.path={tmp_path}"], tmp_path)
        sampler = _Sampler(plan, services, services, services, tasks, lambda: None, lambda _text: None)
        sampler.find_direction(10)
        with interrupted:
            sampler.grow_arms(20)
        grown += services.grown
        rates += services.rates
    assert len(set(grown)) == len(grown) == 10 + 20 * len(ARMS)
    reference, arms = ({task for task, step in grown if (step == len(ARMS)) == is_reference} for is_reference in (1, 0))
    assert (len(reference), len(arms)) == (10, 20)
    assert not reference & arms
    assert {rate for rate in rates if rate is not None} == {0.25}, "random forks at the mean chance of arpo's points"
    for arm in ARMS:
        found, failed = read_samples(plan.samples(arm))
        assert ([sample.task for sample in found], failed) == ([str(n) for n in range(20) if n != 3], 1)
    (first, second), count = read_direction(plan.direction)
    assert (first.tolist(), second.tolist(), count) == ([5.0] * 3, [5.0] * 3, 10)
