"""Commands for submitted runs: status, logs, health, and the commands that they print."""

import os
import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from arpo_megatron.cli.cluster import app
from arpo_megatron.cluster import runs
from arpo_megatron.cluster.profile import (
    load_profile,
)
from arpo_megatron.cluster.slurm import JobState
from arpo_megatron.cluster.ssh import HINT_VARIABLE
from arpo_megatron.cluster.submit import prepare_submission, submit_jobs
from arpo_megatron.config.io import save_config
from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.utils.atomic import write_json
from tests.cluster.stand_in import PLAIN, Queue, in_chain, profile, submitted


def test_status_queries_slurm_once_and_ignores_jobs_of_other_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    queue = Queue(takes=2, cancels=False)
    run = in_chain(queue, tmp_path, monkeypatch)
    monkeypatch.setattr(runs, "_submitted", lambda cluster: [run, run])
    queue.asked.clear()
    assert runs.print_status(None, None) == [run, run]
    assert queue.asked == ["squeue"]
    assert capsys.readouterr().out.count("job 4711 PENDING") == 2
    queue.name = "another-users"
    assert runs.newest_state(run) is None
    with pytest.raises(UserError, match="has no waiting or running job"):
        runs.cancel(run)


def test_status_of_all_runs_includes_one_with_an_unknown_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = in_chain(Queue(takes=2, cancels=False), tmp_path, monkeypatch)
    old = RunDirectory(tmp_path / "old")
    shutil.copytree(run.path, old.path)
    old.config.write_text("rollout: {beam_size: 2}")
    monkeypatch.setattr(runs, "_submitted", lambda cluster: [old, run])
    runs.print_status(None, None)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("old: job 4711 PENDING, ") and "unknown config key rollout.beam_size" in first
    assert second.endswith("no checkpoint yet, 400 updates wanted; then 28 steps")
    with pytest.raises(UserError, match=r"unknown config key rollout\.beam_size"):
        runs.print_status(str(old.path), None)


def test_printed_commands_have_the_cluster_of_a_remote_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user of a remote login node must give the profile with each command."""
    monkeypatch.setenv(HINT_VARIABLE, " --cluster far")
    queue = Queue(takes=1, cancels=False)
    run = in_chain(queue, tmp_path, monkeypatch)
    name, error = run.path.name, run.path.with_suffix(".error")
    assert f"with arpo cancel {name} --cluster far" in error.read_text()
    with pytest.raises(UserError, match=f"in the queue: run arpo cancel {name} --cluster far first"):
        submit_jobs(prepare_submission(resolve.load(run.config), profile(runs=str(tmp_path)), nodes=1, resume=True))
    queue.cancels = True
    runs.cancel(run)
    assert f"arpo resume {name} --cluster far continues the run" in capsys.readouterr().out
    in_chain(Queue(takes=2), tmp_path, monkeypatch, resume=True)
    assert f"arpo resume {name} --cluster far submits it again" in error.read_text()
    with pytest.raises(UserError, match=f"arpo status {name} --cluster far"):
        runs.print_health(run)


@pytest.mark.parametrize("named", ["far", None])
def test_printed_commands_identify_the_run(named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names repeat, and commands without `--cluster` only search the profiles in `slurm/clusters`."""
    (clusters := tmp_path / "clusters").mkdir()
    monkeypatch.setattr("arpo_megatron.cluster.profile.DIRECTORY", clusters)
    (clusters / "here.yaml").write_text(yaml.safe_dump({**PLAIN, "runs": str(tmp_path / "here")}))
    (mine := tmp_path / "mine.yaml").write_text(yaml.safe_dump({**PLAIN, "runs": str(tmp_path / "mine")}))
    queue = Queue(takes=9)
    monkeypatch.setattr("arpo_megatron.cluster.submit.submit_one", queue.send)
    monkeypatch.setattr("arpo_megatron.cluster.slurm.call", queue.call)

    def printed(cluster: str, *arguments: str) -> str:
        arguments = ("submit", "quickstart", "platform=cpu", "--nodes", "1", "--cluster", cluster, *arguments)
        done = CliRunner().invoke(app, arguments, catch_exceptions=False)
        logs = done.stdout.splitlines()[-1].split(" | ")[1]
        assert done.stderr == f"next: {logs}\n", "it can be copied"
        return done.stdout.splitlines()[-1]

    name, other = "quickstart-arpo-seed1", tmp_path / "mine" / "quickstart-arpo-seed1"
    if named:  # the user of a remote login node gives the profile each time
        monkeypatch.setenv(HINT_VARIABLE, f" --cluster {named}")
        found = f"{name} --cluster {named}"
        assert printed(str(mine)) == f"arpo status {found} | arpo logs {found} --follow | arpo cancel {found}"
        assert f"arpo status {tmp_path}/apart --cluster far |" in printed(str(mine), f"run_dir={tmp_path}/apart")
        return
    assert printed(str(mine)).startswith(f"arpo status {other} | arpo logs {other} --follow | arpo cancel {other}")
    assert printed("here").startswith(f"arpo status {name} | arpo logs {name} --follow | arpo cancel {name}")
    run = runs.find_run(str(other))
    with pytest.raises(UserError, match=f"in the queue: run arpo cancel {other} first"):
        submit_jobs(prepare_submission(resolve.load(run.config), load_profile(str(mine)), nodes=1, resume=True))
    with pytest.raises(UserError, match=f"no running job: arpo status {other}$"):
        runs.print_health(run)
    assert printed("here", f"run_dir={tmp_path}/apart").startswith(f"arpo status {tmp_path}/apart |")


def test_status_reports_progress_of_sft_and_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "job_states_of", lambda runs: [[JobState("1", "RUNNING")] for _ in runs])
    run = submitted(tmp_path, resolve.resolve("quickstart"), profile(runs=str(tmp_path)))

    def progress() -> str:
        monkeypatch.setattr(runs, "_submitted", lambda cluster: [run])
        with redirect_stdout(StringIO()) as output:
            runs.print_status(None, None)
        return output.getvalue().strip().removeprefix("run: job 1 RUNNING, ")

    def saved(place: Path, step: int) -> None:
        (place / f"step_{step}").mkdir(parents=True)

    assert progress() == "cold start: no checkpoint yet, 400 updates wanted; then 28 steps"
    saved(run.sft_checkpoints, 100)
    saved(run.sft_checkpoints, 200)
    assert progress() == "cold start: newest checkpoint step_200 of 400; then 28 steps"
    run.sft_model.mkdir()
    (run.sft_model / "config.json").write_text("{}")
    assert progress() == "the cold start is done, no checkpoint yet, 28 steps wanted"
    saved(run.checkpoints, 3)
    assert progress() == "newest checkpoint step_3 of 28"
    write_json(run.result, {"step": 28})
    assert progress() == "training is done (28 steps)"
    save_config(
        resolve.with_overrides(resolve.load(run.config), ["train.steps=50"]), run.config
    )  # as `arpo resume` does
    assert progress() == "newest checkpoint step_3 of 50"

    job = resolve.resolve("sft_7b", overrides=["sft.steps=500"])
    run = submitted(tmp_path / "b", job, profile(runs=str(tmp_path)))
    assert progress() == "cold start: no checkpoint yet, 500 updates wanted"
    saved(run.sft_checkpoints, 480)
    assert progress() == "cold start: newest checkpoint step_480 of 500"
    write_json(run.sft_result, {})  # not exported yet
    assert progress() == "cold start: newest checkpoint step_480 of 500"
    run.sft_model.mkdir()
    (run.sft_model / "config.json").write_text("{}")
    assert progress() == "training is done"
    run = submitted(
        tmp_path / "c", resolve.resolve("quickstart", overrides=["sft.steps=0"]), profile(runs=str(tmp_path))
    )
    assert progress() == "no checkpoint yet, 28 steps wanted"


def test_logs_takes_names_and_no_patterns(tmp_path: Path) -> None:
    run = submitted(tmp_path, resolve.resolve("quickstart"), profile(runs=str(tmp_path)))
    run.logs.mkdir(exist_ok=True)
    for name in ("train.log", "engine-0.log", "log-7_0.out", "log-7_1.out"):
        (run.logs / name).write_text("")
    assert runs.log_of(run, "train").name == "train.log"
    assert runs.log_of(run, "job").name.startswith("log-7_")
    for name in ("*", "engine-?", "[t]rain", "../logs/train"):
        with pytest.raises(UserError, match=r"has no log of .* yet; it has: job, engine-0, train"):
            runs.log_of(run, name)


def test_followed_log_survives_a_restart_of_the_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = submitted(tmp_path, resolve.resolve("quickstart"), profile(runs=str(tmp_path)))
    down = UserError("squeue -h -t: slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    log = run.logs / "log-1.out"
    answers = [down, down, JobState("1", "RUNNING"), down, down, JobState("1", "COMPLETED")]

    def newest_state(run: RunDirectory) -> JobState:
        if len(answers) == 4:
            run.logs.mkdir()
            log.write_text("step 1\n")
        answer = answers.pop(0)
        if isinstance(answer, UserError):
            raise answer
        return answer

    monkeypatch.setattr(runs, "newest_state", newest_state)
    monkeypatch.setattr(runs, "_FOLLOW_INTERVAL_S", 0.0)
    monkeypatch.setattr(runs, "_STATE_INTERVAL_S", 0.0)
    runs.print_log(run, "job", lines=40, follow=True)
    output = capsys.readouterr()
    assert (output.out, output.err) == ("step 1\n", f"arpo: {down}; trying again\n" * 2), "one line per outage"
    answers[:] = [down, down]
    monkeypatch.setattr(runs, "_SILENCE_S", 0.0)
    with pytest.raises(UserError, match="connect failure"):
        runs.print_log(run, "job", lines=40, follow=True)


@pytest.mark.parametrize("lines", [0, 2])
def test_followed_log_has_all_output_of_restarts(
    lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two restarts begin, and the last one ends, between two reads."""
    run = submitted(tmp_path, resolve.resolve("quickstart"), profile(runs=str(tmp_path)))
    run.logs.mkdir()

    def write(life: int, text: str) -> None:
        log = run.logs / f"log-1_{life}.out"
        with log.open("a") as file:
            file.write(text)
        os.utime(log, (life, life))

    looks = 0

    def newest_state(run: RunDirectory) -> JobState:
        nonlocal looks
        looks += 1
        if looks == 2:
            write(0, "saved\n")
            for life in (1, 2):
                write(life, "".join(f"life {life} step {step}\n" for step in range(100)))
        return JobState("1", "RUNNING" if looks < 2 else "COMPLETED")

    write(0, "step 1\nstep 2\nstep 3\n")
    monkeypatch.setattr(runs, "newest_state", newest_state)
    monkeypatch.setattr(runs, "_FOLLOW_INTERVAL_S", 0.0)
    monkeypatch.setattr(runs, "_STATE_INTERVAL_S", 0.0)
    runs.print_log(run, "job", lines=lines, follow=True)
    more = [f"life {life} step {step}" for life in (1, 2) for step in range(100)]
    assert capsys.readouterr().out.splitlines() == [*["step 2", "step 3"][:lines], "saved", *more]
