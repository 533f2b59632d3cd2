"""A checkpoint of any layout, with or without the distributed optimizer, is gone on from in any other."""

import json

import pytest
import torch

from tests.torchrun import torchrun

EXACT = {"tokens", "skipped", "lr"}


@pytest.fixture(scope="module")
def runs(one_rank, tmp_path_factory):
    """Of each kind of model: results of one rank, in this process, and of the layouts of four ranks."""
    from arpo_megatron.config import ParallelConfig
    from tests.actor import resharding

    root, expected = tmp_path_factory.mktemp("resharding"), {}
    for kind in resharding.LAYOUTS:
        torch.manual_seed(7)
        fresh = resharding.train(resharding.new_actor(kind, ParallelConfig()), range(1))
        actor = resharding.new_actor(kind, ParallelConfig())
        resharding.train(actor, range(5, 7))
        resharding.save(actor, root / kind)
        rows = resharding.train(actor, range(3))
        expected[kind] = {"fresh": fresh, "rows": rows, "next": resharding.train(actor, range(3, 5))}
    torchrun("tests.actor.resharding", str(root), ranks=4)
    found = json.loads((root / "losses.json").read_text())
    for kind, layouts in resharding.LAYOUTS.items():
        for name in layouts:  # back on one rank
            alone = resharding.new_actor(kind, ParallelConfig(distributed_optimizer=name == "data"))
            alone.load(root / name)
            found[kind][name]["on one rank"] = resharding.train(alone, range(3, 5))
    return expected, found


def assert_close(actual: list[dict], expected: list[dict]) -> None:
    assert len(actual) == len(expected)
    for row, wanted in zip(actual, expected, strict=True):
        for name, value in wanted.items():
            tolerance = {} if name in EXACT or value is None else {"rel": 1e-5, "abs": 1e-6}
            assert row[name] == pytest.approx(value, **tolerance), name


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_every_layout_goes_on_from_the_checkpoint_of_one_rank(runs, kind):
    expected, found = runs
    for name, result in found[kind].items():
        if result["fresh"] is not None:
            assert_close(result["fresh"], expected[kind]["fresh"])
        assert_close(result["rows"], expected[kind]["rows"])
        assert_close(result["next"], expected[kind]["next"])
        assert result[f"from {name}"] == result["next"]  # its own checkpoint: bit for bit


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_all_ranks_agree_that_an_update_is_skipped_and_which_pack_is_to_blame(runs, kind):
    for result in runs[1][kind].values():
        assert result["skipped"] == [[True, [-1]]] * 4


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_every_layout_goes_on_from_the_checkpoint_of_every_other(runs, kind):
    expected, found = runs
    compared = 0
    for result in found[kind].values():
        for name, rows in result.items():
            if name.startswith(("from", "on one")):
                assert_close(rows, expected[kind]["next"])
                compared += 1
    assert compared == {"dense": 4 * 5 // 2 + 4, "experts": 2 * 3 // 2 + 2}[kind]
