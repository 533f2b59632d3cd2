"""What a step under way has sampled, on the disk: whole, of the right moment, and no cause for a run to end."""

from pathlib import Path

import pytest

from arpo_megatron.rollout.record import UnfinishedTree
from arpo_megatron.trainer.step_journal import StepJournal, StepSnapshot
from tests.faults import small_disk

SELECTOR = {"position": 2**70, "order": [3, 1], "weights": {"t1": 0.5}}
TREES = [UnfinishedTree("t3", 4, 4, (b"one", b"two")), UnfinishedTree("t1", 3, 2, ())]


def kept_at(path: Path, every_s: float = 0.0) -> tuple[StepJournal, list[str]]:
    told: list[str] = []
    return StepJournal(path / "step_journal.msgpack", path.parent / "checkpoints", 4, every_s, told.append), told


@pytest.fixture
def place(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


def test_what_is_kept_is_read_by_a_run_that_has_done_as_many_steps(place: Path) -> None:
    kept, told = kept_at(place)
    assert kept.read(4) is None
    kept.write(4, SELECTOR, lambda: TREES)
    assert kept.read(4) == StepSnapshot(SELECTOR, TREES)
    assert StepSnapshot(SELECTOR, TREES).entries == 2
    assert [path.name for path in place.iterdir()] == ["step_journal.msgpack"]
    assert kept.read(5) is None
    assert list(place.iterdir()) == [], "it may be another life's"
    assert told == []


def test_nothing_is_written_within_a_step_that_nobody_could_go_on_with(place: Path) -> None:
    kept, _ = kept_at(place)
    kept.write(4, SELECTOR, lambda: TREES)
    kept.write(5, SELECTOR, lambda: pytest.fail("there is no checkpoint of step 5"), now=True)
    assert kept.read(4) is not None, "a run that is killed now goes on from there"
    (place.parent / "checkpoints" / "step_5").mkdir(parents=True)  # as a run that was asked to end leaves it
    for step in (0, 5, 8):
        kept.write(step, SELECTOR, lambda: TREES)
        assert kept.read(step) is not None


def test_it_is_written_now_and_then_or_now(place: Path) -> None:
    kept, _ = kept_at(place, every_s=3600.0)
    kept.write(4, SELECTOR, lambda: pytest.fail("too early"))
    kept.write(4, SELECTOR, lambda: TREES, now=True)
    assert kept.read(4) is not None


def test_a_full_disk_is_told_once_and_takes_the_file_of_an_earlier_moment_with_it(place: Path) -> None:
    with small_disk(place, 2**16) as full:
        kept, told = kept_at(place)
        kept.write(4, SELECTOR, lambda: TREES)
        large = [UnfinishedTree("t3", 4, 4, (bytes(2**17),))]
        for _ in range(2):
            kept.write(4, SELECTOR, lambda: large)
        assert told == [f"step_journal.msgpack could not be written: {full}; training continues"]
        assert list(place.iterdir()) == []
        kept.write(4, SELECTOR, lambda: TREES[:1])
        assert kept.read(4) == StepSnapshot(SELECTOR, TREES[:1])
        kept.write(4, SELECTOR, lambda: large)
        kept.write(8, SELECTOR, lambda: large)
        assert len(told) == 1, "the room that it has given back itself is no news"
        for step in (12, 16):
            kept.write(step, SELECTOR, lambda: TREES)
            kept.write(step, SELECTOR, lambda: large)
            kept.write(step, SELECTOR, lambda: TREES)
        assert len(told) == 3


@pytest.mark.parametrize("content", [b"", b"\x93\x04", bytes(64), b"\xff" * 200])
def test_a_file_that_is_none_of_ours_is_told_and_not_used(place: Path, content: bytes) -> None:
    kept, told = kept_at(place)
    kept.path.write_bytes(content)
    assert kept.read(4) is None
    assert told == ["step_journal.msgpack is not used: it is damaged"]


def test_no_bit_of_it_may_be_another_and_no_byte_missing(place: Path) -> None:
    kept, told = kept_at(place)
    kept.write(4, SELECTOR, lambda: TREES)
    whole = kept.path.read_bytes()
    damaged = [whole[:place] for place in range(len(whole))]
    damaged += [whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :] for place in range(len(whole))]
    for content in damaged:
        kept.path.write_bytes(content)
        assert kept.read(4) is None
    assert told == ["step_journal.msgpack is not used: it is damaged"] * len(damaged)
