"""The step journal: whole or absent, of the right step, and never a reason for a run to end."""

from pathlib import Path

import pytest

from arpo_megatron.rollout.record import UntrainedTree
from arpo_megatron.trainer.step_journal import StepJournal, StepSnapshot
from tests.faults import small_disk

SELECTOR = {"position": 2**70, "order": [3, 1], "weights": {"t1": 0.5}}
TREES = [UntrainedTree("t3", 4, 4, (b"one", b"two")), UntrainedTree("t1", 3, 2, ())]


def new_journal(path: Path, every_s: float = 0.0) -> tuple[StepJournal, list[str]]:
    notes: list[str] = []
    return StepJournal(path / "step_journal.msgpack", path.parent / "checkpoints", 4, every_s, notes.append), notes


@pytest.fixture
def place(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


def test_journal_is_read_after_the_same_number_of_steps(place: Path) -> None:
    journal, notes = new_journal(place)
    assert journal.read(4) is None
    journal.write(4, SELECTOR, lambda: TREES)
    assert journal.read(4) == StepSnapshot(SELECTOR, TREES)
    assert StepSnapshot(SELECTOR, TREES).entries == 2
    assert [path.name for path in place.iterdir()] == ["step_journal.msgpack"]
    assert journal.read(5) is None
    assert list(place.iterdir()) == [], "it may be another life's"
    assert notes == []


def test_journal_is_not_written_without_a_checkpoint_before_the_step(place: Path) -> None:
    journal, _ = new_journal(place)
    journal.write(4, SELECTOR, lambda: TREES)
    journal.write(5, SELECTOR, lambda: pytest.fail("there is no checkpoint of step 5"), now=True)
    assert journal.read(4) is not None, "a run that is killed now resumes from there"
    (place.parent / "checkpoints" / "step_5").mkdir(parents=True)  # as a run that was asked to end leaves it
    for step in (0, 5, 8):
        journal.write(step, SELECTOR, lambda: TREES)
        assert journal.read(step) is not None


def test_journal_is_written_at_intervals_or_now(place: Path) -> None:
    journal, _ = new_journal(place, every_s=3600.0)
    journal.write(4, SELECTOR, lambda: pytest.fail("too early"))
    journal.write(4, SELECTOR, lambda: TREES, now=True)
    assert journal.read(4) is not None


def test_full_disk_is_logged_once_and_deletes_the_old_journal(place: Path) -> None:
    with small_disk(place, 2**16) as full:
        journal, notes = new_journal(place)
        journal.write(4, SELECTOR, lambda: TREES)
        large = [UntrainedTree("t3", 4, 4, (bytes(2**17),))]
        for _ in range(2):
            journal.write(4, SELECTOR, lambda: large)
        assert notes == [f"step_journal.msgpack could not be written: {full}; training continues"]
        assert list(place.iterdir()) == []
        journal.write(4, SELECTOR, lambda: TREES[:1])
        assert journal.read(4) == StepSnapshot(SELECTOR, TREES[:1])
        journal.write(4, SELECTOR, lambda: large)
        journal.write(8, SELECTOR, lambda: large)
        assert len(notes) == 1, "the room that it has given back itself is no news"
        for step in (12, 16):
            journal.write(step, SELECTOR, lambda: TREES)
            journal.write(step, SELECTOR, lambda: large)
            journal.write(step, SELECTOR, lambda: TREES)
        assert len(notes) == 3


@pytest.mark.parametrize("content", [b"", b"\x93\x04", bytes(64), b"\xff" * 200])
def test_foreign_journal_is_logged_and_not_used(place: Path, content: bytes) -> None:
    journal, notes = new_journal(place)
    journal.path.write_bytes(content)
    assert journal.read(4) is None
    assert notes == ["step_journal.msgpack is not used: it is damaged"]


def test_any_damage_of_the_journal_is_noticed(place: Path) -> None:
    journal, notes = new_journal(place)
    journal.write(4, SELECTOR, lambda: TREES)
    whole = journal.path.read_bytes()
    damaged = [whole[:place] for place in range(len(whole))]
    damaged += [whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :] for place in range(len(whole))]
    for content in damaged:
        journal.path.write_bytes(content)
        assert journal.read(4) is None
    assert notes == ["step_journal.msgpack is not used: it is damaged"] * len(damaged)


def test_later_writes_append_what_is_new(place: Path) -> None:
    """A step of 1024 trees samples gigabytes: writing all of it every minute would delay the trainer."""
    journal, notes = new_journal(place)
    entries = [[bytes([number]) * 1000] for number in range(100)]

    def trees() -> list[UntrainedTree]:
        grown = [UntrainedTree(f"t{n % 90}", 4, 4, tuple(each), n) for n, each in enumerate(entries) if each]
        return [UntrainedTree("waits", 3, 3, (b"w" * 1000,)), *grown]

    journal.write(4, SELECTOR, trees)
    first = journal.path.stat().st_size
    for round_ in range(10):
        entries[round_].append(b"new" * 100)
        journal.write(4, {"round": round_}, trees)
    assert journal.read(4) == StepSnapshot({"round": 9}, trees())
    assert journal.path.stat().st_size - first < first // 2, "100 kB of old entries were not written again"
    entries[5].clear()  # a tree that was left out
    journal.write(4, {"round": 10}, trees)
    whole = journal.path.read_bytes()
    assert journal.read(4) == StepSnapshot({"round": 10}, trees())
    for cut in (1, 70, 300):  # a kill during the write
        journal.path.write_bytes(whole[:-cut])
        found = new_journal(place)[0].read(4)
        assert found is not None
        assert found.selector == {"round": 9}
    journal.write(8, SELECTOR, lambda: TREES)
    assert journal.path.stat().st_size < 1000, "another step begins a new file"
    assert new_journal(place)[0].read(8) == StepSnapshot(SELECTOR, TREES)
    assert notes == []
