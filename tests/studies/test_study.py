"""Planning, resuming and the report of a study from written results; a tiny study runs for real in `slow_campaign`."""

import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from arpo_megatron.cli.study import app
from arpo_megatron.config.io import dump_config, save_config
from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.monitor.progress import Progress
from arpo_megatron.studies.designs import DESIGNS, arm_recipe
from arpo_megatron.studies.report import StudyResults, render, write_report
from arpo_megatron.studies.results import collect
from arpo_megatron.studies.runner import StudyRunner
from arpo_megatron.studies.runs import StudyRun, check_runs, plan_runs
from arpo_megatron.utils.processes import ProcessDiedError

DESIGN = replace(DESIGNS["efficiency"], arms=("grpo", "arpo"))
TINY = [
    *("model.hidden_size=32", "model.layers=1", "model.heads=2", "model.kv_heads=2", "model.ffn_size=64"),
    *("data.tasks=40", "data.held_out=9", "evaluation.tasks=9", "evaluation.every=1"),
    *("sft.steps=2", "sft.batch=4", "train.steps=2", "train.tasks_per_step=2", "algorithm.group_size=4"),
    *("algorithm.initial_rollouts=2", "algorithm.minibatches=1", "rollout.max_response_tokens=24"),
]
RISING = {"grpo": [0.2, 0.5], "arpo": [0.2, 0.8]}
CALLS = {"grpo": 100, "arpo": 60}


def finish(run: StudyRun, successes: list[float], calls: int) -> None:
    """Write the files of a finished run that a study reads: one evaluation every four steps."""
    run.directory.held_out.mkdir(parents=True)
    save_config(run.config, run.directory.config)
    for number, success in enumerate(successes):
        tasks = {f"held-out-{index}-hops{1 + index % 3}": index < round(10 * success) for index in range(10)}
        found: dict[str, Any] = {
            "step": 4 * number,
            "totals": {"tool_calls_executed": calls * number, "tool_calls_inherited": number},
            "solved": tasks,
            "tool_calls": {"ok": 30, "error": 1},
            "rewards": {task: float(solved) for task, solved in tasks.items() if not task.startswith("held-out-9")},
        }
        (run.directory.held_out / f"step_{4 * number:06d}.json").write_text(json.dumps(found))
    run.directory.result.write_text(json.dumps({"step": run.config.train.steps}))


def finished(tmp_path: Path, ends: dict[str, list[float]] = RISING, seeds: int = 2) -> list[StudyRun]:
    runs = plan_runs(DESIGN, tmp_path, seeds, [])
    for run in runs:
        finish(run, ends[run.arm], CALLS[run.arm])
    return runs


def test_arms_differ_from_the_recipe_in_the_algorithm_only() -> None:
    base = dump_config(resolve.resolve("trails"))
    for design in DESIGNS.values():
        assert design.control in design.arms
        for arm in design.arms:
            job = dump_config(resolve.resolve(arm_recipe(arm)))
            assert {key for key in base if job[key] != base[key]} <= {"algorithm"}


def test_arms_of_a_seed_share_one_sft(tmp_path: Path) -> None:
    runs = plan_runs(DESIGN, tmp_path, 2, ["train.steps=3"])
    for run in runs:
        assert run.sft_run is not None
        assert run.sft_run.directory.path == tmp_path / "sft" / f"seed{run.seed}"
        assert run.config.model.path == run.sft_run.directory.sft_model
        assert (run.config.seed, run.config.sft.steps, run.config.train.steps) == (run.seed, 0, 3)
        assert run.sft_run.config.sft.steps > 0
    assert len({run.directory.path for run in runs}) == 4


def test_finished_runs_are_kept_and_started_runs_resume(tmp_path: Path) -> None:
    first, other = plan_runs(DESIGN, tmp_path, 1, [])
    finish(first, [0.1, 0.2], 10)
    assert first.done
    assert not other.started
    assert other.command[-1] != "--resume"
    other.directory.path.mkdir(parents=True)
    save_config(other.config, other.directory.config)
    assert other.command[-1] == "--resume"
    check_runs([first, other])
    with pytest.raises(UserError, match="was started with another config"):
        check_runs(plan_runs(DESIGN, tmp_path, 1, ["optimizer.lr=0.5"]))
    assert not plan_runs(DESIGN, tmp_path, 1, ["train.steps=99"])[0].done
    with pytest.raises(UserError, match=r"evaluation\.before"):
        check_runs(plan_runs(DESIGN, tmp_path / "new", 1, ["evaluation.before=false"]))


def test_runner_starts_no_process_for_finished_runs(tmp_path: Path) -> None:
    with Progress() as progress:
        StudyRunner(finished(tmp_path), tmp_path, 2, progress).run()
    assert not list((tmp_path / "logs").glob("*"))


def test_results_have_a_row_per_evaluation_and_level(tmp_path: Path) -> None:
    rows = collect(finished(tmp_path))
    assert len(rows) == 2 * 2 * 2 * 4
    one = rows[(rows.arm == "arpo") & (rows.seed == 1) & (rows.step == 4)].set_index("level")
    assert one.tool_calls_executed.unique().tolist() == [60]
    assert one.loc["all", "tasks"] == 10
    assert one.loc["all", "unfinished"] == 1  # task 9, which no mean contains
    assert one.loc["all", "success"] == one.loc["all", "reward"] == pytest.approx(8 / 9)
    assert one.loc["hops2", "unfinished"] == 0
    assert (one.evaluation_calls == 31).all()
    assert (one.calls_failed == 1).all()
    assert one.loc["hops1", "success"] == 1.0  # tasks 0, 3 and 6


def test_report_compares_arms_at_equal_calls_and_at_half_the_budget(tmp_path: Path) -> None:
    rows = collect(finished(tmp_path))
    paths = write_report(
        StudyResults.select(DESIGN, rows, "arpo study efficiency --seeds 2", [1, 2]), tmp_path / "report"
    )
    page = paths[0].read_text()
    control = (2 + 0.6 * 3) / 9  # grpo after 60 of its 100 calls; 9 of 10 tasks are finished
    arpo, half = 8 / 9, 5 / 9
    gain = f"{arpo - control:+.3f}"
    assert f"- arpo is at {arpo:.3f}, {gain} ({gain} to {gain}, significant with 2 seeds)" in page
    assert f"arpo after 30 calls less grpo after 60: {half - control:+.3f}" in page
    assert "At 60 executed calls" in page
    assert "8 of 80 held-out trajectories could not be finished" in page
    assert '8 of 248 tool calls were not answered "ok"' in page
    assert "`arpo study efficiency --seeds 2`" in page
    assert f"| grpo | 25.0 | {control:.3f} |" in page  # no interval: both seeds agree
    assert pd.read_parquet(paths[2]).equals(rows)
    svg = paths[1].read_text()
    assert ">arpo<" in svg
    assert ">grpo<" in svg


def test_report_has_further_pairs_only_for_arms_that_ran(tmp_path: Path) -> None:
    design = replace(DESIGNS["efficiency"], arms=("grpo", "random", "arpo"))
    runs = plan_runs(design, tmp_path, 2, [])
    for run in runs:
        finish(run, [0.2, 0.5 if run.arm != "arpo" else 0.9 if run.seed == 1 else 0.8], 60)
    page = render(StudyResults.select(design, collect(runs), "x", [1, 2]))
    gains = [4 / 9, 3 / 9]  # 9 of 10 tasks are finished; seed 1 solves all of them
    middle, half = float(np.mean(gains)), 12.706205 * (gains[0] - gains[1]) / 2
    ends = f"{middle - half:+.3f} to {middle + half:+.3f}"
    assert f"arpo less random, at the same calls: {middle:+.3f} ({ends}, not significant with 2 seeds)." in page
    without = replace(design, arms=("grpo", "arpo"))
    rows = collect([run for run in runs if run.arm != "random"])
    assert "arpo less" not in render(StudyResults.select(without, rows, "x", [1, 2]))


def test_report_leaves_out_seeds_without_all_arms(tmp_path: Path) -> None:
    runs = finished(tmp_path, seeds=3)
    runs[-1].directory.result.unlink()
    results = StudyResults.select(DESIGN, collect(runs), "x", [1, 2, 3])
    assert results.seeds == [1, 2]
    page = render(results)
    assert "left out: [3]" in page
    assert "8 of 80 held-out trajectories" in page  # 2 seeds x 2 arms x 2 evaluations of 10
    with pytest.raises(UserError, match="no seed has a finished run"):
        StudyResults.select(DESIGN, collect(runs[:1]), "x", [1])


def test_failed_run_does_not_withhold_the_report_of_other_seeds(tmp_path: Path) -> None:
    for run in plan_runs(DESIGN, tmp_path, 2, []):
        if run.seed == 1:
            finish(run, [0.2, 0.5], 100)
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "seed2").touch()  # not a directory
    words = ["efficiency", "--seeds", "2", "--out", str(tmp_path), "--only", "grpo,arpo"]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, ProcessDiedError)
    assert re.search(r"1 of the runs failed; .*\ncold start seed 2", str(done.exception))
    page = (tmp_path / "report" / "README.md").read_text()
    assert "mean over 1 seed with" in page
    assert "left out: [2]" in page
    assert "results.parquet" in done.output


def test_curves_of_a_seed_start_from_the_mean_of_its_arms(tmp_path: Path) -> None:
    runs = finished(tmp_path, {"grpo": [0.2, 0.5], "arpo": [0.4, 0.8]})
    curves = StudyResults.select(DESIGN, collect(runs), "x", [1, 2]).curves("success")
    values = [curve.values for arm in ("grpo", "arpo") for curve in curves[arm]]
    np.testing.assert_allclose(values, [[3 / 9, 5 / 9]] * 2 + [[3 / 9, 8 / 9]] * 2)


def study(out: Path, *arguments: str) -> list[str]:
    options = ["--seeds", "1", "--jobs", "2", "--only", "grpo,arpo", "--out", str(out)]
    return [sys.executable, "-m", "arpo_megatron", "study", "efficiency", *TINY, *arguments, *options]


@pytest.mark.slow_campaign
@pytest.mark.timeout(1600)
def test_interrupted_study_resumes_and_reports(tmp_path: Path) -> None:
    out = tmp_path / "study"
    with subprocess.Popen(study(out), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as begun:
        deadline = time.monotonic() + 600
        while not (out / "sft" / "seed1" / "events.jsonl").exists():
            assert begun.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        begun.send_signal(signal.SIGINT)
        _, errors = begun.communicate(timeout=300)
    assert begun.returncode == 130
    assert "the same command" in errors
    done = subprocess.run(study(out), capture_output=True, text=True, timeout=1200)
    logs = "\n".join(path.read_text()[-2000:] for path in (out / "logs").glob("*.log"))
    assert done.returncode == 0, done.stderr + logs
    rows = pd.read_parquet(out / "report" / "results.parquet")
    whole = rows[rows.level == "all"]
    assert sorted(zip(whole.arm, whole.step, strict=True)) == [
        (arm, step) for arm in ("arpo", "grpo") for step in range(3)
    ]
    assert set(whole.tasks) == {9}
    events = [json.loads(line) for line in (out / "runs" / "arpo-seed1" / "events.jsonl").read_text().splitlines()]
    evaluations = [event["when"] for event in events if event["kind"] == "evaluation"]
    assert sorted(set(evaluations)) == ["after", "before", "step_1"]
    before = whole[whole.step == 0].set_index("arm").success
    result = json.loads((out / "runs" / "arpo-seed1" / "result.json").read_text())
    assert result["success"].keys() == {"before", "step_1", "after"}
    assert result["success"]["before"] == before["arpo"]
    stamp = (out / "runs" / "grpo-seed1" / "events.jsonl").stat().st_mtime
    again = subprocess.run(study(out), capture_output=True, text=True, timeout=300)
    assert again.returncode == 0
    assert ": 0 to do" in again.stderr
    assert (out / "runs" / "grpo-seed1" / "events.jsonl").stat().st_mtime == stamp
