"""`arpo eval`, `export` and `sft` with --cluster, and `arpo submit --then`: jobs of their own."""

import json
import re
import urllib.request
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from arpo_megatron.cli.main import app
from arpo_megatron.cluster import runs
from arpo_megatron.cluster.commands import _address_of_server
from arpo_megatron.cluster.slurm import JobState, Node
from arpo_megatron.cluster.submissions import command_jobs, record_command
from arpo_megatron.cluster.submit import dry_run
from arpo_megatron.cluster.submit_run import submit_run
from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.run_directory import RunDirectory
from tests.cluster.onebox import Onebox
from tests.cluster.stand_in import PLAIN, Queue, profile


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Queue:
    queue = Queue(takes=9)
    for module in ("submit", "commands"):
        monkeypatch.setattr(f"arpo_megatron.cluster.{module}.submit_one", queue.send)
    monkeypatch.setattr("arpo_megatron.cluster.slurm.call", queue.call)
    (tmp_path / "here.yaml").write_text(yaml.safe_dump({**PLAIN, "runs": str(tmp_path)}))
    return queue


def arpo(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_commands_that_follow_a_training_wait_for_it(
    queue: Queue, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ("--cluster", tmp_path / "here.yaml")
    output = arpo("submit", "quickstart", "platform=cpu", *place, "--chain", "2", "--then", "export,eval")
    (run,) = {submission.run for submission in queue.sent}
    assert "job 4714 then runs arpo eval" in output
    assert [submission.after for submission in queue.sent[2:]] == [("4711", "4712"), ("4713",)]
    assert [submission.arguments[1:] for submission in queue.sent[2:]] == [
        ("export", str(run.path)),
        ("eval", str(run.path)),
    ]
    assert "#SBATCH --dependency=afterany:4711:4712\n" in dry_run(queue.sent[2])
    runs.print_status(str(run.path), None)
    assert f"job 4713 PENDING: arpo export {run.path}\n" in capsys.readouterr().out
    runs.cancel(runs.find_run(str(run.path)))
    assert set(queue.jobs.values()) == {"CANCELLED"}


def test_python_function_submits_as_the_command_does(queue: Queue, tmp_path: Path) -> None:
    job = resolve.resolve("quickstart", overrides=["platform=cpu"])
    submitted = submit_run(job, str(tmp_path / "here.yaml"), chain=2, then=["export"])
    assert (submitted.jobs, submitted.following) == (("4711", "4712"), (("export", "4713"),))
    assert str(submitted) == (
        f"quickstart-arpo-seed1: job 4711, 4712, run directory {tmp_path / 'quickstart-arpo-seed1'}\n"
        "quickstart-arpo-seed1: job 4713 then runs arpo export"
    )
    queue.takes = 4
    with pytest.raises(UserError, match=r"export: sbatch refused .*; submitted before it: \S+-2: job 4714, run"):
        submit_run(job, profile(runs=str(tmp_path)), then=["export"])
    with pytest.raises(UserError, match="only `arpo submit` reaches the login node me@there over SSH"):
        submit_run(job, profile(ssh="me@there", python="/p/python"))


def test_command_on_a_cluster_keeps_its_arguments(queue: Queue, tmp_path: Path) -> None:
    place = ("--cluster", tmp_path / "here.yaml")
    arpo("sft", "quickstart", "platform=cpu", *place)
    name = queue.sent[0].run.path.name
    arpo("eval", name, "evaluation.temperature=0", "--step", "3", "--k", "2", "--skip-missing", *place)
    arpo("export", name, "--step", "3", "--out", tmp_path / "out", *place)
    arpo("serve", name, "engine.max_running_requests=4", "--step", "3", "--concurrency", "4", *place)
    for command in ("eval", "export", "serve"):
        script = arpo(command, name, "--dry-run", *place)
        assert f" {command} " in script and script.startswith("#!/bin/bash"), "it is printed, not submitted"
    sft, evaluation, export, served = queue.sent
    assert served.job_name == f"arpo-{name}-serve"
    assert " ".join(served.arguments[3:]) == "engine.max_running_requests=4 --step 3 --concurrency 4"
    assert sft.arguments == ("--sft",) and sft.job_name == f"arpo-{name}"
    data = f"--data {Path('data/eval').absolute()}"
    options = f"--k 2 {data} --skip-missing --setting recipes --step 3"
    assert " ".join(evaluation.arguments[3:]) == f"evaluation.temperature=0 {options}"
    assert " ".join(export.arguments[3:]) == f"--out {tmp_path / 'out'} --step 3"
    with pytest.raises(UserError, match="--then serve: use eval or export"):
        arpo("submit", "quickstart", *place, "--then", "serve")


def test_half_written_record_of_a_command_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path)
    run.submissions.mkdir()
    record_command(run, "4711", "arpo-run-eval", ["eval", "run"])
    with next(run.submissions.iterdir()).open("a") as file:
        file.write('{"job": "47')
    state = JobState("4711", "PENDING", name="arpo-run-eval")
    monkeypatch.setattr("arpo_megatron.cluster.slurm.job_states", lambda jobs: {"4711": state})
    assert command_jobs(run) == [("arpo eval run", state)]


def test_run_of_32_ranks_is_exported_by_one_process(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arpo_megatron.cluster.submit.check_files", lambda *_: None)  # the weights are not here
    place = ("--cluster", tmp_path / "here.yaml")
    arpo("submit", "deepsearch_14b+4nodes", *place)
    (training,) = queue.sent
    assert training.config.parallel.world_size == 32 and training.layout.nodes == 4
    script = arpo("export", training.run.path.name, "--step", "60", "--dry-run", *place)
    assert "#SBATCH --nodes=1\n" in script and "#SBATCH --ntasks-per-node=1\n" in script


def test_server_listens_on_its_node_at_a_port_of_the_profile() -> None:
    ports = (28000, 28100)
    node = Node("n1", "127.0.0.1")
    host, token, port = _address_of_server(["serve", "RUN"], node, profile(ports=list(ports)))
    assert (host, token) == ("--host=127.0.0.1", "--token")
    assert ports[0] <= int(port.removeprefix("--port=")) <= ports[1]
    assert _address_of_server(["serve", "RUN", "--port", "9"], node, profile()) == [host, token]


@pytest.mark.slurm_campaign
@pytest.mark.timeout(1800)
def test_training_is_followed_by_an_export_and_an_evaluation(box: Onebox) -> None:
    wandb = "monitor.wandb=offline"
    job = box.submit_run("chain", "sft.steps=0", "train.steps=1", wandb, options=("--then", "export,eval"))
    assert job.end() == "COMPLETED", str(job)
    assert f"wandb: wandb sync {job.run}/wandb/offline-run-" in job.log()
    _, export, evaluation = (
        line.split()[1] for line in box.arpo("status", str(job.run)).splitlines() if "job " in line
    )
    for number in (export, evaluation):
        assert job.end(number) == "COMPLETED", "".join(path.read_text() for path in job.run.glob("logs/*/*.out"))
    ours, theirs = (job.run / path / "model.safetensors" for path in ("export", "exports/step_1"))
    assert ours.read_bytes() == theirs.read_bytes()
    assert list(job.run.rglob("summary.json"))
    assert '"benchmarks"' in box.arpo("logs", str(job.run), "--service", "eval")


@pytest.mark.slurm_campaign
@pytest.mark.timeout(900)
def test_server_answers_on_its_node_to_callers_with_its_token(box: Onebox) -> None:
    job = box.submit_run("served", "sft.steps=0", "train.steps=1", "train.tasks_per_step=2")
    assert job.end() == "COMPLETED", str(job)
    server = _number(box.arpo("serve", str(job.run), "--step", "1", "--cluster", box.profile("serve")))

    def log() -> str:
        return "".join(path.read_text() for path in job.run.glob("logs/serve/*.out"))

    address = re.compile(r"^(http://127\.0\.0\.1[12]:\d+/v1)$", re.MULTILINE)
    job.wait_for("the server", lambda: address.search(log()), dead=True)
    url, token = address.search(log()), re.search(r"token: (\S+)", log())
    assert url and token
    body = json.dumps({"messages": [{"role": "user", "content": "1 + 2"}], "max_tokens": 8}).encode()
    headers = {"Authorization": f"Bearer {token[1]}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url[1]}/chat/completions", body, headers), timeout=60) as got:
        assert json.load(got)["choices"]
    box.slurm("scancel", server)
    job.wait_for("the end", job.nothing_is_left, dead=True)


def _number(output: str) -> str:
    found = re.search(r": job (\d+),", output)
    assert found, output
    return found[1]
