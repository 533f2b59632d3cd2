"""Slow ranks are found by their compute seconds per work, over several steps."""

import json
import time
from pathlib import Path

from arpo_megatron.actor.pass_clock import PassClock
from arpo_megatron.trainer.stragglers import STEPS, RankTimes, Stragglers, slowness_of


def ranks(*compute_s: float) -> list[RankTimes]:
    return [RankTimes(f"n{rank // 2}", rank, {"update": 9.0}, each, 1.0) for rank, each in enumerate(compute_s)]


def test_rank_that_is_slow_in_several_steps_is_named_once(tmp_path: Path) -> None:
    stragglers = Stragglers(tmp_path / "ranks.jsonl")
    lines = [stragglers.add(step, ranks(1.0, 1.1, 1.0, 1.5), [1.0] * 4)[1] for step in range(1, STEPS + 3)]
    (named,) = [line for line in lines if line]
    assert lines.index(named) == STEPS - 1 and named.startswith("rank 3 on n1 took up to 1.43 times")
    rows = [json.loads(line) for line in (tmp_path / "ranks.jsonl").read_text().splitlines()]
    assert rows[0]["nodes"] == ["n0", "n0", "n1", "n1"] and rows[0]["seconds"] == {"update": [9.0] * 4}
    assert [row["step"] for row in rows] == list(range(1, STEPS + 3))


def test_unequal_work_is_no_straggler(tmp_path: Path) -> None:
    stragglers = Stragglers(tmp_path / "ranks.jsonl")
    assert {stragglers.add(step, ranks(1.0, 3.0), [1.0, 3.0]) for step in range(9)} == {(1.0, "")}
    assert slowness_of(ranks(0.0, 2.0), [0.0, 1.0]) == [1.0, 1.0]
    assert stragglers.add(9, ranks(0.0, 0.0), [0.0, 0.0])[0] is None


def test_one_slow_step_is_no_straggler(tmp_path: Path) -> None:
    stragglers = Stragglers(tmp_path / "ranks.jsonl")
    slow, level = ranks(1.0, 1.0, 2.0), ranks(1.0, 1.0, 1.0)
    assert not any(stragglers.add(step, each, [1.0] * 3)[1] for step, each in enumerate([slow, slow, level] * 3))


def test_waits_for_other_replicas_do_not_count() -> None:
    clock, reduced = PassClock(), []

    def reduce(model: str) -> None:
        reduced.append(model)
        time.sleep(0.2)

    with clock.counting():
        clock.stopping(reduce)("model")
    assert reduced == ["model"] and clock.take() < 0.2
    with clock.counting():
        time.sleep(0.05)
    assert clock.take() >= 0.05 and clock.take() == 0.0
