"""Checkpoints are whole or absent, and damage is reported."""

import json
import os
import re
import resource
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from arpo_megatron.actor import parallel
from arpo_megatron.actor.checkpoint import MAX_FAILED_SAVES, CheckpointStore, newest_intact
from arpo_megatron.config import ParallelConfig
from arpo_megatron.errors import UserError
from arpo_megatron.jobs.checkpoint_dirs import best_checkpoints
from tests.ranks import run_ranks


@dataclass
class Weights:
    """A state to save: a file with a number, copied when the save begins."""

    value: int
    seconds: float = 0.0
    size: int = 0
    go_on: threading.Event | None = None

    def snapshot(self, directory: Path) -> "WeightsTaken":
        return WeightsTaken(directory / "weights", f"{self.value}{' ' * self.size}", self.seconds, self.go_on)


@dataclass
class WeightsTaken:
    path: Path
    content: str
    seconds: float
    go_on: threading.Event | None

    def write(self):
        time.sleep(self.seconds)
        assert self.go_on is None or self.go_on.wait(60)
        self.path.write_text(self.content)
        return 1, [self.path]

    def finish(self, written):
        joined = self.path.with_name("joined")
        joined.write_text(str(written))
        return [joined]


def saved(store: CheckpointStore, step: int, weights: Weights | None = None, state=None) -> Path:
    store.save(step, weights or Weights(step), state or {})
    store.finish()
    assert not store.reports()[-1].error
    return store.root / f"step_{step}"


def value_of(path: Path) -> str:
    return (CheckpointStore.actor_directory(path) / "weights").read_text()


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@contextmanager
def largest_file(size: int):
    """Let the system refuse to write files beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_store_returns_state_and_weights_of_the_newest_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=5)
    assert store.resume_point().path is None
    state = {"step": 3, "buffer": [{"task": "a", "logprobs": [-0.1]}]}
    for step in (9, 10):  # not in the order of names
        last = saved(store, step, state=state)
    assert newest_intact(store.root).path == last == tmp_path / "checkpoints" / "step_10"
    assert value_of(last) == "10" and store.load_state(last) == state


def test_save_in_the_background_holds_the_state_of_its_step(tmp_path):
    store, go_on = CheckpointStore(tmp_path, keep=2), threading.Event()
    weights = Weights(1, seconds=0.3, go_on=go_on)
    store.save(1, weights, {})
    assert store.reports() == [] and newest_intact(tmp_path).path is None
    weights.value = 2
    go_on.set()  # else it would not be written
    while not (reports := store.reports()):
        time.sleep(0.01)
    assert reports[0].step == 1
    assert value_of(tmp_path / "step_1") == "1"


def test_second_save_waits_for_the_first(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    store.save(1, Weights(1, seconds=0.2), {})
    store.save(2, Weights(2), {})
    store.finish()
    assert [report.step for report in store.reports()] == [1, 2]
    assert names(tmp_path) == ["step_1", "step_2"]


@pytest.mark.parametrize(
    ("every", "left"), [(0, [8, 9]), (1, list(range(10))), (3, [0, 3, 6, 8, 9]), (7, [0, 7, 8, 9])]
)
def test_store_keeps_the_newest_and_every_nth_checkpoint(tmp_path, every, left):
    store = CheckpointStore(tmp_path, keep=2, keep_every=every)
    for step in range(10):
        saved(store, step)
    assert names(tmp_path) == [f"step_{step}" for step in left]


def test_store_keeps_the_best_of_the_evaluated_checkpoints(tmp_path):
    root, held_out = tmp_path / "checkpoints", tmp_path / "held_out"
    held_out.mkdir()
    success = {2: 0.5, 4: 0.9, 6: 0.9, 8: 0.1}
    store = CheckpointStore(root, keep=1, best=lambda paths: best_checkpoints(paths, held_out, 2))
    for step in range(1, 10):
        saved(store, step)
        if step in success:
            (held_out / f"step_{step:06d}.json").write_text(json.dumps({"success": success[step]}))
    assert names(root) == ["step_4", "step_6", "step_9"]


@pytest.mark.parametrize("name", ["actor/weights", "actor/joined", "state.json", "manifest.json"])
@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (flip_a_byte, "has another checksum|cannot be read"),
        (Path.unlink, "is missing"),
        (lambda path: os.truncate(path, 1), "has 1 bytes instead of|cannot be read"),
    ],
    ids=["a flipped byte", "a lost file", "a short file"],
)
def test_resume_skips_a_damaged_checkpoint_and_reports_why(tmp_path, name, harm, reason):
    store = CheckpointStore(tmp_path, keep=3)
    for step in (1, 2):
        saved(store, step, Weights(10 * step, size=100), {"step": step})
    harm(tmp_path / "step_2" / name)
    found = CheckpointStore(tmp_path, keep=3).resume_point()
    assert found.path == tmp_path / "step_1"
    (line,) = found.warnings
    assert line.startswith(f"step_2 is not used: file {name} ")
    assert any(word in line for word in reason.split("|")), line


def test_damaged_checkpoint_does_not_count_and_is_replaced(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2):
        saved(store, step)
    flip_a_byte(tmp_path / "step_2" / "state.json")
    store = CheckpointStore(tmp_path, keep=2)
    assert store.resume_point().path == tmp_path / "step_1"
    assert names(tmp_path) == ["step_1", "step_2.damaged"]
    saved(store, 2, Weights(7))
    assert names(tmp_path) == ["step_1", "step_2"]
    assert newest_intact(tmp_path).path == tmp_path / "step_2"


def test_damage_of_all_checkpoints_stops_the_run_with_every_reason(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2):
        flip_a_byte(saved(store, step) / "actor" / "weights")
    with pytest.raises(UserError, match=r"no checkpoint in .* is intact .*step_2 is not used.*step_1 is not used"):
        store.resume_point()


def test_interrupted_save_leaves_the_last_checkpoint_and_is_removed(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    saved(store, 1)
    store.save(2, Weights(2, seconds=60.0), {})  # its process would be killed now
    assert newest_intact(tmp_path).path == tmp_path / "step_1"
    assert names(tmp_path) == ["step_1", "step_2.tmp"]
    (tmp_path / "step_7.tmp").write_text("a file, not a directory")
    (tmp_path / "notes.tmp").write_text("not ours")
    again = CheckpointStore(tmp_path, keep=2)
    assert names(tmp_path) == ["notes.tmp", "step_1"]
    assert value_of(saved(again, 2)) == "2"


def test_failed_save_is_reported_and_leaves_the_older_checkpoint_intact(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    saved(store, 1)
    with largest_file(4096):
        store.save(2, Weights(2, size=100_000), {})
        store.finish()
    (report,) = store.reports()
    assert str(report) == "step_2 could not be saved: File too large; older checkpoints are intact"
    assert names(tmp_path) == ["step_1"] and newest_intact(tmp_path).path == tmp_path / "step_1"
    saved(store, 3)


def test_failing_saves_stop_the_run_only_after_several_in_a_row(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for start in (0, MAX_FAILED_SAVES):
        with largest_file(4096):
            for step in range(start, start + MAX_FAILED_SAVES - (not start)):
                store.save(step, Weights(step, size=100_000), {})
            store.finish()
        if not start:
            saved(store, 99)  # one that succeeds restarts the count
    with pytest.raises(UserError, match="3 checkpoints in a row could not be saved \\(File too large\\): fix"):
        store.save(100, Weights(1), {})


@dataclass
class Fifo:
    """A state whose write waits in the kernel until someone reads, as a write to a lost file server does."""

    path: Path

    def snapshot(self, directory: Path) -> "Fifo":
        return self

    def write(self):
        self.path.write_text("x")
        return 1, []

    def finish(self, written):
        return []


def read_when(fifo: Path, lines: list[str], ready: Callable[[], bool]) -> Callable[[str], None]:
    """Return a log that keeps its lines, and reads `fifo` once when `ready`."""
    read = []

    def log(line: str) -> None:
        lines.append(line)
        if not read and ready():
            read.append(fifo.read_text())

    return log


@pytest.mark.parametrize("wait", [True, False], ids=["training waits", "training continues"])
def test_hung_write_is_reported_at_intervals_until_it_ends(tmp_path, capfd, wait):
    os.mkfifo(fifo := tmp_path / "fifo")
    lines: list[str] = []
    store = CheckpointStore(
        tmp_path / "checkpoints", keep=2, log=read_when(fifo, lines, lambda: len(lines) == 3), log_every_s=0.01
    )
    store.save(4, Fifo(fifo), {})
    if wait:
        store.finish()
    while not (reports := store.reports()):
        time.sleep(0.01)
    assert not reports[0].error and names(store.root) == ["step_4"]
    text = rf"{store.root}/step_4\.tmp is not written after \d+ s: waiting for rank 0; check this file system"
    assert len(lines) >= 3 and all(re.fullmatch(text, line) for line in lines)
    assert capfd.readouterr().err.splitlines()[:3] == lines[:3]


def save_with_hung_rank(root: Path) -> None:
    """Save on ranks of which only the last one's write hangs, until rank 0 has reported this one alone."""
    parallel.initialize(ParallelConfig(data=3), seed=1)
    fifo, lines = root / "fifo", []
    store = CheckpointStore(
        root / "checkpoints", keep=2, log=read_when(fifo, lines, lambda: "rank 2;" in lines[-1]), log_every_s=0.1
    )
    for step in (1, 2):  # what the ranks posted for one save does not count for the next
        hangs = step == 2 and parallel.rank() == 2
        store.save(step, Fifo(fifo) if hangs else Weights(step), {})
        store.finish()
    assert [report.error for report in store.reports()] == ["", ""]
    assert bool(lines) == parallel.is_rank_zero()
    parallel.destroy()


def test_report_of_a_hung_write_names_the_ranks(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    run_ranks(save_with_hung_rank, tmp_path, ranks=3)


def test_repeated_step_replaces_its_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    saved(store, 1, state={"try": 1})
    again = saved(store, 1, Weights(7), {"try": 2})
    assert value_of(again) == "7" and store.load_state(again) == {"try": 2}
    assert names(tmp_path) == ["step_1"]


def test_save_refuses_state_that_is_not_json(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    with pytest.raises(TypeError):
        store.save(1, Weights(1), {"bytes": b"no"})
    assert names(tmp_path) == []
