"""`arpo eval`, `export` and `sft` with --cluster, and `arpo submit --then`: jobs of their own."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from arpo_megatron.cli.main import app
from arpo_megatron.cluster import runs
from arpo_megatron.cluster.submit import dry_run
from arpo_megatron.errors import UserError
from tests.cluster.onebox import Onebox
from tests.cluster.stand_in import PLAIN, Queue


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


def test_command_on_a_cluster_keeps_its_arguments(queue: Queue, tmp_path: Path) -> None:
    place = ("--cluster", tmp_path / "here.yaml")
    arpo("sft", "quickstart", "platform=cpu", *place)
    name = queue.sent[0].run.path.name
    arpo("eval", name, "evaluation.temperature=0", "--step", "3", "--k", "2", "--skip-missing", *place)
    arpo("export", name, "--step", "3", "--out", tmp_path / "out", *place)
    sft, evaluation, export = queue.sent
    assert sft.arguments == ("--sft",) and sft.job_name == f"arpo-{name}"
    data = f"--data {Path('data/eval').absolute()}"
    assert " ".join(evaluation.arguments[3:]) == f"evaluation.temperature=0 --k 2 {data} --skip-missing --step 3"
    assert " ".join(export.arguments[3:]) == f"--out {tmp_path / 'out'} --step 3"
    with pytest.raises(UserError, match="--then serve: use eval or export"):
        arpo("submit", "quickstart", *place, "--then", "serve")


@pytest.mark.slurm_campaign
@pytest.mark.timeout(1800)
def test_training_is_followed_by_an_export_and_an_evaluation(box: Onebox) -> None:
    job = box.submit_run("chain", "sft.steps=0", "train.steps=1", options=("--then", "export,eval"))
    assert job.end() == "COMPLETED", str(job)
    _, export, evaluation = (
        line.split()[1] for line in box.arpo("status", str(job.run)).splitlines() if "job " in line
    )
    for number in (export, evaluation):
        assert job.end(number) == "COMPLETED", "".join(path.read_text() for path in job.run.glob("logs/*/*.out"))
    ours, theirs = (job.run / path / "model.safetensors" for path in ("export", "exports/step_1"))
    assert ours.read_bytes() == theirs.read_bytes()
    assert list(job.run.rglob("summary.json"))
    assert '"benchmarks"' in box.arpo("logs", str(job.run), "--role", "eval")
