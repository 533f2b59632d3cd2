"""What is submitted is exactly what was said, printed before it is done, and holds no secret."""

import os
import re
import subprocess
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from arpo_megatron.cli.cluster import app
from arpo_megatron.cluster import runs
from arpo_megatron.cluster.code_snapshot import ROOT, snapshot
from arpo_megatron.cluster.profile import (
    DIRECTORY,
    ClusterProfile,
    load_profile,
    profile_names,
    save_profile,
)
from arpo_megatron.cluster.slurm import JobState, Node, seconds
from arpo_megatron.cluster.slurm_checks import check_secrets
from arpo_megatron.cluster.ssh import HINT_VARIABLE, LoginNode, login_node
from arpo_megatron.cluster.submissions import config_before_auto
from arpo_megatron.cluster.submit import Submission, dry_run, prepare_submission, submit_jobs
from arpo_megatron.config import JobConfig
from arpo_megatron.config.io import save_config
from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve, run_directory
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.utils.atomic import write_json
from tests.cluster.stand_in import PLAIN, Queue, profile


def sbatch_lines(text: str) -> set[str]:
    return {line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")}


@pytest.mark.parametrize("recipe", resolve.recipe_names())
def test_dry_run_of_every_recipe(recipe: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    text = dry_run(prepare_submission(resolve.resolve(recipe), load_profile("onebox"), nodes=None))
    assert {"--partition=batch", "--time=00:20:00", "--exclusive"} <= sbatch_lines(text)
    assert "# trainer   node" in text
    assert not list(tmp_path.iterdir()), "a dry run leaves nothing behind"


def test_job_that_does_not_fit_is_not_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["parallel.tensor=1", "parallel.sequence=false", "parallel.data=8", "engine.replicas=1"]
    small = profile(gpu="h100-80", runs=str(tmp_path))
    job = prepare_submission(resolve.resolve("deepsearch_14b", overrides=words), small, nodes=None)
    assert "# arpo submit would refuse it: training needs" in dry_run(job)
    monkeypatch.setattr("arpo_megatron.cluster.submit.check_files", lambda config: None)  # its weights are not here
    with pytest.raises(UserError, match=r"the job does not fit: training needs .* --force submits it"):
        submit_jobs(job)
    assert not list(tmp_path.iterdir())
    whole = prepare_submission(resolve.resolve("deepsearch_14b"), small, nodes=None)
    assert whole.forecast is not None and whole.forecast.fits
    with pytest.raises(UserError, match="gpu: unknown type 'h1000'"):
        profile(gpu="h1000")


def in_chain(queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, resume: bool = False) -> RunDirectory:
    monkeypatch.setattr("arpo_megatron.cluster.submit._submit_one", queue.send)
    monkeypatch.setattr("arpo_megatron.cluster.slurm.call", queue.call)
    job = resolve.resolve("quickstart", overrides=["platform=cpu"])
    submission = prepare_submission(job, profile(runs=str(tmp_path)), nodes=1, chain=3, resume=resume)
    with pytest.raises(UserError, match="QOSMaxSubmitJobPerUserLimit") as refused:
        submit_jobs(submission)
    submission.run.path.with_suffix(".said").write_text(str(refused.value))
    return submission.run


def test_partly_refused_chain_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    queue = Queue(takes=2)
    run = in_chain(queue, tmp_path, monkeypatch)
    assert queue.jobs == {"4711": "CANCELLED", "4712": "CANCELLED"}
    said = run.path.with_suffix(".said").read_text()
    assert said.startswith("job 3 of 3: sbatch refused the job: QOS") and "cancelled job 4711, 4712" in said
    runs.print_status(str(run.path), None)
    assert "job 4712 CANCELLED" in capsys.readouterr().out


def test_jobs_of_a_refused_chain_can_be_cancelled_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(takes=1, cancels=False)
    run = in_chain(queue, tmp_path, monkeypatch)
    assert f"cancel the accepted jobs (4711) with arpo cancel {run.path}" in run.path.with_suffix(".said").read_text()
    queue.cancels = True
    runs.cancel(runs.find_run(str(run.path)))
    assert queue.jobs == {"4711": "CANCELLED"}


def test_status_queries_slurm_once_and_ignores_jobs_of_other_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    queue = Queue(takes=2, cancels=False)
    run = in_chain(queue, tmp_path, monkeypatch)
    monkeypatch.setattr(runs, "_submitted", lambda cluster: [run, run])
    queue.asked.clear()
    runs.print_status(None, None)
    assert queue.asked == ["squeue"]
    assert capsys.readouterr().out.count("job 4711 PENDING") == 2
    queue.name = "somebody-elses"
    assert runs.newest_state(run) is None
    with pytest.raises(UserError, match="has no waiting or running job"):
        runs.cancel(run)


def test_run_is_removed_if_its_first_job_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = in_chain(Queue(takes=0), tmp_path, monkeypatch)
    assert not run.path.exists()
    run.submissions.mkdir(parents=True)
    with pytest.raises(UserError, match="no job of this run was submitted"):
        runs.find_run(str(run.path))


def test_refused_resume_restores_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arpo_megatron.cluster.submit._submit_one", Queue(takes=0).send)
    monkeypatch.setattr("arpo_megatron.cluster.slurm.call", Queue(takes=0).call)
    job = resolve.resolve("quickstart", overrides=["platform=cpu"])
    run = submitted(tmp_path, job, profile(runs=str(tmp_path)))
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    changed = resolve.with_overrides(resolve.load(run.config), ["train.steps=999", "parallel.data=2"])
    again = prepare_submission(changed, profile(runs=str(tmp_path), time="08:00:00"), nodes=2, resume=True)
    with pytest.raises(UserError, match="QOSMaxSubmitJobPerUserLimit"):
        submit_jobs(again)
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_printed_commands_have_the_cluster_of_a_remote_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without its cluster a command finds no run that is on a login node elsewhere."""
    monkeypatch.setenv(HINT_VARIABLE, " --cluster far")
    queue = Queue(takes=1, cancels=False)
    run = in_chain(queue, tmp_path, monkeypatch)
    name, said = run.path.name, run.path.with_suffix(".said")
    assert f"with arpo cancel {name} --cluster far" in said.read_text()
    with pytest.raises(UserError, match=f"in the queue: run arpo cancel {name} --cluster far first"):
        submit_jobs(prepare_submission(resolve.load(run.config), profile(runs=str(tmp_path)), nodes=1, resume=True))
    queue.cancels = True
    runs.cancel(run)
    assert f"arpo resume {name} --cluster far continues the run" in capsys.readouterr().out
    in_chain(Queue(takes=2), tmp_path, monkeypatch, resume=True)
    assert f"arpo resume {name} --cluster far submits it again" in said.read_text()
    with pytest.raises(UserError, match=f"arpo status {name} --cluster far"):
        runs.print_health(run)


@pytest.mark.parametrize("named", ["far", None])
def test_printed_commands_identify_the_run(named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names repeat, and commands without `--cluster` look in the profiles of `slurm/clusters` only."""
    (clusters := tmp_path / "clusters").mkdir()
    monkeypatch.setattr("arpo_megatron.cluster.profile.DIRECTORY", clusters)
    (clusters / "here.yaml").write_text(yaml.safe_dump({**PLAIN, "runs": str(tmp_path / "here")}))
    (mine := tmp_path / "mine.yaml").write_text(yaml.safe_dump({**PLAIN, "runs": str(tmp_path / "mine")}))
    queue = Queue(takes=9)
    monkeypatch.setattr("arpo_megatron.cluster.submit._submit_one", queue.send)
    monkeypatch.setattr("arpo_megatron.cluster.slurm.call", queue.call)

    def told(cluster: str, *words: str) -> str:
        words = ("submit", "quickstart", "platform=cpu", "--nodes", "1", "--cluster", cluster, *words)
        return CliRunner().invoke(app, words, catch_exceptions=False).output.splitlines()[-1]

    name, other = "quickstart-arpo-seed1", tmp_path / "mine" / "quickstart-arpo-seed1"
    if named:  # on a login node elsewhere: the user names the profile each time
        monkeypatch.setenv(HINT_VARIABLE, f" --cluster {named}")
        found = f"{name} --cluster {named}"
        assert told(str(mine)) == f"arpo status {found} | arpo logs {found} --follow | arpo cancel {found}"
        assert f"arpo status {tmp_path}/apart --cluster far |" in told(str(mine), f"run_dir={tmp_path}/apart")
        return
    assert told(str(mine)).startswith(f"arpo status {other} | arpo logs {other} --follow | arpo cancel {other}")
    assert told("here").startswith(f"arpo status {name} | arpo logs {name} --follow | arpo cancel {name}")
    run = runs.find_run(str(other))
    with pytest.raises(UserError, match=f"in the queue: run arpo cancel {other} first"):
        submit_jobs(prepare_submission(resolve.load(run.config), load_profile(str(mine)), nodes=1, resume=True))
    with pytest.raises(UserError, match=f"no running job: arpo status {other}$"):
        runs.print_health(run)
    assert told("here", f"run_dir={tmp_path}/apart").startswith(f"arpo status {tmp_path}/apart |")


class Ending(Queue):
    """A Slurm that needs so many looks at a job to end it after it was cancelled."""

    def __init__(self, looks: float) -> None:
        super().__init__(takes=2)
        self.looks = looks

    def call(self, *words: str, check: bool = True, ignore: str | None = None) -> str:
        said = super().call(*words, check=check, ignore=ignore)
        if words[0] == "squeue" and "CANCELLED" in said and self.looks:
            self.looks -= 1
            return said.replace("CANCELLED", "COMPLETING")
        return said


@pytest.mark.parametrize("looks", [3, float("inf")])
def test_resume_waits_for_a_cancelled_job(
    looks: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("arpo_megatron.cluster.runs._ENDING_INTERVAL_S", 0.01)
    monkeypatch.setattr("arpo_megatron.cluster.runs._ENDING_S", 1.0)
    queue, cluster = Ending(looks), profile(runs=str(tmp_path))
    monkeypatch.setattr("arpo_megatron.cluster.submit._submit_one", queue.send)
    monkeypatch.setattr("arpo_megatron.cluster.slurm.call", queue.call)
    first = prepare_submission(resolve.resolve("quickstart", overrides=["platform=cpu"]), cluster, nodes=1)
    submit_jobs(first)
    again = prepare_submission(resolve.load(first.run.config), cluster, nodes=1, resume=True)
    with pytest.raises(UserError, match=r"job 4711 of .* is in the queue: run arpo cancel"):
        submit_jobs(again)
    runs.cancel(first.run)
    if looks == 3:
        assert submit_jobs(again) == ["4712"]
    else:
        with pytest.raises(UserError, match=r"job 4711 of .* is still ending after 1 s: try again later"):
            submit_jobs(again)
    assert capsys.readouterr().err.count("waiting for job 4711 of quickstart-arpo-seed1 to end") == 1


def test_status_reports_progress_of_cold_start_and_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "job_states_of", lambda runs: [[JobState("1", "RUNNING")] for _ in runs])
    run = submitted(tmp_path, resolve.resolve("quickstart"), profile(runs=str(tmp_path)))

    def told() -> str:
        monkeypatch.setattr(runs, "_submitted", lambda cluster: [run])
        with redirect_stdout(StringIO()) as said:
            runs.print_status(None, None)
        return said.getvalue().strip().removeprefix("run: job 1 RUNNING, ")

    def saved(place: Path, step: int) -> None:
        (place / f"step_{step}").mkdir(parents=True)

    assert told() == "cold start: no checkpoint yet, 400 updates wanted; then 28 steps"
    saved(run.sft_checkpoints, 100)
    saved(run.sft_checkpoints, 200)
    assert told() == "cold start: newest checkpoint step_200 of 400; then 28 steps"
    run.sft_model.mkdir()
    (run.sft_model / "config.json").write_text("{}")
    assert told() == "the cold start is done, no checkpoint yet, 28 steps wanted"
    saved(run.checkpoints, 3)
    assert told() == "newest checkpoint step_3 of 28"
    write_json(run.result, {"step": 28})
    assert told() == "training is done (28 steps)"
    save_config(
        resolve.with_overrides(resolve.load(run.config), ["train.steps=50"]), run.config
    )  # as `arpo resume` does
    assert told() == "newest checkpoint step_3 of 50"

    job = resolve.resolve("sft_7b", overrides=["sft.steps=500"])
    run = submitted(tmp_path / "b", job, profile(runs=str(tmp_path)))
    assert told() == "cold start: no checkpoint yet, 500 updates wanted"
    saved(run.sft_checkpoints, 480)
    assert told() == "cold start: newest checkpoint step_480 of 500"
    write_json(run.sft_result, {})  # its export is still to come
    assert told() == "cold start: newest checkpoint step_480 of 500"
    run.sft_model.mkdir()
    (run.sft_model / "config.json").write_text("{}")
    assert told() == "training is done"
    run = submitted(
        tmp_path / "c", resolve.resolve("quickstart", overrides=["sft.steps=0"]), profile(runs=str(tmp_path))
    )
    assert told() == "no checkpoint yet, 28 steps wanted"


def test_logs_takes_names_and_no_patterns(tmp_path: Path) -> None:
    run = submitted(tmp_path, resolve.resolve("quickstart"), profile(runs=str(tmp_path)))
    run.logs.mkdir(exist_ok=True)
    for name in ("train.log", "engine-0.log", "log-7_0.out", "log-7_1.out"):
        (run.logs / name).write_text("")
    assert runs.log_of(run, "train").name == "train.log"
    assert runs.log_of(run, "job").name.startswith("log-7_")
    for role in ("*", "engine-?", "[t]rain", "../logs/train"):
        with pytest.raises(UserError, match=r"has no log of .* yet; it has: job, engine-0, train"):
            runs.log_of(run, role)


def test_health_of_a_silent_node_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = submitted(tmp_path, resolve.resolve("quickstart"), profile(runs=str(tmp_path)))
    monkeypatch.setattr(runs, "newest_state", lambda run: JobState("1", "RUNNING", nodes="n1"))
    monkeypatch.setattr("arpo_megatron.cluster.slurm.allocated_nodes", lambda names: [Node("n1", "127.0.0.1")])
    monkeypatch.setattr("arpo_megatron.cluster.slurm.TIMEOUT_S", 0.2)
    (srun := tmp_path / "srun").write_text("#!/bin/sh\nexec sleep 60\n")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(UserError, match="a step on n1 did not answer"):
        runs.print_health(run)


@pytest.mark.parametrize("requeue", [True, False])
def test_requeue_false_disables_slurms_requeue(requeue: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(takes=2)
    monkeypatch.setattr("arpo_megatron.cluster.submit._submit_one", queue.send)
    monkeypatch.setattr("arpo_megatron.cluster.slurm.call", queue.call)
    job = resolve.resolve("quickstart", overrides=["platform=cpu"])
    cluster = profile(runs=str(tmp_path), requeue=requeue)
    jobs = submit_jobs(prepare_submission(job, cluster, nodes=1, chain=2))
    assert queue.updates == ([] if requeue else [(f"JobId={job}", "Requeue=0") for job in jobs])


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Submission]:
    """What the commands would send to Slurm. No Slurm is here, so sending stops before it; all else is real."""
    found: list[Submission] = []

    def note(submission: Submission, *, force: bool = False) -> list[str]:
        found.append(submission)
        return ["1"]

    monkeypatch.setattr("arpo_megatron.cluster.submit.submit_jobs", note)
    return found


def submitted(tmp_path: Path, config: JobConfig, cluster: ClusterProfile, nodes: int | None = None) -> RunDirectory:
    """A run as `arpo submit` leaves it."""
    submission = prepare_submission(replace(config, run_dir=tmp_path / "run"), cluster, nodes=nodes)
    run = run_directory.fresh(submission.config)
    save_config(submission.config, run.config)
    run.submissions.mkdir()
    save_profile(cluster, run.cluster)
    write_json(
        run.submissions / "1.json",
        {"jobs": ["1"], "job_name": "arpo-run", "layout": {"nodes": submission.layout.nodes}, "auto": submission.auto},
    )
    return run


@pytest.mark.parametrize(
    ("recipe", "words", "nodes", "data", "engines"),
    [
        ("deepsearch_14b", ["--nodes", "4"], 4, 8, 8),
        ("deepsearch_14b", ["--nodes", "1"], 1, 2, 2),
        ("deepsearch_14b", ["train.steps=99"], 2, 4, 4),
        ("deepsearch_14b", ["parallel.data=8"], 4, 8, 4),
        ("deepsearch_14b+split", ["--nodes", "6"], 6, 6, 6),
    ],
)
def test_resume_on_another_number_of_nodes(
    tmp_path: Path, sent: list[Submission], recipe: str, words: list[str], nodes: int, data: int, engines: int
) -> None:
    run = submitted(tmp_path, resolve.resolve(recipe), profile(gpu="h100-80", runs=str(tmp_path)))
    done = CliRunner().invoke(app, ["resume", str(run.path), *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    (job,) = sent
    assert (job.layout.nodes, job.config.parallel.data, job.config.engine.replicas) == (nodes, data, engines)
    assert job.config.engine.placement == ("split" if "split" in recipe else "colocated")
    assert job.run.path == run.path


@pytest.mark.parametrize(
    ("words", "nodes", "data"),
    [([], 2, 4), (["parallel.data=8"], 4, 8), (["engine.restarts=3"], 2, 4), (["--nodes", "4"], 4, 8)],
)
def test_resume_ignores_nodes_of_the_profile(
    tmp_path: Path, sent: list[Submission], words: list[str], nodes: int, data: int
) -> None:
    run = submitted(tmp_path, resolve.resolve("deepsearch_14b"), profile(runs=str(tmp_path), nodes=2))
    CliRunner().invoke(app, ["resume", str(run.path), *words], catch_exceptions=False)
    assert [(job.layout.nodes, job.config.parallel.data) for job in sent] == [(nodes, data)]


def test_resume_keeps_nodes_of_a_cpu_job(tmp_path: Path, sent: list[Submission]) -> None:
    config = resolve.resolve("quickstart", overrides=["platform=cpu", "parallel.data=2"])
    run = submitted(tmp_path, config, profile(gpus_per_node=0, runs=str(tmp_path)), nodes=2)
    for words in (["engine.restarts=3"], ["parallel.data=4"]):
        CliRunner().invoke(app, ["resume", str(run.path), *words], catch_exceptions=False)
    assert [job.layout.nodes for job in sent] == [2, 2]


@pytest.mark.parametrize(
    ("words", "nodes", "placement", "transport"),
    [
        ([], 2, "colocated", "broadcast"),
        (["engine.restarts=3"], 2, "colocated", "broadcast"),
        (["--nodes", "1"], 1, "colocated", "auto"),
        (["--nodes", "4"], 4, "split", "auto"),
        (["--nodes", "4", "engine.placement=colocated"], 4, "colocated", "broadcast"),
        (["sync.transport=disk"], 2, "colocated", "disk"),
    ],
)
def test_auto_is_replaced_for_each_submission(
    tmp_path: Path, sent: list[Submission], words: list[str], nodes: int, placement: str, transport: str
) -> None:
    config = resolve.resolve("deepsearch_14b", overrides=["engine.placement=auto"])
    run = submitted(tmp_path, config, profile(gpu="h100-80", runs=str(tmp_path)), nodes=2)
    settled = resolve.load(run.config)  # its roles read it
    assert (settled.engine.placement, settled.sync.transport) == ("colocated", "broadcast")
    done = CliRunner().invoke(app, ["resume", str(run.path), *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    (job,) = sent
    assert (job.layout.nodes, job.config.engine.placement, job.config.sync.transport) == (nodes, placement, transport)


def test_submission_records_replaced_auto_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arpo_megatron.cluster.submit.check_files", lambda config: None)  # its weights are not here
    monkeypatch.setattr("arpo_megatron.cluster.submit._submit_one", Queue(takes=1).send)
    monkeypatch.setattr("arpo_megatron.cluster.slurm.call", Queue(takes=1).call)
    config = resolve.resolve("deepsearch_14b", overrides=["engine.placement=auto"])
    submission = prepare_submission(config, profile(runs=str(tmp_path)), nodes=2)
    submit_jobs(submission)
    said = config_before_auto(submission.run)
    assert (said.engine.placement, said.sync.transport) == ("auto", "auto")
    assert replace(said, run_dir=None) == config


@pytest.mark.parametrize(
    ("words", "nodes", "trainer_nodes", "data"),
    [
        (["deepsearch_14b+split", "--nodes", "4"], 4, 2, 4),
        (["deepsearch_14b+split", "--nodes", "3"], 3, 1, 2),
        (["deepsearch_14b", "--nodes", "4"], 4, 4, 8),
        (["deepsearch_14b", "engine.placement=split", "--nodes", "4"], 4, 2, 4),
    ],
)
def test_submission_keeps_an_explicit_placement(
    tmp_path: Path, sent: list[Submission], words: list[str], nodes: int, trainer_nodes: int, data: int
) -> None:
    (file := tmp_path / "mine.yaml").write_text(yaml.safe_dump({**PLAIN, "gpu": "h100-80", "runs": str(tmp_path)}))
    done = CliRunner().invoke(app, ["submit", *words, "--cluster", str(file)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    (job,) = sent
    assert (job.layout.nodes, job.layout.trainer_nodes, job.config.parallel.data) == (nodes, trainer_nodes, data)
    assert job.forecast is not None and job.forecast.fits


def test_doctor_checks_the_submitted_layout(
    tmp_path: Path, sent: list[Submission], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profile's nodes decide, as in `arpo submit`: the recipe alone would take two."""
    seen: list[JobConfig | None] = []
    monkeypatch.setattr("arpo_megatron.cli.doctor.examine", lambda job, profile: seen.append(job) or True)
    values = {**PLAIN, "gpu": "h100-80", "runs": str(tmp_path), "nodes": 4}
    (file := tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    for command in ("doctor", "submit"):
        words = [command, "deepsearch_14b", "--cluster", str(file)]
        assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    (looked_at,), (submission,) = seen, sent
    assert looked_at is not None and looked_at.parallel == submission.config.parallel
    assert looked_at.parallel.data == 8


def test_resume_uses_the_given_profile(tmp_path: Path, sent: list[Submission]) -> None:
    run = submitted(tmp_path, resolve.resolve("deepsearch_14b"), profile(runs=str(tmp_path)))
    values = {**PLAIN, "runs": str(tmp_path), "account": "another", "time": "08:00:00"}
    (file := tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    for words in (["--cluster", str(file)], []):
        assert CliRunner().invoke(app, ["resume", str(run.path), *words], catch_exceptions=False).exit_code == 0
    assert [job.profile.account for job in sent] == ["another", PLAIN["account"]]


def test_overrides_that_contradict_nodes_are_refused(tmp_path: Path, sent: list[Submission]) -> None:
    run = submitted(tmp_path, resolve.resolve("deepsearch_14b"), profile(runs=str(tmp_path)))
    with pytest.raises(UserError, match=r"3 nodes of 8 GPUs, but 16 trainer ranks .* need 2: use"):
        CliRunner().invoke(app, ["resume", str(run.path), "--nodes", "3", "parallel.data=4"], catch_exceptions=False)
    assert not sent


def test_batch_script_follows_the_profile(tmp_path: Path) -> None:
    cluster = profile(
        partition="h100",
        qos="high",
        time="1-00:00:00",
        gpu_request="gres",
        gpu_type="h100",
        signal_s=600,
        sbatch={"constraint": "rail"},
        environment={"NOTE": "two words", "http_proxy": "http://proxy:3128", "PYTHONPATH": "/mine"},
        secrets={"WANDB_API_KEY": "env"},
    )
    config = resolve.resolve("quickstart", overrides=["parallel.data=16", "engine.replicas=8", f"run_dir={tmp_path}/a"])
    text = dry_run(prepare_submission(config, cluster, nodes=3, chain=2))
    assert sbatch_lines(text) >= {
        "--account=research",
        "--partition=h100",
        "--qos=high",
        "--time=1-00:00:00",
        "--gres=gpu:h100:8",
        "--nodes=3",
        "--signal=USR1@600",
        "--constraint=rail",
        "--dependency=singleton",
        "--ntasks-per-node=8",
        "--mem=0",
    }
    assert re.search(r"srun .* --relative=0 .* -m arpo_megatron.cluster ", text), "the supervisor may be on any node"
    assert "export NOTE='two words'" in text and "export http_proxy=http://proxy:3128" in text
    assert "HTTP_PROXY" not in text, "names are as they were said"
    assert "=/mine" not in text, "the job imports the code that was submitted"
    assert "WANDB_API_KEY" not in text
    assert "# trainer   nodes 0 to 1" in text
    assert "# engine-7  node 2, GPU 7" in text


def test_colocated_engines_on_several_nodes_use_broadcast() -> None:
    config = resolve.resolve(
        "quickstart", overrides=["parallel.data=16", "engine.placement=colocated", "engine.replicas=8"]
    )
    settled = prepare_submission(config, profile(), nodes=None).config
    assert (settled.engine.placement, settled.sync.transport) == ("colocated", "broadcast")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"gpus_pernode": 4}, "unknown key gpus_pernode; did you mean gpus_per_node?"),
        ({"gpus_per_node": -1}, "gpus_per_node: "),
        ({"time": "tomorrow"}, "time: "),
        ({"time": "1:2:3:4"}, "time: "),
        ({"time": ""}, "time: "),
        ({"time": 5}, "time: 5 leaves nothing before signal_s=300.* raise time or lower signal_s"),
        ({"time": "00:10:00", "signal_s": 600}, "time: 00:10:00 leaves nothing before signal_s=600"),
        ({"ports": [7000, 7010]}, "are fewer than 64"),
        ({"ports": [65500, 66000]}, "ports: .* TCP ports end at 65535"),
        ({"secrets": {"A B": "env"}}, "is not a valid name of an environment variable"),
        (
            {"environment": {"NOTE": "1"}, "secrets": {"NOTE": "env"}},
            "NOTE is in environment and in secrets",
        ),
        ({"secrets": {"KEY": "sk-123"}}, "secrets: KEY must be `env` or a path that begins"),
        (
            {"environment": {"WANDB_API_KEY": "1"}},
            "WANDB_API_KEY would be in the batch script: move it to secrets",
        ),
        ({"environment": {"hf_token": "1"}}, "hf_token would be in the batch script: move it to secrets"),
        ({"mounts": ["/data"]}, "mounts: '/data' does not have the form FROM:TO"),
        ({"account": "a\n#SBATCH --uid=0"}, "account: .* cannot be in a batch script"),
        ({"sbatch": {"comment": "a\nb"}}, "sbatch.comment: .* cannot be in a batch script"),
        ({"sbatch": {"job-name": "mine"}}, "sbatch: job-name is not allowed here: arpo submit sets it"),
        ({"sbatch": {"job_name": "mine"}}, "sbatch: job_name is not allowed here"),
        ({"sbatch": {"output": "mine"}}, "sbatch: output is not allowed here"),
        ({"sbatch": {"dependency": "afterok:1"}}, "sbatch: dependency is not allowed here: use arpo submit --chain"),
        ({"sbatch": {"time": "1"}}, "sbatch: time is not allowed here: set the key time"),
        ({"sbatch": {"gpus-per-node": "1"}}, "sbatch: gpus-per-node is not allowed here: set the key gpu_request"),
        ({"sbatch": {"array": "0-1"}}, "sbatch: array is not allowed here: a run is one job"),
        ({"sbatch": {"arr": "0-1"}}, "sbatch: arr is not allowed here: a run is one job"),
        ({"sbatch": {"export": "NONE"}}, "sbatch: export is not allowed here: use the keys environment and secrets"),
        ({"sbatch": {"ntasks": "1"}}, "sbatch: ntasks is not allowed here: arpo submit sets it"),
        ({"sbatch": {"wrap": "true"}}, "sbatch: wrap is not allowed here: arpo submit writes"),
        ({"sbatch": {"clusters": "b"}}, "sbatch: clusters is not allowed here: arpo status and"),
        ({"sbatch": {"container_image": "a"}}, "sbatch: container_image is not allowed here: set the key container"),
        ({"sbatch": {"wait": ""}}, "sbatch: wait is not allowed here: arpo submit does not wait"),
        ({"sbatch": {"test-only": ""}}, "sbatch: test-only is not allowed here: no job would be submitted"),
        ({"sbatch": {"gres": "gpu:1"}, "gpu_request": "gres"}, "sbatch: gres is not allowed here"),
        ({"runs": "$NOT_SET_ANYWHERE/runs"}, r"the environment variable \$NOT_SET_ANYWHERE is not set"),
    ],
)
def test_profile_error_is_one_line(values: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=f"^here.yaml: .*{said}") as error:
        profile(**values)
    assert "sk-123" not in str(error.value)


def test_job_with_unset_secrets_is_not_submitted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("A_KEY", raising=False)
    asked = prepare_submission(resolve.resolve("quickstart"), profile(secrets={"A_KEY": "env"}), nodes=None)
    with pytest.raises(UserError, match="the secret A_KEY is not set: export"):
        submit_jobs(asked)
    assert check_secrets(asked.profile).level == "failure"
    monkeypatch.setenv("A_KEY", "value")
    assert check_secrets(asked.profile).level == "ok"
    found = check_secrets(profile(secrets={"A_KEY": str(tmp_path / "none")}))
    assert (found.level, found.text) == ("warning", f"{tmp_path / 'none'} does not exist here")


@pytest.mark.parametrize(
    "name", ["my runs", "ru(n)s;touch", "it's", "a:b", "a,b", "100%j", "$(id)", "`id`", "a&b", "grün"]
)
def test_path_with_special_characters_is_not_submitted(name: str, tmp_path: Path) -> None:
    """nemo-run writes them without quotes: into PYTHONPATH, into the line of srun, into sbatch's --output."""
    job = resolve.resolve("quickstart")
    with pytest.raises(UserError, match=r"^the run directory .* in it, which a batch script cannot hold: use"):
        prepare_submission(job, profile(runs=str(tmp_path / name)), nodes=None)
    with pytest.raises(UserError, match=r"^python: .* in it, which a batch script cannot hold: use"):
        prepare_submission(job, profile(runs=str(tmp_path), python=f"/tmp/{name}/python"), nodes=None)
    plain = prepare_submission(job, profile(runs=str(tmp_path / "a-b_c+d=e@f.1"), python="~/bin/python3"), nodes=None)
    assert f" {Path.home()}/bin/python3 -m " in dry_run(plain)


def test_other_sbatch_parameters_are_accepted() -> None:
    more = {
        "gres": "gpu:8,nvme:1",
        "exclusive": "user",
        "mem-per-cpu": "4G",
        "reservation": "mine",
        "gpus": "8",
        "chdir": "/",
    }
    assert profile(sbatch=more, gpu_request="none", exclusive=False, mem=None).sbatch == more


def test_profiles_in_the_repository_survive_a_round_trip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in profile_names():
        for word in ("USER", "SCRATCH", "PWD"):
            monkeypatch.setenv(word, "/somewhere")
        read = load_profile(name)
        save_profile(read, tmp_path / "cluster.yaml")
        assert load_profile(str(tmp_path / "cluster.yaml")) == read
        keys = yaml.safe_load((DIRECTORY / f"{name}.yaml").read_text())
        assert all(str(key) in ClusterProfile.__dataclass_fields__ for key in keys)
    with pytest.raises(UserError, match="unknown cluster 'oneboxx'"):
        load_profile("oneboxx")


@pytest.fixture
def clone(tmp_path: Path) -> Callable[..., str]:
    """git in a repository at `tmp_path` with one commit."""

    def git(*words: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", *identity, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout

    git("init", "-q")
    for name, text in {"kept.py": "1\n", "changed.py": "1\n", "gone.py": "1\n", ".gitignore": "out/\n"}.items():
        (tmp_path / name).write_text(text)
    git("add", ".")
    git("commit", "-qm", "first")
    return git


def test_snapshot_has_the_working_tree(tmp_path: Path, clone: Callable[..., str]) -> None:
    assert snapshot(tmp_path).diff == b""
    (tmp_path / "changed.py").write_text("2\n")
    (tmp_path / "gone.py").unlink()
    (tmp_path / "new.py").write_text("3\n")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "big").write_text("4\n")
    before = clone("status", "--short")
    code = snapshot(tmp_path)
    packed = clone("ls-tree", "-r", "--name-only", code.tree).split()
    assert packed == [".gitignore", "changed.py", "kept.py", "new.py"]
    assert clone("show", f"{code.tree}:changed.py") == "2\n"
    assert code.commit == clone("rev-parse", "HEAD").strip()
    assert all(line in code.diff for line in (b"+2", b"+3", b"deleted file mode"))
    assert clone("status", "--short") == before
    with pytest.raises(UserError, match="is not a git clone"):
        snapshot(tmp_path / "out")


def test_snapshot_accepts_any_encoding(tmp_path: Path, clone: Callable[..., str]) -> None:
    text = "Grüße\n".encode("latin-1")
    (tmp_path / "changed.py").write_bytes(text)
    (tmp_path / "neu-\udcfc.py").write_text("a name that is no UTF-8")
    assert b"+" + text in snapshot(tmp_path).diff


@pytest.mark.parametrize("name", [".env", "tools/.env.local", "cluster.pem", "id_ed25519"])
def test_snapshot_refuses_secret_files(tmp_path: Path, clone: Callable[..., str], name: str) -> None:
    secret = tmp_path / name
    secret.parent.mkdir(exist_ok=True)
    secret.write_text("WANDB_API_KEY=abc123\n")
    with pytest.raises(UserError, match=f"{name} is new, may hold secrets"):
        snapshot(tmp_path)
    (tmp_path / ".git" / "info" / "exclude").write_text(name)
    assert b"abc123" not in snapshot(tmp_path).diff
    secret.unlink()
    example = tmp_path / "example"
    example.write_text("# fill in and rename\n" * 9)
    clone("add", "example")
    clone("commit", "-qm", "an example")
    (tmp_path / ".git" / "info" / "exclude").write_text("")
    example.rename(secret)  # to git that is a change of a file it knows
    secret.write_text(secret.read_text() + "WANDB_API_KEY=abc123\n")
    with pytest.raises(UserError, match=f"{name} is new, may hold secrets"):
        snapshot(tmp_path)
    ignored = subprocess.run(["git", "check-ignore", "--no-index", "-q", ".env"], cwd=ROOT)
    assert ignored.returncode == 0, "a clone of this project ignores it"


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("0", 0),
        ("30", 1800),
        ("120", 7200),
        ("2:30", 150),
        ("04:00:00", 14400),
        ("100:00:00", 360000),
        ("1-00:00:00", 86400),
        ("2-12", 216000),
        ("10-0:30", 865800),
    ],
)
def test_time_limits_have_slurms_meaning(limit: str, expected: int, tmp_path: Path) -> None:
    """The forms of sbatch(1), --time; without quotes, as one writes them."""
    (file := tmp_path / "mine.yaml").write_text(f"account: a\nruns: /shared\nsignal_s: 60\ntime: {limit}\n")
    assert load_profile(str(file)).time == limit
    assert seconds(limit) == expected


def test_profile_with_ssh_has_a_login_node(tmp_path: Path) -> None:
    file = tmp_path / "far.yaml"

    def written(**values: object) -> LoginNode | None:
        file.write_text(yaml.safe_dump({**PLAIN, **values}))
        return login_node(str(file))

    assert written() is None
    there = "$HOME_OF_THE_CLUSTER/.venv/bin/python"
    node = written(ssh="me@login.cluster:2222", python=there, identity="~/.ssh/key", runs="$SCRATCH_THERE")
    assert node is not None and (node.user, node.host, node.port) == ("me", "login.cluster", 2222)
    assert node.profile == {**PLAIN, "python": there, "runs": "$SCRATCH_THERE"}, "variables are the cluster's"
    alias = written(ssh="cluster", python=there)
    assert alias is not None and (alias.user, alias.port, alias.identity) == (None, None, None)
    with pytest.raises(UserError, match="ssh needs python, the path"):
        written(ssh="cluster")
    with pytest.raises(UserError, match=r"does not have the form \[USER@\]HOST\[:PORT\]"):
        written(ssh="cluster -o ProxyCommand=x", python=there)
    with pytest.raises(UserError, match="unknown cluster"):
        login_node("nowhere")


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
    said = capsys.readouterr()
    assert (said.out, said.err) == ("step 1\n", f"arpo: {down}; trying again\n" * 2), "once each time"
    answers[:] = [down, down]
    monkeypatch.setattr(runs, "_SILENCE_S", 0.0)
    with pytest.raises(UserError, match="connect failure"):
        runs.print_log(run, "job", lines=40, follow=True)


@pytest.mark.parametrize("lines", [0, 2])
def test_followed_log_has_all_output_of_restarts(
    lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two lives have begun, and the last one ended, before the next look."""
    run = submitted(tmp_path, resolve.resolve("quickstart"), profile(runs=str(tmp_path)))
    run.logs.mkdir()

    def says(life: int, text: str) -> None:
        log = run.logs / f"log-1_{life}.out"
        with log.open("a") as file:
            file.write(text)
        os.utime(log, (life, life))

    looks = 0

    def newest_state(run: RunDirectory) -> JobState:
        nonlocal looks
        looks += 1
        if looks == 2:
            says(0, "saved\n")
            for life in (1, 2):
                says(life, "".join(f"life {life} step {step}\n" for step in range(100)))
        return JobState("1", "RUNNING" if looks < 2 else "COMPLETED")

    says(0, "step 1\nstep 2\nstep 3\n")
    monkeypatch.setattr(runs, "newest_state", newest_state)
    monkeypatch.setattr(runs, "_FOLLOW_INTERVAL_S", 0.0)
    monkeypatch.setattr(runs, "_STATE_INTERVAL_S", 0.0)
    runs.print_log(run, "job", lines=lines, follow=True)
    more = [f"life {life} step {step}" for life in (1, 2) for step in range(100)]
    assert capsys.readouterr().out.splitlines() == [*["step 2", "step 3"][:lines], "saved", *more]


def test_missing_git_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="git is not installed"):
        snapshot()
