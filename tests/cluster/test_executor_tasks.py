"""Jobs started by nemo-run's own executors: one job however many tasks the executor has."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from arpo_megatron.cluster import executor_tasks
from arpo_megatron.cluster.executor import profile_of_executor, slurm_executor
from arpo_megatron.cluster.profile import load_profile
from tests.cluster.onebox import ROOT, TINY, Job, Onebox

SHARE = """
import sys, time
from pathlib import Path
from arpo_megatron.cluster import executor_tasks
folder = Path(sys.argv[1])
executor_tasks._LEAVE_S = float(sys.argv[2])
with executor_tasks.first_task(folder) as first:
    if first:
        time.sleep(0.5)
        with (folder / "runs").open("a") as file: file.write("one\\n")
print(first, (folder / "runs").exists())
"""
EXPERIMENT = """
import sys
import nemo_run as run
from arpo_megatron.cli.nemo import factories, slurm_executor, train
from arpo_megatron.jobs import resolve
from pathlib import Path

job = factories["quickstart"]()
job.run_dir = Path(sys.argv[2])
for key, value in (each.split("=") for each in sys.argv[3:]):
    section, _, name = key.rpartition(".")
    setattr(getattr(job, section) if section else job, name, resolve.parse_value(value))
if sys.argv[1] == "slurm":
    executor = run.SlurmExecutor(
        account="root", partition="batch", nodes=2, ntasks_per_node=3, mem=None, time="00:20:00",
        tunnel=run.LocalTunnel(job_dir=""), packager=run.Packager(), container_image=None,
        env_vars={"PYTHONPATH": sys.path[0]},
    )
else:
    executor = run.LocalExecutor(ntasks_per_node=3, launcher="torchrun")
if sys.argv[1].endswith(".yaml"):
    executor = slurm_executor(sys.argv[1], nodes=2)
with run.Experiment("job", clean_mode=True) as experiment:
    experiment.add(run.Partial(train, job=job), executor=executor, name="job", tail_logs=False)
    experiment.run(detach=sys.argv[1] != "local")
"""


def start(folder: Path, number: int, leave_s: float) -> "subprocess.Popen[str]":
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": str(number)}
    return subprocess.Popen(
        [sys.executable, "-c", SHARE, str(folder), str(leave_s)],
        env={**os.environ, **slurm, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_task_that_starts_after_the_end_of_the_first_does_not_wait(tmp_path: Path) -> None:
    first, *late = (start(tmp_path, number, 0.0).communicate(timeout=120)[0].split() for number in (0, 1, 2))
    assert first == ["True", "True"] and late == [["False", "True"]] * 2
    assert (tmp_path / "runs").read_text() == "one\n"


def test_one_of_an_executors_tasks_runs_the_job_and_the_others_wait(tmp_path: Path) -> None:
    tasks = [start(tmp_path, number, 120.0) for number in (2, 1, 0)]
    assert [task.communicate(timeout=120)[0].split() for task in tasks] == [["False", "True"]] * 2 + [["True", "True"]]
    assert (tmp_path / "runs").read_text() == "one\n"
    assert [path.name for path in tmp_path.iterdir()] == ["runs"], "the tasks must leave no files"


def train(box: Onebox, kind: str, name: str, *overrides: str) -> Path:
    """Run an experiment of nemo-run and return the run directory."""
    pytest.importorskip("nemo_run", reason="nemo-run is not installed (the `slurm` extra)")
    home = box.runs / f"{name}-home"
    home.mkdir()
    script = home / "experiment.py"
    script.write_text(EXPERIMENT)
    path = f"{Path(sys.executable).parent}:{box.environment['PATH']}"  # nemo-run starts `python`
    done = subprocess.run(
        [sys.executable, str(script), kind, str(box.runs / name), *TINY, "sft.steps=0", "train.steps=1", *overrides],
        env={**box.environment, "NEMORUN_HOME": str(home), "PATH": path},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return box.runs / name


@pytest.mark.slurm_campaign
@pytest.mark.timeout(900)
def test_local_executor_with_several_tasks_trains_one_run(box: Onebox) -> None:
    run = train(box, "local", "local")
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 1
    assert (run / "export" / "model.safetensors").exists()
    assert not list(box.runs.glob("local-2"))


@pytest.mark.slurm_campaign
@pytest.mark.timeout(900)
def test_slurm_executor_with_several_tasks_trains_one_run_on_all_its_nodes(box: Onebox) -> None:
    run = train(box, "slurm", "executor")
    number = max(box.slurm("squeue", "-h", "-t", "all", "-o", "%i").split(), key=int)  # earlier jobs are shown, too
    job = Job(box, run, [number])
    job.wait_for("training", lambda: job.in_phase("rollout", 0))
    ranks = job.processes("arpo_megatron.cluster.rank")
    assert sorted(rank.environ()["SLURMD_NODENAME"] for rank in ranks) == ["n1", "n2"]
    assert job.end() == "COMPLETED", str(job)
    assert [row["step"] for row in job.rows()] == [1]
    assert f"job {number} COMPLETED" in box.arpo("status", str(run))
    assert not list(box.runs.glob(".tasks-*")) and job.nothing_is_left()


@pytest.mark.slurm_campaign
@pytest.mark.timeout(1800)
def test_executor_of_a_profile_restarts_a_job_whose_rank_was_killed(box: Onebox) -> None:
    profile = box.profile("restarts", restarts=1, environment={"NOTE": "of the profile"})
    run = train(box, profile, "restarted", "train.steps=6", "train.save_every=1")
    number = max(box.slurm("squeue", "-h", "-t", "all", "-o", "%i").split(), key=int)  # earlier jobs are shown, too
    job = Job(box, run, [number])
    job.wait_for("a checkpoint", lambda: any((run / "checkpoints").glob("step_*[0-9]")))
    ranks = job.processes("arpo_megatron.cluster.rank")
    assert {rank.environ()["NOTE"] for rank in ranks} == {"of the profile"}
    ranks[0].kill()
    job.wait_for("requeue", lambda: job.shown("Restarts") == "1")
    assert job.end() == "COMPLETED", str(job)
    assert [row["step"] for row in job.rows()] == [*range(1, 7)]
    assert job.nothing_is_left()


def test_executor_of_a_profile_has_its_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nemo_run", reason="nemo-run is not installed (the `slurm` extra)")
    values = {
        "account": "research",
        "runs": str(tmp_path),
        "container": "/images/it's.sqsh",
        "python": "/opt/arpo/bin/python",
        "environment": {"NOTE": "two words"},
        "restarts": 2,
        "sbatch": {"constraint": "h100"},
    }
    (tmp_path / "here.yaml").write_text(yaml.safe_dump(values))
    executor = slurm_executor(str(tmp_path / "here.yaml"), nodes=4)
    assert (executor.account, executor.nodes, executor.ntasks_per_node) == ("research", 4, 1)
    assert executor.container_image is None, "the supervisor needs srun"
    assert executor.additional_parameters == {"constraint": "h100", "gpus_per_node": "8"}
    shown = 'echo "$NOTE"; echo "$PATH" | cut -d: -f1; echo "$ARPO_CLUSTER_PROFILE"'
    done = subprocess.run(
        ["bash", "-c", f"{executor.setup_lines}\n{shown}"], capture_output=True, text=True, check=True
    )
    note, first, text = done.stdout.splitlines()
    assert (note, first) == ("two words", "/opt/arpo/bin")
    monkeypatch.setenv("ARPO_CLUSTER_PROFILE", text)
    assert profile_of_executor() == load_profile(str(tmp_path / "here.yaml"))


def test_requeued_executor_continues_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, job in (("mine", "7"), ("other", "8")):
        (tmp_path / name / "submissions").mkdir(parents=True)
        record = {"jobs": [job], "job_name": "search"}
        (tmp_path / name / "submissions" / "1.json").write_text(json.dumps(record))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NAME", "search")
    assert executor_tasks._requeued_run(tmp_path) is None, "a job that starts for the first time"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert executor_tasks._requeued_run(tmp_path) == tmp_path / "mine"
    monkeypatch.setenv("SLURM_JOB_NAME", "another user of this number")
    assert executor_tasks._requeued_run(tmp_path) is None
