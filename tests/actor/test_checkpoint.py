"""A checkpoint is whole or absent."""

from pathlib import Path

import pytest

from arpo_megatron.actor.checkpoint import CheckpointStore


class Weights:
    """Something to save: a file with a number."""

    def __init__(self, value: int, fails: bool = False) -> None:
        self.value, self.fails = value, fails

    def save(self, directory: Path) -> None:
        (directory / "weights").write_text(str(self.value))
        if self.fails:
            raise OSError("disk full")


def value_of(path: Path) -> str:
    return (CheckpointStore.actor_directory(path) / "weights").read_text()


def test_state_and_weights_come_back_and_the_newest_is_latest(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=5)
    assert store.latest() is None
    state = {"step": 3, "buffer": [{"task": "a", "logprobs": [-0.1]}]}
    for step in (9, 10):  # not in the order of names
        saved = store.save(step, Weights(step), state)
    assert store.latest() == saved == tmp_path / "checkpoints" / "step_10"
    assert value_of(saved) == "10" and store.load_state(saved) == state


def test_only_the_newest_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in range(4):
        store.save(step, Weights(step), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_2", "step_3"]


def test_an_interrupted_save_leaves_the_last_whole_one_and_is_swept_away(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    store.save(1, Weights(1), {})
    with pytest.raises(OSError, match="disk full"):
        store.save(2, Weights(2, fails=True), {})
    assert store.latest() == tmp_path / "step_1"
    again = CheckpointStore(tmp_path, keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    assert value_of(again.save(2, Weights(2), {})) == "2"


def test_a_step_that_is_done_again_replaces_its_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    store.save(1, Weights(1), {"try": 1})
    saved = store.save(1, Weights(7), {"try": 2})
    assert value_of(saved) == "7" and store.load_state(saved) == {"try": 2}


def test_state_that_is_not_json_is_refused_before_it_counts(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    with pytest.raises(TypeError):
        store.save(1, Weights(1), {"bytes": b"no"})
    assert store.latest() is None
