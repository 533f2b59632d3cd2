"""A run that is killed with SIGKILL at any moment and resumed ends with the same bits as an uninterrupted run."""

import json
import random
import signal
from pathlib import Path

import pytest

from tests.actor import campaign as training
from tests.ranks import RankFailedError, run_ranks

STEPS = 10
POINTS = ("update", "save", "shard", "joined", "renamed")


def moments(seed: int, count: int, ranks: int) -> list[dict[str, object]]:
    """Draw kills in the order of their steps; every second one hits while a checkpoint is being written."""
    draw = random.Random(f"kill-{seed}")
    steps = sorted(draw.sample(range(2, STEPS), count))
    points = [
        ("update", "save")[draw.random() < 0.5] if index % 2 else draw.choice(POINTS[2:]) for index in range(count)
    ]
    return [
        {"rank": draw.randrange(ranks), "step": step, "point": point, "delay_s": draw.uniform(0, 0.03)}
        for step, point in zip(steps, points, strict=True)
    ]


def campaign(root: Path, layout: str, ranks: int, kills: list[dict[str, object]]) -> list[dict[str, object]]:
    """Run to the end through all kills; return what each attempt started with."""
    # It is the controller that joins the parts and renames.
    kills = [{**kill, "rank": 0} if kill["point"] in ("joined", "renamed") else kill for kill in kills]
    for kill in [*kills, None]:
        if kill is None:
            run_ranks(training.main, root, layout, None, ranks=ranks)
            continue
        with pytest.raises(RankFailedError) as failure:
            run_ranks(training.main, root, layout, kill, ranks=ranks)
        assert failure.value.exit_code == -signal.SIGKILL, failure.value
    attempts = [json.loads(line) for line in (root / "attempts.jsonl").read_text().splitlines()]
    for attempt, kill in zip(attempts[1:], kills, strict=True):
        # The save of a step waits for the one before it: at most that one and the present one are lost.
        assert kill["step"] - 2 <= attempt["resumed"] <= kill["step"], (attempt, kill)
        if kill["point"] == "renamed":
            assert attempt["resumed"] == kill["step"]
        assert attempt["refused"] == []  # nothing half-written ever has the name of a checkpoint
    assert json.loads((root / "result.json").read_text()) == json.loads((root / "straight.json").read_text())
    assert sorted(path.name for path in (root / "checkpoints").iterdir()) == ["step_10", "step_9"]
    return attempts


@pytest.mark.slow_campaign
def test_run_killed_at_step_five_ends_with_the_same_bits(tmp_path):
    """On two ranks with the distributed optimizer."""
    attempts = campaign(tmp_path, "data", 2, [{"rank": 0, "step": 5, "point": "renamed", "delay_s": 0.0}])
    assert [attempt["resumed"] for attempt in attempts] == [0, 5]


def test_run_killed_several_times_ends_with_the_same_bits(tmp_path):
    """With experts, whose measured load is a part of the state."""
    attempts = campaign(tmp_path, "experts", 2, moments(5, 3, ranks=2))
    assert any(attempt["partial"] for attempt in attempts), "no kill came during a save"
    assert attempts[-1]["epoch"], "no attempt resumed in a later epoch"


@pytest.mark.slow_campaign
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", ["data", "experts"])
@pytest.mark.parametrize("seed", range(2, 7))
def test_run_killed_at_seeded_moments_ends_with_the_same_bits(tmp_path, layout, seed):
    campaign(tmp_path, layout, 2, moments(seed, 4, ranks=2))
