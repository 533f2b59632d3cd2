"""Training resumes from a checkpoint of any layout, with or without the distributed optimizer, in any other layout."""

import json

import pytest
import torch

from tests.ranks import run_ranks

EXACT = {"tokens", "skipped", "lr"}
FEW = {"dense": ["tensor-pipeline", "virtual-data-distributed"], "experts": ["tensor-expert"]}
ALL = {
    "dense": ["tensor-pipeline", "virtual-data-distributed", "tensor-data-distributed", "data"],
    "experts": ["expert-distributed", "tensor-expert"],
}


@pytest.fixture(scope="module", params=[FEW, pytest.param(ALL, marks=pytest.mark.slow_campaign)], ids=["few", "all"])
def runs(request, one_rank, tmp_path_factory):
    """Results by kind of model: of one rank, in this process, and of layouts of four ranks."""
    from safetensors.torch import load_file

    from arpo_megatron.actor.stored_weights import stored_tensors
    from arpo_megatron.config import ParallelConfig
    from arpo_megatron.models.mapping import hf_shapes
    from tests.actor import resharding

    root, expected = tmp_path_factory.mktemp("resharding"), {}
    for kind in request.param:
        torch.manual_seed(7)
        fresh = resharding.train(resharding.new_actor(kind, ParallelConfig()), range(1))
        actor = resharding.new_actor(kind, ParallelConfig())
        resharding.train(actor, range(5, 6))
        resharding.save(actor, root / kind)
        rows = resharding.train(actor, range(2))
        expected[kind] = {"fresh": fresh, "rows": rows, "next": resharding.train(actor, range(2, 3))}
    (root / "hf").mkdir()
    (root / "hf" / "config.json").write_text("{}")
    run_ranks(resharding.main, root, request.param, ranks=4)
    found = json.loads((root / "losses.json").read_text())
    for kind, layouts in request.param.items():
        for name in layouts:  # back on one rank
            actor = resharding.new_actor(
                kind, ParallelConfig(distributed_optimizer=name in ("data", "tensor-pipeline"))
            )
            actor.load(root / name)
            found[kind][name]["on one rank"] = resharding.train(actor, range(2, 3))
            weights = dict(stored_tensors(root / name, resharding.SPECS[kind], "float32"))
            exported = load_file(root / f"{name}.hf" / "model.safetensors")
            assert list(weights) == list(hf_shapes(resharding.SPECS[kind]))
            found[kind][name]["stored"] = {key: torch.equal(weights[key], exported[key]) for key in exported}
            alone = dict(stored_tensors(root / f"{name}.weights", resharding.SPECS[kind], "float32"))
            found[kind][name]["alone"] = {key: torch.equal(weights[key], alone[key]) for key in weights}
            sizes = [sum(file.stat().st_size for file in (root / each).iterdir()) for each in (f"{name}.weights", name)]
            found[kind][name]["bytes"] = sizes[0] / sizes[1]
    return expected, found


def assert_close(actual: list[dict], expected: list[dict]) -> None:
    assert len(actual) == len(expected)
    for row, wanted in zip(actual, expected, strict=True):
        for name, value in wanted.items():
            tolerance = {} if name in EXACT or value is None else {"rel": 1e-5, "abs": 1e-6}
            assert row[name] == pytest.approx(value, **tolerance), name


@pytest.mark.parametrize("kind", ALL)
def test_layouts_resume_from_the_checkpoint_of_one_rank(runs, kind):
    expected, found = runs
    for name, result in found[kind].items():
        if result["fresh"] is not None:
            assert_close(result["fresh"], expected[kind]["fresh"])
        assert_close(result["rows"], expected[kind]["rows"])
        assert_close(result["next"], expected[kind]["next"])
        assert result[f"from {name}"] == result["next"]  # its own checkpoint: bit for bit


@pytest.mark.parametrize("kind", ALL)
def test_all_ranks_skip_an_update_and_name_the_same_pack(runs, kind):
    for result in runs[1][kind].values():
        assert result["skipped"] == [[True, [-1]]] * 4


@pytest.mark.parametrize("kind", ALL)
def test_layouts_resume_from_checkpoints_of_each_other_and_one_rank_from_all(runs, kind):
    expected, found = runs
    for index, result in enumerate(found[kind].values(), 1):
        resumed = [rows for name, rows in result.items() if name.startswith(("from", "on one"))]
        assert len(resumed) == index + 1
        for rows in resumed:
            assert_close(rows, expected[kind]["next"])


@pytest.mark.parametrize("kind", ALL)
def test_one_process_reads_the_weights_that_any_layout_exports_and_saves(runs, kind):
    for result in runs[1][kind].values():
        assert result["stored"] and all(result["stored"].values())
        assert result["alone"] and all(result["alone"].values())
        assert result["bytes"] < 0.5, "weights without the optimizer"
