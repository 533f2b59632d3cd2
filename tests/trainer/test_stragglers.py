"""Slow ranks are found by their compute seconds per work, over several steps."""

import json
import time
from pathlib import Path
from typing import ClassVar

import pytest
import torch

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


class Event:
    """Double of a CUDA event: a stream reaches the events at given moments, in seconds."""

    waits: ClassVar[int] = 0
    moments: ClassVar[list[float]] = [1.0, 3.5, 4.0, 5.0]

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.moment = self.moments.pop(0)

    def synchronize(self) -> None:
        Event.waits += 1

    def elapsed_time(self, end: "Event") -> float:
        return (end.moment - self.moment) * 1000


def test_host_does_not_wait_for_the_device_within_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: pytest.fail("the device is synchronised"))
    clock, waits_at_reduction = PassClock(), []
    for _ in range(2):
        with clock.counting():
            clock.stopping(lambda: waits_at_reduction.append(Event.waits))()
    assert waits_at_reduction == [0, 1]  # the first pass is read when the second begins
    assert clock.take() == 3.5 and clock.take() == 0.0
