"""Damaged checkpoints and skipped updates, from the command line."""

import dataclasses
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from arpo_megatron.algorithms.credit import supervised_credit
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.fingerprint import fingerprint
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.packing.packs import pack_trees
from arpo_megatron.trainer.skipped_updates import SkippedUpdate, save_bad_update
from arpo_megatron.tree import Role, RolloutTree
from tests.e2e.jobs import ARPO, quickstart, rows_of, run_to_end

pytestmark = pytest.mark.timeout(600)
COLD_START = ("sft.steps=4", "sft.save_every=1", "sft.batch=4", "model.layers=2", "model.hidden_size=48")


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Run a cold start of four updates; it keeps the checkpoints of updates 2 and 3."""
    path = tmp_path_factory.mktemp("checkpoints") / "run"
    run_to_end(quickstart("sft", path, *COLD_START), path)
    checkpoints = sorted(each.name for each in (path / "sft_checkpoints").iterdir())
    assert checkpoints == ["step_2", "step_3"]
    return path


def test_resume_skips_a_damaged_checkpoint_and_names_it(run):
    shutil.rmtree(run / "sft")
    flip_a_byte(run / "sft_checkpoints" / "step_3" / "actor" / "__0_0.distcp")
    screen = run_to_end(quickstart("sft", run, *COLD_START, "--resume"), run)
    assert "step_3 is not used: file actor/__0_0.distcp has another checksum" in screen
    assert "cold start resumed after 2 of 4 updates" in screen
    assert (run / "sft" / "config.json").exists()


def test_replay_pack_names_the_nonfinite_pack(run):
    tree = RolloutTree("task", [1, 2, 3])
    tree.add(0, Role.MODEL, [4, 5, 6], logprobs=np.zeros(3))
    (pack,) = pack_trees([tree], supervised_credit([tree]), token_budget=100)
    bad = dataclasses.replace(pack, positive=pack.positive * np.float32(np.nan))
    made_by = fingerprint(resolve.load(run / "config.yaml"), ModelSpec.from_hf(run / "initial_model"))
    dump = save_bad_update(
        run / "skipped_updates", SkippedUpdate("sft", 1, "nll", [1], [pack, bad], None, made_by=made_by)
    )
    done = subprocess.run([*ARPO, "replay-pack", str(dump)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "skipped update after 1 updates: the loss of pack 1 of 2 was not finite"
    assert lines[1].startswith("weights of ") and "step_" in lines[1]
    assert lines[2].startswith("pack 0: inputs finite, log-probs finite, loss finite")
    assert lines[3].startswith("pack 1: inputs NOT FINITE (positive: 3 of 3 not finite)")


def test_resume_without_any_whole_checkpoint_is_one_line(run):
    shutil.rmtree(run / "sft", ignore_errors=True)
    for path in (run / "sft_checkpoints").glob("step_*/manifest.json"):
        path.unlink()
    done = subprocess.run(quickstart("sft", run, *COLD_START, "--resume"), capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "is whole (step_3 is not used: file manifest.json is missing; step_2 is not used:" in done.stderr
    assert not [row for row in rows_of(run / "events.jsonl")[-1:] if row["kind"] != "user_error"]
