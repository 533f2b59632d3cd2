"""One job on a real Slurm of two nodes, from the preflight check to its export; faults are in test_faults.py."""

import secrets
import shlex

import pytest
from typer.testing import CliRunner

from arpo_megatron.cli.cluster import app
from arpo_megatron.cluster.backend import SlurmBackend, gpu_options
from arpo_megatron.cluster.profile import load_profile
from arpo_megatron.cluster.slurm import Node
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.plan.node_layout import lay_out_nodes
from tests.cluster.onebox import Onebox

pytestmark = pytest.mark.timeout(1800)

SECRET = secrets.token_hex(16)


def test_job_on_two_nodes_completes(box: Onebox) -> None:
    mail = {"mail-user": "me@site.org", "mail-type": "END,FAIL,REQUEUE"}
    profile = box.profile("short", environment={"NOTE": "two words"}, secrets={"TEST_SECRET": "env"}, sbatch=mail)
    box.environment["TEST_SECRET"] = SECRET
    job = box.submit_run("short", "sft.steps=0", "train.steps=2", "train.tasks_per_step=2", profile=profile)
    job.wait_for("training", lambda: job.in_phase("rollout", 0))
    ranks = job.processes("arpo_megatron.cluster.rank")
    assert {rank.environ()["SLURMD_NODENAME"] for rank in ranks} == {"n1", "n2"}
    assert all(str(job.run / "submissions") in rank.cwd() for rank in ranks), "not the submitted code"
    (engine,) = job.processes("arpo_megatron.engine.server.main")
    assert engine.environ()["SLURMD_NODENAME"] == "n2"
    assert "engine" in (health := box.arpo("health", str(job.run))) and " up " in health
    assert job.end() == "COMPLETED", str(job)
    assert [row["step"] for row in job.rows()] == [1, 2]
    assert (job.run / "export" / "model.safetensors").exists()
    assert job.nothing_is_left()
    (sent,) = (box.folder / "log" / "mail").read_text().splitlines()
    assert "Ended" in sent and sent.endswith(" me@site.org")
    for path in job.run.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), f"a secret is in {path}"


def test_concurrent_steps_see_all_gpus_of_their_node(box: Onebox) -> None:
    """An engine and a trainer that share GPUs run as two steps. Slurm only believes that the node has GPUs."""
    config = resolve.resolve("quickstart", overrides=["parallel.data=8", "engine.placement=colocated"])
    profile = load_profile(box.profile("gpus", gpu_request="gres"))
    layout = lay_out_nodes(config, 8, 1)
    backend = SlurmBackend(profile, layout, [Node("n1", "127.0.0.11")], RunDirectory(box.runs / "gpus"), "0")
    # Each step prints its GPUs and waits until it sees the file of the other, on a busy machine for a minute.
    script = (
        'echo "$CUDA_VISIBLE_DEVICES"; : >"$0"; for _ in {1..600}; do [ -e "$1" ] && exit; sleep 0.1; done; echo alone'
    )
    files = [str(box.runs / name) for name in ("a-is-here", "b-is-here")]
    steps = [
        shlex.join(backend.step("a", backend.nodes, 1, ["bash", "-c", script, *files])),
        shlex.join(backend.step("b", backend.nodes, 8, ["bash", "-c", script, *reversed(files)])),
    ]
    allocation = ["salloc", "-Q", "-N1", "-wn1", "--exclusive", *gpu_options(profile, layout)]
    output = box.slurm(*allocation, "bash", "-c", f"{steps[0]} & {steps[1]} & wait")
    assert output.split() == ["0,1,2,3,4,5,6,7"] * 9


def test_doctor_finds_what_slurm_would_refuse(box: Onebox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", box.environment["SLURM_CONF"])
    monkeypatch.setenv("PYTHONPATH", box.environment["PYTHONPATH"])

    def arpo(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, arguments)
        return result.exit_code, result.output + str(result.exception or "")

    assert (
        "preemption   REQUEUE, with a warning 120 s before the end" in arpo("doctor", "--cluster", box.profile("ok"))[1]
    )
    ill = box.profile("ill", partition="nowhere", gpus_per_node=16)
    code, output = arpo("doctor", "--cluster", ill)
    assert code == 1 and "failure  partition    nowhere does not exist" in output
    assert "sbatch refused the job" in arpo("submit", "quickstart", "--cluster", ill)[1]
    assert not list(box.runs.glob("quickstart*")), "a refused run must be removed"
    code, output = arpo("doctor", "--cluster", box.profile("many", gpus_per_node=16))
    assert code == 1 and "the profile requests 16 GPUs" in output
