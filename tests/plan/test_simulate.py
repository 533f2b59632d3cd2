"""The discrete-event model of rollouts: what it counts, and that it agrees with a real engine."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from arpo_megatron.plan.simulate import RolloutModel, SimulatedRollout, simulate
from arpo_megatron.plan.simulated_engine import EngineModel
from arpo_megatron.plan.synthetic_trees import Mix
from arpo_megatron.tree import Role, RolloutTree

MIX = Mix(samples=8, initial=4, calls=3, prompt=200, segment=(20, 60), result=(50, 150))
ENGINE = EngineModel(tokens=10**6, requests=64, step_s=0.01, prefill_s=1e-4, batch_s=0.01)


def rollout(count: int = 6, **fields: object) -> RolloutModel:
    grown = tuple(MIX.tree(seed, 64) for seed in range(count))
    model = RolloutModel(ENGINE, grown, count, lambda _tree, _segment: 0.5, 1000, MIX.initial, 4)
    return replace(model, **fields)  # type: ignore[arg-type]


def segments(model: RolloutModel, role: Role) -> int:
    return sum(each.role is role for tree in model.trees for each in tree.segments)


@pytest.mark.parametrize("admission", ["kv", "all"])
def test_pool_that_holds_everything_computes_each_token_once(admission: str) -> None:
    model = rollout(admission=admission)
    found = simulate(model)
    assert found.evicted == found.retracted == 0
    assert found.sampled == sum(len(s) for tree in model.trees for s in tree.segments if s.role is Role.MODEL)
    assert found.requests == segments(model, Role.MODEL) + len(model.trees), "and one for each prompt"
    assert found.computed == found.given + segments(model, Role.MODEL), "and the last token of each prefix"


def test_one_path_takes_the_sum_of_its_parts() -> None:
    tree = RolloutTree("t", np.arange(100))
    call = tree.add(0, Role.MODEL, np.arange(11))
    result = tree.add(call, Role.TOOL, np.arange(30))
    tree.add(result, Role.MODEL, np.arange(21))
    found = simulate(rollout(trees=(tree,), per_step=1, initial=1, admission="all", train_s=7.0))
    prefills = 3 * 0.01 + (100 + 1 + 31) * 1e-4  # prompt; its last token; tool result and the token before it
    assert found.seconds == pytest.approx(prefills + (10 + 20) * 0.01 + 0.5 + 7.0)
    assert found.steps == 1


def test_small_pool_evicts_and_admission_computes_less_again() -> None:
    small = replace(ENGINE, tokens=4000)
    held, free = (simulate(rollout(engine=small, admission=each)) for each in ("kv", "all"))
    assert free.evicted > 0
    assert held.reprefill < free.reprefill
    assert held.sampled == free.sampled


def test_pool_without_room_for_the_running_requests_retracts_some() -> None:
    tiny = replace(ENGINE, tokens=1500, conservativeness=0.0)
    found = simulate(rollout(engine=tiny, admission="all", limit=1))
    assert found.retracted > 0
    assert found.sampled == simulate(rollout()).sampled


def test_staleness_overlaps_rollouts_with_training() -> None:
    alone, ahead = (simulate(rollout(12, per_step=4, staleness=each, train_s=5.0)) for each in (0, 1))
    assert alone.steps == ahead.steps == 3
    assert ahead.seconds < alone.seconds - 5.0
    assert alone.given == ahead.given


def test_same_model_gives_the_same_result() -> None:
    def draws(mean_s: float) -> Callable[[int, int], float]:
        return lambda tree, segment: mean_s * float(np.random.default_rng((tree, segment)).exponential())

    def run(mean_s: float) -> SimulatedRollout:
        return simulate(rollout(engine=replace(ENGINE, tokens=4000), tool_s=draws(mean_s)))

    assert run(1.0) == run(1.0)
    assert run(1.0).seconds < run(3.0).seconds
