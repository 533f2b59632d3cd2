"""Pieces, resuming, the report's sentences, and a study of two arms for real with tiny numbers."""

import json
import shlex
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

from arpo_megatron.cli.study import _study
from arpo_megatron.config.io import dump_config, save_config
from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.monitor.tree_store import TreeLog
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.studies import entropies, pieces, table
from arpo_megatron.studies.designs import DESIGNS, recipe_of
from arpo_megatron.studies.picture import apart
from arpo_megatron.studies.report import StudyResults, render, write_report
from arpo_megatron.tasks.base import Task
from arpo_megatron.tree import Role, RolloutTree, ToolRecord
from arpo_megatron.utils.processes import ProcessDiedError

DESIGN = replace(DESIGNS["efficiency"], arms=("grpo", "arpo"))
TINY = [
    *("model.hidden_size=32", "model.layers=1", "model.heads=2", "model.kv_heads=2", "model.ffn_size=64"),
    *("data.tasks=40", "data.held_out=9", "evaluation.tasks=9", "evaluation.every=1"),
    *("sft.steps=2", "sft.batch=4", "train.steps=2", "train.tasks_per_step=2", "algorithm.group_size=4"),
    *("algorithm.initial_rollouts=2", "algorithm.minibatches=1", "rollout.max_response_tokens=24"),
]


def finish(run: pieces.ArmRun, values: list[float], calls: int) -> None:
    """The files that a finished run leaves, as far as a study reads them."""
    place = run.piece.run
    place.held_out.mkdir(parents=True)
    save_config(run.piece.config, place.config)
    for number, value in enumerate(values):
        tasks = {f"held-out-{index}-hops{1 + index % 3}": index < round(10 * value) for index in range(10)}
        found: dict[str, Any] = {
            "step": 4 * number,
            "totals": {"tool_calls_executed": calls * number, "tool_calls_inherited": number},
            "solved": tasks,
            "tool_calls": {"ok": 30, "error": 1},
            "rewards": {task: float(solved) for task, solved in tasks.items() if not task.startswith("held-out-9")},
        }
        (place.held_out / f"step_{4 * number:06d}.json").write_text(json.dumps(found))
    place.result.write_text(json.dumps({"step": run.piece.config.train.steps}))


def finished(
    tmp_path: Path, ends: dict[str, list[float]], calls: dict[str, int], seeds: int = 2
) -> list[pieces.ArmRun]:
    runs = pieces.plan(DESIGN, tmp_path, seeds, [])
    for run in runs:
        finish(run, ends[run.arm], calls[run.arm])
    return runs


def test_every_arm_is_a_variant_whose_job_differs_in_parts_and_numbers_only() -> None:
    base = dump_config(resolve.resolve("trails"))
    for design in DESIGNS.values():
        assert design.control in design.arms
        for arm in design.arms:
            job = dump_config(resolve.resolve(recipe_of(arm)))
            assert {key for key in base if job[key] != base[key]} <= {"algorithm"}


def test_arms_of_a_seed_begin_with_one_cold_start_and_seeds_differ(tmp_path: Path) -> None:
    runs = pieces.plan(DESIGN, tmp_path, 2, ["train.steps=3"])
    starts = {run.seed: {run.piece.config.model.path} for run in runs}
    for run in runs:
        config = run.piece.config
        assert starts[run.seed] == {config.model.path}
        assert (config.seed, config.sft.steps, config.train.steps) == (run.seed, 0, 3)
        assert run.piece.needs is not None
        assert run.piece.needs.run.sft_model == config.model.path
        assert run.piece.needs.config.sft.steps > 0
    assert len({run.piece.run.path for run in runs}) == 4


def test_what_is_finished_is_kept_and_what_was_stopped_goes_on(tmp_path: Path) -> None:
    first, *others = pieces.plan(DESIGN, tmp_path, 1, [])
    finish(first, [0.1, 0.2], 10)
    assert first.piece.done
    assert not others[0].piece.begun
    assert others[0].piece.command[-1] != "--resume"
    others[0].piece.run.path.mkdir(parents=True)
    save_config(others[0].piece.config, others[0].piece.run.config)
    assert others[0].piece.command[-1] == "--resume"
    pieces.check([first, *others])
    with pytest.raises(UserError, match="was started with another config"):
        pieces.check(pieces.plan(DESIGN, tmp_path, 1, ["optimizer.lr=0.5"]))
    longer = pieces.plan(DESIGN, tmp_path, 1, ["train.steps=99"])[0]
    assert not longer.piece.done
    with pytest.raises(UserError, match=r"evaluation\.before"):
        pieces.check(pieces.plan(DESIGN, tmp_path / "new", 1, ["evaluation.before=false"]))


def test_the_table_has_every_evaluation_and_level(tmp_path: Path) -> None:
    rows = table.collect(finished(tmp_path, {"grpo": [0.2, 0.5], "arpo": [0.2, 0.8]}, {"grpo": 100, "arpo": 60}))
    assert len(rows) == 2 * 2 * 2 * 4
    one = rows[(rows.arm == "arpo") & (rows.seed == 1) & (rows.step == 4)].set_index("level")
    assert one.tool_calls_executed.unique().tolist() == [60]
    assert one.loc["all", "tasks"] == 10
    assert one.loc["all", "unfinished"] == 1  # task 9, which no mean has
    assert one.loc["all", "success"] == one.loc["all", "reward"] == pytest.approx(8 / 9)
    assert one.loc["hops2", "unfinished"] == 0
    assert (one.evaluation_calls == 31).all()
    assert (one.calls_failed == 1).all()
    assert one.loc["hops1", "success"] == 1.0  # tasks 0, 3 and 6


@pytest.mark.parametrize(
    ("grpo", "arpo", "said"),
    [
        (
            [0.2, 0.5],
            [0.2, 0.8],
            "Here grpo ends at 0.556 after 100 calls. arpo reaches that after 30 calls, 30% of grpo's: there the two "
            "means cross, which has no interval. At the last of its 60 calls arpo is at 0.889, +0.333 (+0.333 to "
            "+0.333: told from 0 by 2 seeds) against the end of grpo. By single seeds grpo improves in 2 of 2, and in "
            "2 of these arpo reaches its end, with 30% of its calls in the geometric mean (30% to 30%); seeds that",
        ),
        ([0.2, 0.5], [0.2, 0.3], "arpo does not reach that within its 60 calls (0.333 at most). By single seeds"),
        (
            [0.5, 0.4],
            [0.5, 0.8],
            "no better than its start (0.556): there is no gain that arpo could reach with fewer. By single seeds grpo "
            "improves in 0 of 2, and in 0 of these arpo reaches its end.",
        ),
    ],
)
def test_the_report_says_what_was_found(tmp_path: Path, grpo: list[float], arpo: list[float], said: str) -> None:
    rows = table.collect(finished(tmp_path, {"grpo": grpo, "arpo": arpo}, {"grpo": 100, "arpo": 60}))
    paths = write_report(StudyResults.of(DESIGN, rows, "arpo study efficiency --seeds 2", [1, 2]), tmp_path / "report")
    page = paths[0].read_text()
    assert said in page
    assert "At 60 executed calls" in page
    assert "Of 80 held-out trajectories 8 could not be finished (they are left out)" in page
    assert 'of their 248 tool calls 8 were not answered "ok"' in page
    assert "`arpo study efficiency --seeds 2`" in page
    start, end = round(10 * grpo[0]) / 9, round(10 * grpo[1]) / 9
    value = f"{start + 0.6 * (end - start):.3f}"  # of one evaluation's 100 calls in 4 steps, at call 60
    assert f"| grpo | 25.0 | {value} |" in page  # without an interval: both seeds say the same
    assert pd.read_parquet(paths[2]).equals(rows)
    svg = paths[1].read_text()
    assert ">arpo<" in svg
    assert ">grpo<" in svg


def test_the_report_compares_the_further_pairs_of_a_design_whose_arms_have_run(tmp_path: Path) -> None:
    design = replace(DESIGNS["efficiency"], arms=("grpo", "random", "arpo"))
    ends = {"grpo": [0.2, 0.5], "random": [0.2, 0.5], "arpo": [0.2, 0.8]}
    runs = pieces.plan(design, tmp_path, 2, [])
    for run in runs:
        finish(run, [*ends[run.arm][:1], ends[run.arm][1] + (0.1 if (run.arm, run.seed) == ("arpo", 1) else 0)], 60)
    page = render(StudyResults.of(design, table.collect(runs), "x", [1, 2]))
    gains = [4 / 9, 3 / 9]  # 9 of 10 tasks are finished, all of which seed 1 solves
    middle, half = float(np.mean(gains)), 12.706205 * (gains[0] - gains[1]) / 2
    told = f"{middle:+.3f} ({middle - half:+.3f} to {middle + half:+.3f}: not told from 0 by 2 seeds)"
    area = f"{middle / 2:+.3f} ({(middle - half) / 2:+.3f} to {(middle + half) / 2:+.3f}: not told from 0 by 2 seeds)"
    assert f"arpo less random, in the same way: {told}; of the mean reward up to there {area}." in page
    without = replace(design, arms=("grpo", "arpo"))
    rows = table.collect([run for run in runs if run.arm != "random"])
    assert "arpo less" not in render(StudyResults.of(without, rows, "x", [1, 2]))


def test_seeds_without_all_arms_are_left_out_and_named(tmp_path: Path) -> None:
    runs = finished(tmp_path, {"grpo": [0.2, 0.5], "arpo": [0.2, 0.4]}, {"grpo": 100, "arpo": 60}, seeds=3)
    runs[-1].piece.run.result.unlink()
    found = StudyResults.of(DESIGN, table.collect(runs), "x", [1, 2, 3])
    assert found.seeds == [1, 2]
    page = write_report(found, tmp_path / "report")[0].read_text()
    assert "left out: [3]" in page
    assert "Of 80 held-out trajectories 8 could not be finished" in page  # 2 seeds x 2 arms x 2 evaluations of 10
    assert 'of their 248 tool calls 8 were not answered "ok"' in page
    rows = found.rows.copy()
    rows.loc[(rows.seed == 3) & (rows.step == 4), "step"] = 40
    assert replace(found, rows=rows).steps() == found.steps() == {"grpo": 4, "arpo": 4}
    with pytest.raises(UserError, match="no seed has a finished run"):
        StudyResults.of(DESIGN, table.collect(runs[:1]), "x", [1])


def test_a_run_that_fails_does_not_keep_the_report_of_the_other_seeds_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for run in pieces.plan(DESIGN, tmp_path, 2, []):
        if run.seed == 1:
            finish(run, [0.2, 0.5], 100)
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "seed2").touch()  # no directory
    with pytest.raises(ProcessDiedError, match=r"1 of the runs failed; .*\ncold start seed 2"):
        _study("efficiency", [], 2, 1, tmp_path, None, "grpo,arpo")
    page = (tmp_path / "report" / "README.md").read_text()
    assert "mean over 1 seed with" in page
    assert "left out: [2]" in page
    assert "results.parquet" in capsys.readouterr().out


def test_arms_of_a_seed_begin_with_the_mean_of_what_they_measured_there(tmp_path: Path) -> None:
    runs = finished(tmp_path, {"grpo": [0.2, 0.5], "arpo": [0.4, 0.8]}, {"grpo": 100, "arpo": 60})
    curves = StudyResults.of(DESIGN, table.collect(runs), "x", [1, 2]).curves("success")
    values = [curve.values for arm in ("grpo", "arpo") for curve in curves[arm]]
    np.testing.assert_allclose(values, [[3 / 9, 5 / 9]] * 2 + [[3 / 9, 8 / 9]] * 2)


def test_labels_are_moved_apart_and_keep_their_order() -> None:
    placed = apart({"a": 0.5, "b": 0.5, "c": 0.52, "d": 0.9}, 0.05)
    heights = [placed[name] for name in "abcd"]
    assert heights == sorted(heights)
    assert min(np.diff(heights)) > 0.049
    assert placed["d"] == 0.9


def tool_record() -> ToolRecord:
    return ToolRecord("search", {"query": "x"}, "ok", seconds=0.0, cached=False)


def test_entropies_are_told_by_what_is_before_the_turn_and_later_tokens_are_elsewhere() -> None:
    tree = RolloutTree("task", [1])
    first = tree.add(0, Role.MODEL, [2, 3], logprobs=[-1.0] * 2, entropies=[0.5, 0.25])
    on = tree.add(first, Role.MODEL, [4, 4], logprobs=[-1.0] * 2, entropies=[9.0, 8.0])  # the same turn, after a push
    tool = tree.add(on, Role.TOOL, [5], tool=tool_record())
    tree.add(tool, Role.MODEL, [6] * 5, logprobs=[-1.0] * 5, entropies=[2.0, 1.0, 0.5, 0.25, 0.125])
    tree.add(tool, Role.MODEL, [7], logprobs=[-1.0], entropies=[1.0])
    assert entropies._measured(tree, 3) == [
        ("prompt", 0, 0.5),
        ("prompt", 1, 0.25),
        ("prompt", 2, 9.0),
        ("elsewhere", -1, 8.0),
        ("search", 0, 2.0),
        ("search", 1, 1.0),
        ("search", 2, 0.5),
        ("elsewhere", -1, 0.25),
        ("elsewhere", -1, 0.125),
        ("search", 0, 1.0),
    ]


def entropy_run(path: Path, seed: int, first: float) -> RunDirectory:
    """A run whose first token behind the tool's result has so many nats."""
    run = RunDirectory(path)
    config = resolve.resolve("trails+grpo", overrides=["algorithm.entropy_tokens=2", f"seed={seed}"])
    run.path.mkdir(parents=True)
    save_config(config, run.config)
    tree = RolloutTree("task", [1])
    asks = tree.add(0, Role.MODEL, [2] * 40, logprobs=[-1.0] * 40, entropies=[0.25] * 2 + [0.125] * 38)
    tool = tree.add(asks, Role.TOOL, [5], tool=tool_record())
    tree.add(tool, Role.MODEL, [6] * 40, logprobs=[-1.0] * 40, entropies=[first, 1.0] + [0.125] * 38)
    task = Task("task", (), "1", "math", "x")
    TreeLog(run, print).store(1, [ScoredTree(task, tree, np.ones(1), np.ones(1), np.ones(1, bool))], str)
    return run


def test_the_page_about_entropy_is_about_the_first_tokens_also_of_an_arm_without_forks(tmp_path: Path) -> None:
    runs = [entropy_run(tmp_path / f"grpo-{seed}", seed, 2.0) for seed in (1, 2)]
    page = entropies.write_report(entropies.collect(runs), tmp_path / "report", "made by hand")[0].read_text()
    assert "The first tokens behind a tool's result have 1.500 nats on average." in page
    assert "First tokens behind the prompt have 0.250; the difference is +1.250" in page
    assert "Tokens elsewhere have 0.125; the difference is +1.375" in page
    assert "| behind | 1 | 2 | all of these |" in page
    assert "| search | 2.000 | 1.000 | 1.500 |" in page
    assert "| elsewhere |  |  | 0.125 |" in page
    assert "| search | 2.5% | 23.1% | 66.7% | 33.3% |" in page  # 2 of 80 tokens, 3 of 13 nats, 2 and 1 of these 3
    assert "| elsewhere | 95.0% | 73.1% |  |  |" in page


def test_runs_of_a_seed_are_one_observation_of_entropy(tmp_path: Path) -> None:
    per_seed = {1: [1.0, 2.0, 3.0], 2: [3.0], 3: [6.0]}  # nats of the first of two tokens; the second has 1
    runs = [
        entropy_run(tmp_path / f"arm{number}-seed{seed}", seed, first)
        for seed, firsts in per_seed.items()
        for number, first in enumerate(firsts)
    ]
    rows = entropies.collect(runs)
    page = entropies.render(rows, "made by hand")
    means = [(float(np.mean(firsts)) + 1) / 2 for firsts in per_seed.values()]  # 1.5, 2, 3.5: less 0.25 for the prompt
    half = 4.302653 * float(np.std(means, ddof=1)) / 3**0.5  # Student's quantile with 2 degrees of freedom
    middle = float(np.mean(means))
    assert f"behind a tool's result have {middle:.3f} nats" in page
    ends = f"({middle - 0.25 - half:+.3f} to {middle - 0.25 + half:+.3f})"
    assert f"the difference is {middle - 0.25:+.3f} {ends} over 3 seeds (5 runs)." in page
    assert "mean and 95 % interval over 3 seeds (5 runs)](entropy.svg)" in page
    band = entropies._bands(rows[rows.behind == "search"], "step")["search"]
    np.testing.assert_allclose([band.mean[0], band.low[0], band.high[0]], [middle, middle - half, middle + half], 1e-6)


def test_runs_of_a_single_seed_tell_no_interval_of_entropy(tmp_path: Path) -> None:
    runs = [entropy_run(tmp_path / f"arm{number}", 1, first) for number, first in enumerate((1.0, 3.0))]
    rows = entropies.collect(runs)
    page = entropies.render(rows, "made by hand")
    assert "First tokens behind the prompt have 0.250, a difference of +1.250 (one seed: nothing can be said" in page
    assert "by step, mean of 1 seed (2 runs)](entropy.svg)" in page
    band = entropies._bands(rows, "step")["search"]
    assert band.low.tolist() == band.mean.tolist() == band.high.tolist()


def test_runs_of_one_name_are_told_apart_by_the_directories_above(tmp_path: Path) -> None:
    places = [
        (tmp_path / above / name, seed) for seed, (above, name) in enumerate([("a", "x"), ("b", "x"), ("b", "y")])
    ]
    runs = [entropy_run(path, min(seed, 1), 2.0) for path, seed in reversed(places)]
    rows = entropies.collect(runs)
    assert set(rows.run) == {"a/x", "b/x", "b/y"}
    assert "over 2 seeds (3 runs)" in entropies.render(rows, "made by hand")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(UserError, match=r"link/x is given twice: it is the run .*/a/x$"):
        entropies.collect([*runs, RunDirectory(tmp_path / "link" / "x")])


def test_the_page_about_entropy_names_a_command_that_can_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "study-x" / "runs"
    runs = [folder / f"arm {number}" for number in range(6)]
    for run in runs:
        run.mkdir(parents=True)
    monkeypatch.chdir(folder.parent)
    near = [run.relative_to(folder.parent) for run in runs]
    assert entropies.command(runs, folder.parent / "out") == "arpo study entropy runs/* --out out"
    assert entropies.command(near[::-1], Path("../out")) == "arpo study entropy runs/* --out ../out"
    assert entropies.command(near[:2], Path("out")) == "arpo study entropy 'runs/arm 0' 'runs/arm 1' --out out"
    listed = shlex.split(entropies.command(near[:5], Path("out")))  # a glob would take the sixth as well
    assert listed == ["arpo", "study", "entropy", *map(str, near[:5]), "--out", "out"]
    monkeypatch.chdir(folder)
    assert entropies.command([Path(run.name) for run in runs], Path("../out")) == "arpo study entropy * --out ../out"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert entropies.command(runs, Path("out")) == "arpo study entropy study-x/runs/* --out out"
    assert entropies.command(runs[:1], Path("out")) == "arpo study entropy 'study-x/runs/arm 0' --out out"


def study(out: Path, *words: str) -> list[str]:
    options = ["--seeds", "1", "--jobs", "2", "--only", "grpo,arpo", "--out", str(out)]
    return [sys.executable, "-m", "arpo_megatron", "study", "efficiency", *TINY, *words, *options]


@pytest.mark.timeout(1600)
def test_a_study_is_interrupted_goes_on_and_is_reported(tmp_path: Path) -> None:
    out = tmp_path / "study"
    with subprocess.Popen(study(out), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as begun:
        deadline = time.monotonic() + 600
        while not (out / "sft" / "seed1" / "events.jsonl").exists():
            assert begun.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        begun.send_signal(signal.SIGINT)
        _, said = begun.communicate(timeout=300)
    assert begun.returncode == 130
    assert "the same command goes on" in said
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
    told = [event["when"] for event in events if event["kind"] == "evaluation"]
    assert sorted(set(told)) == ["after", "before", "step_1"]
    before = whole[whole.step == 0].set_index("arm").success
    result = json.loads((out / "runs" / "arpo-seed1" / "result.json").read_text())
    assert result["success"].keys() == {"before", "step_1", "after"}
    assert result["success"]["before"] == before["arpo"]
    # Everything is done: the third time nothing is started.
    stamp = (out / "runs" / "grpo-seed1" / "events.jsonl").stat().st_mtime
    again = subprocess.run(study(out), capture_output=True, text=True, timeout=300)
    assert again.returncode == 0
    assert "0 pieces to do" in again.stderr
    assert (out / "runs" / "grpo-seed1" / "events.jsonl").stat().st_mtime == stamp
