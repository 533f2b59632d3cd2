"""Loss, gradient, log-probs and statistics do not depend on how the model and the data are laid over ranks."""

import json

import cases
import pytest
import torch
from torchrun import torchrun

EXACT = {"tokens", "skipped", "lr"}


@pytest.fixture(scope="module")
def runs(one_rank, tmp_path_factory):
    """Results of one rank, in this process, and of each two-rank layout, from one torchrun."""
    import layouts

    from arpo_megatron.config import ParallelConfig

    root = tmp_path_factory.mktemp("layouts")
    alone = ParallelConfig()
    torch.manual_seed(7)
    fresh = layouts.train(layouts.new_actor(alone), alone, range(1))
    start = layouts.new_actor(alone)
    layouts.train(start, alone, range(5, 7))
    (root / "start").mkdir()
    cases.save(start, root / "start")
    rows = layouts.train(start, alone, range(3))
    expected = {"fresh": fresh, "rows": rows, "next": layouts.train(start, alone, range(3, 5))}
    torchrun("layouts.py", str(root), ranks=2)
    return expected, json.loads((root / "losses.json").read_text())


def assert_close(actual: list[dict], expected: list[dict]) -> None:
    assert len(actual) == len(expected)
    for row, wanted in zip(actual, expected, strict=True):
        for name, value in wanted.items():
            tolerance = {} if name in EXACT or value is None else {"rel": 1e-5, "abs": 1e-6}
            assert row[name] == pytest.approx(value, **tolerance), name


@pytest.mark.parametrize("layout", ["tensor", "sequence", "recompute", "data"])
def test_training_is_the_same_in_every_layout(runs, layout):
    expected, found = runs
    assert_close(found[layout]["fresh"], expected["fresh"])  # random weights are drawn alike
    assert_close(found[layout]["rows"], expected["rows"])  # after loading the checkpoint of one rank


@pytest.mark.parametrize("layout", ["tensor", "sequence", "recompute", "data"])
def test_a_resumed_run_is_the_same_run_in_every_layout(runs, layout):
    expected, found = runs
    assert found[layout]["resumed"] == found[layout]["next"]
    assert_close(found[layout]["next"], expected["next"])
