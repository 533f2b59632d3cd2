"""Failed tool calls: what leaves the tree, and the expected gradient, enumerated in float64.

The grower and the estimators are the real ones. The policy has three choices; an engine in this process takes them, and
a tool in this process fails. `enumerate_trees` runs every combination of choices and failures with its probability.
"""

import asyncio
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arpo_megatron.algorithms.advantages.centred import Centred
from arpo_megatron.algorithms.advantages.group import GroupNormalised
from arpo_megatron.algorithms.advantages.lost import pair_weights
from arpo_megatron.algorithms.advantages.rloo import LeaveOneOut
from arpo_megatron.algorithms.base import AdvantageEstimator, Group
from arpo_megatron.algorithms.branching import BranchPolicy, make_branch_policy, path_seed
from arpo_megatron.algorithms.branching.budget import PooledForks
from arpo_megatron.algorithms.credit import TreeShape, leaf_weights
from arpo_megatron.config import AlgorithmConfig
from arpo_megatron.engine.request import EngineFinish, Generation, Sampling
from arpo_megatron.evaluation.journal import Outcome
from arpo_megatron.evaluation.response import AgentResponse, NoResponse, tree_responses
from arpo_megatron.monitor.tree_store import read_trees, write_trees
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.rollout.context import RolloutContext
from arpo_megatron.rollout.grower import TreeGrower
from arpo_megatron.rollout.limits import RolloutLimits
from arpo_megatron.rollout.lost_branches import AllBranchesLostError, AnsweredShares
from arpo_megatron.rollout.record import TreeRecord
from arpo_megatron.rollout.replay_decisions import replay_decisions
from arpo_megatron.rollout.result_cache import ResultCache
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.protocols.tools import ToolDefinition
from arpo_megatron.tasks.tags.calls import find_stop
from arpo_megatron.tasks.tags.protocol import TagProtocol
from arpo_megatron.tree import Role, RolloutTree
from tests.rollout.growing import CODEC, LIMITS, PROMPT, SEED, LocalEngine, arpo, sampled
from tools_sandbox.client import SandboxUnavailable, ToolAnswer

TURNS = (
    {"<python>1</python>": 0.7, "no call": 0.3},
    {"<search>x</search>": 0.4, "yes": 0.6},
    {"yes!": 0.6, "no!": 0.4},
)
"""Texts that the policy may write in its first, second and third turn, with probabilities."""
FAILURES = {"python": 0.1, "search": 0.15}
SHARES = {tool: 1 - chance for tool, chance in FAILURES.items()}
REWARDS = {"no call": 0.2, "yes": 1.0, "yes!": 0.6, "no!": 0.0}
POLICY = arpo(4, 2, k=1, branch_probability=1.0, entropy_weight=0.0, fork_budget="reserved")
POOLED = arpo(4, 2, k=1, branch_probability=0.8, entropy_weight=0.0)
SCARCE = arpo(3, 2, k=1, branch_probability=0.8, entropy_weight=0.0)
"""The pool suffices for the first round of fork points, and does not."""
APART = replace(LIMITS, protocol=TagProtocol((ToolDefinition("python", "code"), ToolDefinition("search", "query"))))
SHARED = replace(APART, deterministic_tools=("python", "search"))
"""Equal calls of a tree are executed each for itself, and once."""

Enumerated = tuple[RolloutTree | None, float, float]
"""A tree, its probability, and that of the same tree if no call could fail (0 if a call has failed)."""


@dataclass
class Choices:
    """Decides by key: as given, else by the first option; `drawn` has every decision of a run in its order."""

    given: Sequence[int] = ()
    rng: random.Random | None = None
    drawn: list[tuple[object, int, list[float]]] = field(default_factory=list)

    def __call__(self, key: object, probabilities: list[float]) -> int:
        for known, option, _ in self.drawn:
            if known == key:
                return option
        if self.rng is not None:
            option = self.rng.choices(range(len(probabilities)), probabilities)[0]
        else:
            option = self.given[len(self.drawn)] if len(self.drawn) < len(self.given) else 0
        self.drawn.append((key, option, probabilities))
        return option

    def next(self) -> list[int] | None:
        """Return what the next run of an enumeration is given."""
        options = [option for _, option, _ in self.drawn]
        while options:
            options[-1] += 1
            if options[-1] < len(self.drawn[len(options) - 1][2]):
                return options
            options.pop()
        return None


@dataclass
class ChoosingEngine(LocalEngine):
    choices: Choices

    async def generate(
        self, input_ids: Any, *, max_new_tokens: int, sampling: Sampling, ready: Any, stop: Sequence[str], **_rest: Any
    ) -> Generation:
        await ready()
        turns = CODEC.decode(input_ids.tolist()).removeprefix(PROMPT).split("</result>")
        options = TURNS[len(turns) - 1]
        text = list(options)[self.choices(sampling.seed, list(options.values()))]
        ids = CODEC.encode(text + "\0")[len(turns[-1]) :][:max_new_tokens]
        matched = find_stop(turns[-1] + CODEC.decode(ids), stop)
        if matched:
            ids = ids[: len(text) - len(turns[-1])]
        ended = bool(ids) and ids[-1] == 0
        finish = EngineFinish.STOP_STRING if matched else EngineFinish.END_TOKEN if ended else EngineFinish.LENGTH
        return sampled(ids, finish, matched, len(input_ids))


@dataclass
class FailingTools:
    choices: Choices
    failures: dict[str, float]
    results: ResultCache = field(default_factory=ResultCache)

    async def call(self, tool: str, _arguments: dict[str, object], *, trajectory_id: str, **_rest: Any) -> ToolAnswer:
        chance = self.failures.get(tool, 0.0)
        if chance and self.choices((tool, trajectory_id), [1 - chance, chance]):
            raise SandboxUnavailable("HTTP 503")
        return ToolAnswer("ok", "ok", 0.0, cached=tool not in self.failures)


def grow_with(
    choices: Choices,
    failures: dict[str, float] = FAILURES,
    policy: BranchPolicy = POLICY,
    limits: RolloutLimits = APART,
    record: Callable[[bytes], None] = lambda _entry: None,
    entries: Sequence[bytes] = (),
    engine_type: type[ChoosingEngine] = ChoosingEngine,
) -> tuple[RolloutTree | None, TreeGrower]:
    """Return a tree, None if all of it is lost, and its grower."""
    engine: Any = engine_type(choices)
    tools: Any = FailingTools(choices, failures)
    context = RolloutContext(engine, tools, CODEC, policy, Sampling(), limits, SEED, 3, lambda _tokens: None)
    prompt = np.array(CODEC.encode(PROMPT), np.int32)
    grower = TreeGrower("task-1", prompt, context, record=record, entries=entries)
    try:
        return asyncio.run(grower.grow()), grower
    except AllBranchesLostError:
        return None, grower


def enumerate_trees(
    policy: BranchPolicy = POLICY, limits: RolloutLimits = APART, failures: dict[str, float] = FAILURES
) -> Iterator[Enumerated]:
    """Yield every tree that can grow."""
    given: list[int] | None = []
    while given is not None:
        choices = Choices(given)
        tree, _ = grow_with(choices, failures, policy, limits)
        failed = [option for key, option, _ in choices.drawn if isinstance(key, tuple)]
        sampled = math.prod(chances[option] for key, option, chances in choices.drawn if not isinstance(key, tuple))
        yield tree, math.prod(chances[option] for _, option, chances in choices.drawn), 0.0 if any(failed) else sampled
        given = choices.next()


def turns_of(tree: RolloutTree, leaf: int) -> list[str]:
    own = [tree.segments[index] for index in tree.path(leaf) if tree.segments[index].role is Role.MODEL]
    return [CODEC.decode(segment.token_ids.tolist()).removesuffix("\0") for segment in own]


def rewards_of(tree: RolloutTree) -> np.ndarray:
    return np.array([REWARDS[turns_of(tree, leaf)[-1]] for leaf in tree.leaves()])


def gradient(tree: RolloutTree | None, advantages: np.ndarray) -> np.ndarray:
    """Return sum_i w_i A_i d log p(trajectory i) / d logits, with sequence-mean weights."""
    parts = [np.zeros(len(options)) for options in TURNS]
    if tree is not None:
        (weights,) = leaf_weights([TreeShape(tree)], "sequence-mean")
        for leaf, scale in zip(tree.leaves(), weights * advantages, strict=True):
            for place, text in enumerate(turns_of(tree, leaf)):
                chosen = np.array([option == text for option in TURNS[place]], float)
                parts[place] += scale * (chosen - np.array(list(TURNS[place].values())))
    return np.concatenate(parts)


@pytest.fixture(scope="module")
def all_trees() -> list[Enumerated]:
    return list(enumerate_trees())


def expected(trees: Sequence[Enumerated], advantages: Callable[[RolloutTree], np.ndarray]) -> np.ndarray:
    return sum(p * gradient(tree, advantages(tree) if tree is not None else np.zeros(0)) for tree, p, _ in trees)


def without_failures(trees: Sequence[Enumerated]) -> list[Enumerated]:
    """Return the distribution of trees without failed calls: their sampling does not depend on failures."""
    return [(tree, intact, intact) for tree, _, intact in trees if intact]


def survivors(tree: RolloutTree) -> np.ndarray:
    rewards = rewards_of(tree)
    return rewards - rewards.mean()


def normalised_survivors(tree: RolloutTree) -> np.ndarray:
    rewards = rewards_of(tree)
    return survivors(tree) / (rewards.std(ddof=1) + 1e-6) if len(rewards) > 1 else np.zeros(1)


def by(estimator: AdvantageEstimator, shares: dict[str, float] | None = None) -> Callable[[RolloutTree], np.ndarray]:
    """Return the advantages of a tree, given the shares of answered calls."""

    def advantages(tree: RolloutTree) -> np.ndarray:
        tree.answered_shares = shares or {}
        return estimator([group(tree)])[0]

    return advantages


def group(tree: RolloutTree) -> Group:
    rewards = rewards_of(tree)
    return Group(tree, rewards, rewards)


def test_expected_gradient_does_not_depend_on_failures(all_trees: list[Any]) -> None:
    assert sum(tree is not None and tree.lost is not None for tree, _, _ in all_trees) > 300
    check_expected_gradient(all_trees, planned=4)


@pytest.mark.parametrize(
    ("policy", "failures"), [(POLICY, FAILURES), (POOLED, FAILURES), (POLICY, {"python": 0.1})], ids=[*"ab", "known"]
)
def test_expected_gradient_does_not_depend_on_failures_of_shared_calls(
    policy: BranchPolicy, failures: dict[str, float]
) -> None:
    """Equal calls fail together; a search whose result is known before the tree cannot fail."""
    trees = list(enumerate_trees(policy, SHARED, failures))
    check_expected_gradient(trees, planned=4)
    same = {(call, first) for tree, _, _ in trees if tree is not None for call, first in tree.grown.same_calls.items()}
    assert any(first >= 0 for _, first in same) and any(first < 0 for _, first in same) == (failures != FAILURES)
    for tree, _, _ in trees:  # as if each call failed for itself
        if tree is not None:
            tree.grown.same_calls = {}
    with pytest.raises(AssertionError):
        check_expected_gradient(trees, planned=4)


@pytest.mark.parametrize("policy", [POOLED, SCARCE])
def test_expected_gradient_of_pooled_forks_does_not_depend_on_failures(policy: BranchPolicy) -> None:
    trees = list(enumerate_trees(policy))
    check_expected_gradient(trees, policy.total)
    first = PooledForks(policy)
    first.start(policy.initial)
    shared = [segment for tree, _, _ in trees if tree is not None for segment in tree.grown.needs]
    assert first.shared_round == (2 if policy is POOLED else 1) and shared


def check_expected_gradient(trees: list[Any], planned: int) -> None:
    intact = without_failures(trees)
    assert math.isclose(sum(p for _, p, _ in trees), 1.0, abs_tol=1e-12)
    assert math.isclose(sum(p for _, p, _ in intact), 1.0, abs_tol=1e-12)
    assert all(tree.planned == planned for tree, _, _ in trees if tree is not None)
    kept = sum(p * len(tree.leaves()) for tree, p, _ in trees if tree is not None)
    print(f"{1 - kept / planned:.3f} of the trajectories are lost")
    for estimator in (Centred(), LeaveOneOut()):
        target, found = expected(intact, by(estimator)), expected(trees, by(estimator, SHARES))
        assert np.abs(target).max() > 0.002
        np.testing.assert_allclose(found, target, rtol=0, atol=1e-15)


def test_bias_without_correction_and_of_normalised_groups_is_known(all_trees: list[Any]) -> None:
    """docs/guides/rollouts.md has the figures."""
    intact = without_failures(all_trees)

    def bias(rule: Callable[[RolloutTree], np.ndarray], target: np.ndarray) -> float:
        return float(np.linalg.norm(expected(all_trees, rule) - target) / np.linalg.norm(target))

    plain = bias(survivors, expected(intact, survivors))
    target = expected(intact, by(GroupNormalised()))
    normal, uncorrected = bias(by(GroupNormalised(), SHARES), target), bias(normalised_survivors, target)
    print(f"centred without correction {plain:.3f}, group {normal:.3f}, group without correction {uncorrected:.3f}")
    assert plain > 0.1 > normal
    assert normal < uncorrected


def drawn_tree(seed: int, name: str = "arpo") -> tuple[RolloutTree | None, BranchPolicy]:
    config = AlgorithmConfig(branching=name, group_size=6, initial_rollouts=3, entropy_tokens=2, branch_probability=0.7)
    policy = make_branch_policy(config, vocabulary_size=CODEC.vocabulary_size, seed=SEED)
    limits = SHARED if seed % 2 else APART
    return grow_with(Choices(rng=random.Random(seed)), policy=policy, limits=limits)[0], policy


@pytest.mark.parametrize("name", ["arpo", "aepo", "grpo"])
def test_lost_branches_are_stored_and_replayed_but_not_trained(name: str, tmp_path: Path) -> None:
    task = Task("task-1", (), "1", "math", PROMPT)
    lossy = []
    for tree, policy in (drawn_tree(seed, name) for seed in range(40)):
        if tree is None or tree.lost is None:
            continue
        lossy.append(tree)
        assert tree.planned == 6 > len(tree.leaves())
        assert all(s.tool.status == "ok" for s in tree.segments if s.tool is not None)
        assert {tree.segments[leaf].role for leaf in tree.leaves()} == {Role.MODEL}
        failed = [leaf for leaf in tree.grown.leaves() if tree.grown.segments[leaf].role is Role.TOOL]
        assert failed and all(not len(tree.grown.segments[leaf]) for leaf in failed)
        assert len(tree.grown.leaves()) - len(failed) == len(tree.leaves())
        decisions = sum(segment.branch is not None for segment in tree.grown.segments)
        count = len(tree.leaves())
        item = ScoredTree(task, tree, np.zeros(count), np.zeros(count), np.zeros(count, bool))
        write_trees(tmp_path / "trees.parquet", 1, [item], CODEC.decode)
        (stored,) = read_trees(tmp_path / "trees.parquet")
        assert stored.tree.to_dict() == tree.to_dict() == json.loads(json.dumps(tree.to_dict()))
        assert replay_decisions(stored.tree, policy) == decisions
    assert len(lossy) > 5


@pytest.mark.parametrize("limits", [APART, SHARED], ids=["apart", "shared"])
def test_tree_with_failed_calls_regrows_from_its_record(limits: RolloutLimits) -> None:
    for seed in range(6):
        entries: list[bytes] = []
        tree, grower = grow_with(Choices(rng=random.Random(seed)), limits=limits, record=entries.append)
        again, regrown = grow_with(Choices(rng=random.Random(99)), limits=limits, entries=entries)
        assert (tree is None) == (again is None)
        if tree is not None and again is not None:
            assert {**again.to_dict(), "seconds": 0, "lost": None} == {**tree.to_dict(), "seconds": 0, "lost": None}
            assert again.planned == tree.planned and again.grown.same_calls == tree.grown.same_calls
        assert regrown.counts.calls_failed == grower.counts.calls_failed
        assert (grower.counts.calls_failed > 0) == bool(grower.failed_calls)


class FirstPathIsLate(ChoosingEngine):
    async def generate(self, *arguments: Any, sampling: Sampling, **rest: Any) -> Generation:
        if sampling.seed == path_seed(SEED, 3, "task-1", (0,)):
            await asyncio.sleep(0.01)
        return await super().generate(*arguments, sampling=sampling, **rest)


def test_restart_executes_no_shared_call_again_that_only_a_later_path_has_in_its_record() -> None:
    """The record is cut at each entry, also between the result of a call and its use in the other paths."""

    def executed(choices: Choices) -> int:
        return sum(isinstance(key, tuple) for key, _, _ in choices.drawn)

    entries: list[bytes] = []
    whole = Choices()
    grow_with(whole, limits=SHARED, record=entries.append, engine_type=FirstPathIsLate)
    results = TreeRecord.from_entries(entries).tool_results
    assert not results[1,].tool.cached and results[0,].tool.cached
    for cut in range(len(entries) + 1):
        known = sum(not each.tool.cached for each in TreeRecord.from_entries(entries[:cut]).tool_results.values())
        grow_with(again := Choices(), limits=SHARED, entries=entries[:cut])
        assert known + executed(again) == executed(whole) == 2


def test_evaluation_gives_lost_attempts_no_answer() -> None:
    drawn = (drawn_tree(seed, "grpo")[0] for seed in range(99))
    tree = next(tree for tree in drawn if tree is not None and tree.lost is not None)
    responses = tree_responses(tree, CODEC.decode)
    assert len(responses) == 6
    answered = [response for response in responses if isinstance(response, AgentResponse)]
    assert [r.outcome for r in responses if isinstance(r, NoResponse)] == [Outcome.TOOLS] * (6 - len(answered))
    assert len(answered) == len(tree.leaves())


def test_weight_of_a_pair_is_bounded_and_one_without_failures() -> None:
    tree = next(tree for tree, _ in map(drawn_tree, range(99)) if tree is not None and tree.lost is None)
    assert (pair_weights(tree) == 1.0).all()
    tree.answered_shares = {"python": 0.01, "search": 0.01}
    assert pair_weights(tree).max() == 10.0


def test_shares_of_answered_calls_forget_an_outage() -> None:
    shares = AnsweredShares()
    assert shares.add({("python", True): 5}) == {}
    assert shares.add({("python", True): 3, ("search", False): 2, ("search", True): 6}) == {"search": 0.75}
    last = [shares.add({("search", True): 8})["search"] for _ in range(40)]
    assert last == sorted(last) and last[-1] > 0.99


@pytest.mark.slow_campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("policy", "limits"),
    [(POLICY, APART), (POOLED, APART), (POLICY, SHARED)],
    ids=["reserved", "pooled", "shared"],
)
@pytest.mark.parametrize("chance", [0.05, 0.10, 0.15])
def test_ten_thousand_trees_agree_with_the_estimate_without_failures(
    policy: BranchPolicy, limits: RolloutLimits, chance: float
) -> None:
    """The shares of answered calls are estimated as in a run."""
    target = expected(without_failures(list(enumerate_trees(policy, limits))), by(LeaveOneOut()))
    rng, known = random.Random(7), AnsweredShares()
    failures = dict.fromkeys(FAILURES, chance)
    found, plain = [], []
    for _step in range(100):
        drawn = [grow_with(Choices(rng=rng), failures, policy, limits) for _ in range(100)]
        advantages = by(LeaveOneOut(), known.add(sum((grower.calls for _, grower in drawn), Counter())))
        trees = [tree for tree, _ in drawn if tree is not None]
        found.append(sum(gradient(tree, advantages(tree)) for tree in trees) / len(drawn))
        plain.append(sum(gradient(tree, 4 / 3 * survivors(tree)) for tree in trees) / len(drawn))
    error, spread = np.mean(found, axis=0) - target, np.std(found, axis=0, ddof=1) / 10
    naive = np.mean(plain, axis=0) - target
    free = [0, 2, 4]  # the logits of one turn add up to a constant: one of two counts
    print(f"{chance:.0%}: error / standard error {np.round(error / spread, 2)[free]}, ", end="")
    print(f"relative {np.linalg.norm(error) / np.linalg.norm(target):.3f}; ", end="")
    print(f"without correction {np.linalg.norm(naive) / np.linalg.norm(target):.3f}")
    assert (np.abs(error) < 3.3 * spread)[free].all()  # 99.9 %
