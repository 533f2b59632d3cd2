"""Submission: the batch script follows recipe, overrides and profile, and a refused submission leaves no trace."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from arpo_megatron.cli.cluster import app
from arpo_megatron.cluster import runs
from arpo_megatron.cluster.profile import (
    load_profile,
)
from arpo_megatron.cluster.slurm_checks import check_secrets
from arpo_megatron.cluster.submission import Submission
from arpo_megatron.cluster.submissions import config_before_auto
from arpo_megatron.cluster.submit import dry_run, prepare_submission, submit_jobs
from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.plan.nodes import resolve_on_nodes
from tests.cluster.stand_in import PLAIN, Queue, in_chain, profile, submitted


def sbatch_lines(text: str) -> set[str]:
    return {line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")}


@pytest.mark.parametrize("recipe", ["quickstart", "deepsearch_14b"])
def test_dry_run_prints_script_and_layout_and_writes_nothing(
    recipe: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    text = dry_run(prepare_submission(resolve.resolve(recipe), load_profile("onebox"), nodes=None))
    assert {"--partition=batch", "--time=00:20:00", "--exclusive"} <= sbatch_lines(text)
    assert "# trainer   node" in text
    assert not list(tmp_path.iterdir())


def test_recipes_can_be_submitted() -> None:
    for recipe in resolve.recipe_names():
        assert prepare_submission(resolve.resolve(recipe), profile(), nodes=None).layout.nodes >= 1


def test_dry_run_says_that_an_unset_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    job = prepare_submission(resolve.resolve("quickstart"), profile(secrets={"SEARCH_KEY": "env"}), nodes=None)
    refused = "# arpo submit would refuse it: the secret SEARCH_KEY is not set"
    monkeypatch.delenv("SEARCH_KEY", raising=False)
    assert refused in dry_run(job)
    monkeypatch.setenv("SEARCH_KEY", "k")
    assert refused not in dry_run(job)


def test_job_that_does_not_fit_is_not_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["parallel.tensor=1", "parallel.sequence=false", "parallel.data=8", "engine.replicas=1"]
    small = profile(gpu="h100-80", runs=str(tmp_path))
    job = prepare_submission(resolve.resolve("deepsearch_14b", overrides=overrides), small, nodes=None)
    assert "# arpo submit would refuse it: training needs" in dry_run(job)
    monkeypatch.setattr("arpo_megatron.cluster.submit.check_files", lambda *_: None)  # the weights are not here
    with pytest.raises(UserError, match=r"the job does not fit: training needs .* --force submits it"):
        submit_jobs(job)
    assert not list(tmp_path.iterdir())
    whole = prepare_submission(resolve.resolve("deepsearch_14b"), small, nodes=None)
    assert whole.forecast is not None and whole.forecast.fits
    with pytest.raises(UserError, match="gpu: unknown type 'h1000'"):
        profile(gpu="h1000")


def test_partly_refused_chain_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    queue = Queue(takes=2)
    run = in_chain(queue, tmp_path, monkeypatch)
    assert queue.jobs == {"4711": "CANCELLED", "4712": "CANCELLED"}
    error = run.path.with_suffix(".error").read_text()
    assert error.startswith("job 3 of 3: sbatch refused the job: QOS") and "cancelled job 4711, 4712" in error
    runs.print_status(str(run.path), None)
    assert "job 4712 CANCELLED" in capsys.readouterr().out


def test_jobs_of_a_refused_chain_can_be_cancelled_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(takes=1, cancels=False)
    run = in_chain(queue, tmp_path, monkeypatch)
    assert f"cancel the accepted jobs (4711) with arpo cancel {run.path}" in run.path.with_suffix(".error").read_text()
    queue.cancels = True
    runs.cancel(runs.find_run(str(run.path)))
    assert queue.jobs == {"4711": "CANCELLED"}


def test_run_is_removed_if_its_first_job_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = in_chain(Queue(takes=0), tmp_path, monkeypatch)
    assert not run.path.exists()
    run.submissions.mkdir(parents=True)
    with pytest.raises(UserError, match="no job of this run was submitted"):
        runs.find_run(str(run.path))


def test_refused_resume_restores_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arpo_megatron.cluster.submit.submit_one", Queue(takes=0).send)
    monkeypatch.setattr("arpo_megatron.cluster.slurm.call", Queue(takes=0).call)
    job = resolve.resolve("quickstart", overrides=["platform=cpu"])
    run = submitted(tmp_path, job, profile(runs=str(tmp_path)))
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    changed = resolve.with_overrides(resolve.load(run.config), ["train.steps=999", "parallel.data=2"])
    again = prepare_submission(changed, profile(runs=str(tmp_path), time="08:00:00"), nodes=2, resume=True)
    with pytest.raises(UserError, match="QOSMaxSubmitJobPerUserLimit"):
        submit_jobs(again)
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


class Ending(Queue):
    """Slurm that reports a cancelled job as COMPLETING for a number of queries."""

    def __init__(self, looks: float) -> None:
        super().__init__(takes=2)
        self.looks = looks

    def call(self, *arguments: str, check: bool = True, ignore: str | None = None) -> str:
        output = super().call(*arguments, check=check, ignore=ignore)
        if arguments[0] == "squeue" and "CANCELLED" in output and self.looks:
            self.looks -= 1
            return output.replace("CANCELLED", "COMPLETING")
        return output


@pytest.mark.parametrize("looks", [3, float("inf")])
def test_resume_waits_for_a_cancelled_job(
    looks: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("arpo_megatron.cluster.runs._ENDING_INTERVAL_S", 0.01)
    monkeypatch.setattr("arpo_megatron.cluster.runs._ENDING_S", 1.0)
    queue, cluster = Ending(looks), profile(runs=str(tmp_path))
    monkeypatch.setattr("arpo_megatron.cluster.submit.submit_one", queue.send)
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


@pytest.mark.parametrize("requeue", [True, False])
def test_requeue_false_disables_slurms_requeue(requeue: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(takes=2)
    monkeypatch.setattr("arpo_megatron.cluster.submit.submit_one", queue.send)
    monkeypatch.setattr("arpo_megatron.cluster.slurm.call", queue.call)
    job = resolve.resolve("quickstart", overrides=["platform=cpu"])
    cluster = profile(runs=str(tmp_path), requeue=requeue)
    jobs = submit_jobs(prepare_submission(job, cluster, nodes=1, chain=2))
    assert queue.updates == ([] if requeue else [(f"JobId={job}", "Requeue=0") for job in jobs])


@pytest.mark.parametrize(
    ("recipe", "ranks", "kinds"), [("deepsearch_32b", 512, ["tensor"]), ("moe_30b_a3b", 512, ["tensor", "expert"])]
)
def test_dry_run_on_64_nodes_shows_ports_steps_files_and_bytes(recipe: str, ranks: int, kinds: list[str]) -> None:
    place = profile(gpu="h100-80", network_gb_s=35)
    text = dry_run(prepare_submission(resolve_on_nodes(recipe, 64, 8), place, nodes=64))
    assert "# ports: 5 on node 0, at most 1 on another\n" in text
    assert f"# srun: 67 steps at a time ({ranks} tasks of the trainer in one)" in text
    assert f"# files: {ranks + 3} per checkpoint; {ranks} heartbeats every 5 s\n" in text
    rows = re.findall(r"^#   (\w+) .*? ([\d.]+) GB  (.+?) +([\d.]+) s$", text, re.MULTILINE)
    assert [row[0] for row in rows] == ["rollouts", *kinds, "gradients", "weight", "checkpoint"]
    peaks = {"GPU to its node": 450, "GPU to other nodes": 50, "filesystem": 2}
    for _, size, link, floor in rows:
        assert float(floor) == pytest.approx(float(size) / peaks[link], abs=0.011)


@pytest.mark.timeout(60)
def test_dry_run_on_100000_nodes_ends() -> None:
    """Its time is linear in the nodes. A count per node of all engines would take hours."""
    job = resolve_on_nodes("moe_30b_a3b", 100_000, 8)
    text = dry_run(prepare_submission(job, profile(gpu="h100-80"), nodes=100_000))
    assert "# node layout: 100000 node(s)" in text
    assert "on node 0, at most 1 on another\n" in text


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Submission]:
    """Submissions of the commands, recorded instead of sent to Slurm."""
    found: list[Submission] = []

    def note(submission: Submission, *, force: bool = False) -> list[str]:
        found.append(submission)
        return ["1"]

    monkeypatch.setattr("arpo_megatron.cluster.submit_run.submit_jobs", note)
    return found


@pytest.mark.parametrize(
    ("recipe", "arguments", "nodes", "data", "engines"),
    [
        ("deepsearch_14b", ["--nodes", "4"], 4, 8, 4),
        ("deepsearch_14b", ["--nodes", "1"], 1, 2, 1),
        ("deepsearch_14b", ["train.steps=99"], 2, 4, 2),
        ("deepsearch_14b", ["parallel.data=8"], 4, 8, 2),
        ("deepsearch_14b+split", ["--nodes", "6"], 6, 6, 3),
    ],
)
def test_resume_on_another_number_of_nodes(
    tmp_path: Path, sent: list[Submission], recipe: str, arguments: list[str], nodes: int, data: int, engines: int
) -> None:
    run = submitted(tmp_path, resolve.resolve(recipe), profile(gpu="h100-80", runs=str(tmp_path)))
    done = CliRunner().invoke(app, ["resume", str(run.path), *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    (job,) = sent
    assert (job.layout.nodes, job.config.parallel.data, job.config.engine.replicas) == (nodes, data, engines)
    assert job.config.engine.placement == ("split" if "split" in recipe else "colocated")
    assert job.run.path == run.path


@pytest.mark.parametrize(
    ("arguments", "nodes", "data"),
    [([], 2, 4), (["parallel.data=8"], 4, 8), (["engine.restarts=3"], 2, 4), (["--nodes", "4"], 4, 8)],
)
def test_resume_ignores_nodes_of_the_profile(
    tmp_path: Path, sent: list[Submission], arguments: list[str], nodes: int, data: int
) -> None:
    run = submitted(tmp_path, resolve.resolve("deepsearch_14b"), profile(runs=str(tmp_path), nodes=2))
    CliRunner().invoke(app, ["resume", str(run.path), *arguments], catch_exceptions=False)
    assert [(job.layout.nodes, job.config.parallel.data) for job in sent] == [(nodes, data)]


def test_resume_keeps_nodes_of_a_cpu_job(tmp_path: Path, sent: list[Submission]) -> None:
    config = resolve.resolve("quickstart", overrides=["platform=cpu", "parallel.data=2"])
    run = submitted(tmp_path, config, profile(gpus_per_node=0, runs=str(tmp_path)), nodes=2)
    for arguments in (["engine.restarts=3"], ["parallel.data=4"]):
        CliRunner().invoke(app, ["resume", str(run.path), *arguments], catch_exceptions=False)
    assert [job.layout.nodes for job in sent] == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "nodes", "placement"),
    [
        ([], 2, "colocated"),
        (["engine.restarts=3"], 2, "colocated"),
        (["--nodes", "1"], 1, "colocated"),
        (["--nodes", "4"], 4, "split"),
        (["--nodes", "4", "engine.placement=colocated"], 4, "colocated"),
    ],
)
def test_auto_is_replaced_for_each_submission(
    tmp_path: Path, sent: list[Submission], arguments: list[str], nodes: int, placement: str
) -> None:
    config = resolve.resolve("deepsearch_14b", overrides=["engine.placement=auto"])
    run = submitted(tmp_path, config, profile(gpu="h100-80", runs=str(tmp_path)), nodes=2)
    settled = resolve.load(run.config)  # for the job
    assert settled.engine.placement == "colocated"
    done = CliRunner().invoke(app, ["resume", str(run.path), *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    (job,) = sent
    assert (job.layout.nodes, job.config.engine.placement) == (nodes, placement)


def test_submission_records_replaced_auto_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arpo_megatron.cluster.submit.check_files", lambda *_: None)  # the weights are not here
    monkeypatch.setattr("arpo_megatron.cluster.submit.submit_one", Queue(takes=1).send)
    monkeypatch.setattr("arpo_megatron.cluster.slurm.call", Queue(takes=1).call)
    config = resolve.resolve("deepsearch_14b", overrides=["engine.placement=auto"])
    submission = prepare_submission(config, profile(runs=str(tmp_path)), nodes=2)
    submit_jobs(submission)
    found = config_before_auto(submission.run)
    assert found.engine.placement == "auto"
    assert replace(found, run_dir=None) == config


@pytest.mark.parametrize(
    ("arguments", "nodes", "trainer_nodes", "data"),
    [
        (["deepsearch_14b+split", "--nodes", "4"], 4, 2, 4),
        (["deepsearch_14b+split", "parallel.recompute_layers=null", "--nodes", "3"], 3, 1, 2),
        (["deepsearch_14b", "--nodes", "4"], 4, 4, 8),
        (["deepsearch_14b", "engine.placement=split", "--nodes", "4"], 4, 2, 4),
    ],
)
def test_submission_keeps_an_explicit_placement(
    tmp_path: Path, sent: list[Submission], arguments: list[str], nodes: int, trainer_nodes: int, data: int
) -> None:
    (file := tmp_path / "mine.yaml").write_text(yaml.safe_dump({**PLAIN, "gpu": "h100-80", "runs": str(tmp_path)}))
    done = CliRunner().invoke(app, ["submit", *arguments, "--cluster", str(file)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    (job,) = sent
    assert (job.layout.nodes, job.layout.trainer_nodes, job.config.parallel.data) == (nodes, trainer_nodes, data)
    assert job.forecast is not None and job.forecast.fits


def test_doctor_checks_the_submitted_layout(
    tmp_path: Path, sent: list[Submission], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profile has four nodes; the recipe alone would take two."""
    seen: list[JobConfig | None] = []
    monkeypatch.setattr("arpo_megatron.cli.doctor.examine", lambda job, profile: seen.append(job) or True)
    values = {**PLAIN, "gpu": "h100-80", "runs": str(tmp_path), "nodes": 4}
    (file := tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    for command in ("doctor", "submit"):
        arguments = [command, "deepsearch_14b", "--cluster", str(file)]
        assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    (looked_at,), (submission,) = seen, sent
    assert looked_at is not None and looked_at.parallel == submission.config.parallel
    assert looked_at.parallel.data == 8


def test_resume_uses_the_given_profile(tmp_path: Path, sent: list[Submission]) -> None:
    run = submitted(tmp_path, resolve.resolve("deepsearch_14b"), profile(runs=str(tmp_path)))
    values = {**PLAIN, "runs": str(tmp_path), "account": "another", "time": "08:00:00"}
    (file := tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    for arguments in (["--cluster", str(file)], []):
        assert CliRunner().invoke(app, ["resume", str(run.path), *arguments], catch_exceptions=False).exit_code == 0
    assert [job.profile.account for job in sent] == ["another", PLAIN["account"]]


def test_overrides_that_contradict_nodes_are_refused(tmp_path: Path, sent: list[Submission]) -> None:
    run = submitted(tmp_path, resolve.resolve("deepsearch_14b"), profile(runs=str(tmp_path)))
    with pytest.raises(UserError, match=r"3 nodes of 8 GPUs, but 16 trainer ranks .* need 2: use"):
        CliRunner().invoke(app, ["resume", str(run.path), "--nodes", "3", "parallel.data=4"], catch_exceptions=False)
    assert not sent


def test_batch_script_follows_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k")
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
    assert re.search(r"srun .* --relative=0 .* -m arpo_megatron.cluster ", text), (
        "the supervisor must be on the first node"
    )
    assert "export NOTE='two words'" in text and "export http_proxy=http://proxy:3128" in text
    assert "HTTP_PROXY" not in text, "names must keep their case"
    assert "=/mine" not in text, "the job must import the submitted code"
    assert "WANDB_API_KEY" not in text
    assert "# trainer   nodes 0 to 1" in text
    assert "# engine-7  node 2, GPU 7" in text


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("monitor.webhook_variable=ARPO_WEBHOOK", "ARPO_WEBHOOK"),
        ("sandbox.urls=[http://n9:8710]", "TOOLS_SANDBOX_TOKEN"),
    ],
)
def test_secret_that_the_nodes_would_not_know_is_not_submitted(override: str, name: str) -> None:
    config = resolve.resolve("quickstart", overrides=[override])
    with pytest.raises(UserError, match=rf"in the profile: `secrets: \{{{name}: env\}}`"):
        submit_jobs(prepare_submission(config, profile(), nodes=None))


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
    """nemo-run writes paths without quotes into PYTHONPATH, the srun command and sbatch's --output."""
    job = resolve.resolve("quickstart")
    with pytest.raises(UserError, match=r"^the run directory .* in it, which a batch script cannot hold: use"):
        prepare_submission(job, profile(runs=str(tmp_path / name)), nodes=None)
    with pytest.raises(UserError, match=r"^python: .* in it, which a batch script cannot hold: use"):
        prepare_submission(job, profile(runs=str(tmp_path), python=f"/tmp/{name}/python"), nodes=None)


def test_path_with_harmless_characters_is_submitted(tmp_path: Path) -> None:
    cluster = profile(runs=str(tmp_path / "a-b_c+d=e@f.1"), python="~/bin/python3")
    text = dry_run(prepare_submission(resolve.resolve("quickstart"), cluster, nodes=None))
    assert f" {Path.home()}/bin/python3 -m " in text
