"""`arpo demo` from the command line: a short one in every run of the tests, the whole one in the campaigns."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from arpo_megatron.cli.main import app
from arpo_megatron.cli.trees import replay_trees
from tests.e2e.conftest import run_demo
from tests.e2e.jobs import ARPO, rows_of, undocumented
from tests.tools_sandbox.helpers.services import WITHOUT_NAMESPACES

pytestmark = pytest.mark.timeout(1600)


@pytest.fixture(scope="module")
def demo(sft_run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A demo of two steps that begins after the cold start of `sft_run`."""
    place = tmp_path_factory.mktemp("demo")
    run = place / "run"
    run.mkdir()
    for name in ("initial_model", "sft"):
        (run / name).symlink_to(sft_run / name)
    return run_demo(place, f"run_dir={run}", "monitor.peak_tflops=2", *SHORT_DEMO)


SHORT_DEMO = ("sft.steps=120", "train.steps=2", "train.tasks_per_step=6", "evaluation.tasks=16", "data.held_out=40")
FIGURES = (
    *("loss", "loss_policy", "loss_kl", "loss_entropy", "clip_low_share", "clip_high_share", "clip_dual_share"),
    *("kl_old", "kl_reference", "entropy_mean", "ratio_max", "ratio_p01", "ratio_p50", "ratio_p99"),
    *("grad_norm", "trainer/tokens_per_s", "trainer/tflops", "trainer/mfu", "memory_peak_gb", "updates_skipped"),
    *(f"pack/{name}" for name in ("unique", "flat", "repeated", "padding", "imbalance")),
    *(f"seconds/{name}" for name in ("rollout", "logprobs", "ratios", "update", "push")),
)
"""Figures that every step records about its updates, packs and time."""


def test_demo_trains_exports_and_answers(demo: dict[str, Any]) -> None:
    check_run(demo)
    shown = ("held-out question", "<result>", "transformers and SGLang agree", "forks after")
    shown += (f"next: arpo view {demo['run_dir']}",)
    assert not [text for text in shown if text not in demo["screen"]]
    log = (Path(demo["run_dir"]) / "logs" / "train.log").read_text()
    assert "not installed" not in log, "warnings of imports would hide the cause of a failure"
    for row in rows_of(Path(demo["run_dir"]) / "metrics.jsonl"):
        assert all(isinstance(row[name], int | float) for name in FIGURES) and not undocumented(row)
        assert row["trainer/mfu"] == pytest.approx(row["trainer/tflops"] / 2)


def test_trained_run_can_be_evaluated_exported_and_drawn(demo: dict[str, Any], tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    figures = json.loads(arpo("eval", demo["run_dir"], "--tasks", "12").splitlines()[-1])
    assert (figures["tasks"], figures["not_answered"]) == (12, 0)

    shown = arpo_here("export", demo["run_dir"], "--out", str(tmp_path / "export"), "--dry-run")
    assert shown == f"checkpoint of step {demo['steps']} -> {tmp_path / 'export'}\n" and not any(tmp_path.iterdir())
    shown = arpo_here("serve", demo["run_dir"], "--dry-run")
    assert demo["export_dir"] in shown and "tools search, python" in shown and "listen on 127.0.0.1" in shown
    arpo_here("export", demo["run_dir"], "--out", str(tmp_path / "export"))
    ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path / "export", Path(demo["export_dir"])))
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours), "the newest checkpoint is the end of training"

    drawn = arpo_here("trees", demo["run_dir"], "--step", "1", "--count", "2")
    assert "unique/flat" in drawn and drawn.count(" trajectories, ") == 2


def test_stored_branch_decisions_follow_from_their_trees(demo: dict[str, Any], capsys: Any) -> None:
    check_decisions(demo, capsys)


@pytest.mark.slow_campaign
def test_demo_runs_without_namespaces_and_says_so(tmp_path: Path) -> None:
    program = WITHOUT_NAMESPACES + "from arpo_megatron.__main__ import main; main()"
    figures = run_demo(tmp_path, *SHORT_DEMO, arpo=[sys.executable, "-c", program])
    check_run(figures)
    assert figures["screen"].count("isolated at level process only") == 1


@pytest.mark.slow_campaign
@pytest.mark.parametrize("seed", [7])
def test_agent_learns(tmp_path: Path, seed: int, capsys: Any) -> None:
    """The whole demo, as `make demo` runs it: held-out success rises from mediocre to good."""
    figures = run_demo(tmp_path, f"seed={seed}")
    assert figures["success_before"] <= 0.60
    assert figures["success_after"] >= 0.85
    check_run(figures)
    check_decisions(figures, capsys)


@pytest.mark.slow_campaign
def test_agent_learns_in_fp8(tmp_path: Path) -> None:
    """The whole demo over Transformer Engine's layers, whose extension is emulated."""
    figures = run_demo(tmp_path, "model.fp8=blockwise")
    assert figures["success_before"] <= 0.65
    assert figures["success_after"] >= 0.85
    assert figures["screen"].count("fp8 blockwise (emulated)") == figures["steps"]


def check_run(demo: dict[str, Any]) -> None:
    """Check that trees forked, trainer and engine agree after every push, and the radix cache served the forks."""
    assert demo["forks"] > 0 and demo["tool_calls_executed"] > 0 and demo["tool_calls_inherited"] > 0
    assert demo["logprob_gap_max"] < 1e-3
    rows = rows_of(Path(demo["run_dir"]) / "metrics.jsonl")
    assert len(rows) == demo["steps"]
    assert all(row["logprob_gap"] < 1e-3 for row in rows)
    assert demo["cached_prompt_share"] > demo["predicted_cached_share"] - 0.01, "the trees' shape guarantees this share"


def check_decisions(demo: dict[str, Any], capsys: Any) -> None:
    """Check what `arpo replay-tree` reports of every stored step, without a process for each."""
    files = sorted((Path(demo["run_dir"]) / "trees").iterdir())
    assert len(files) == demo["steps"]
    for file in files:
        assert replay_trees(file, tree=None, config=None), capsys.readouterr().out
        assert "all follow" in capsys.readouterr().out


def arpo(*arguments: str) -> str:
    """Run `arpo`, which must succeed; returns its standard output."""
    done = subprocess.run([*ARPO, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def arpo_here(*arguments: str) -> str:
    """Run `arpo` in this process, which saves its imports; it must succeed. Returns its standard output."""
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return done.stdout
