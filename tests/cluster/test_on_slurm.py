"""Jobs on a real Slurm of two nodes, and what becomes of them when something fails."""

import secrets
import shlex

import pytest

from arpo_megatron.cluster.backend import SlurmBackend, gpu_options
from arpo_megatron.cluster.profile import load_profile
from arpo_megatron.cluster.slurm import Node
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.plan.node_layout import lay_out_nodes
from tests.cluster.onebox import Onebox

pytestmark = pytest.mark.timeout(1800)

SECRET = secrets.token_hex(16)


def test_a_job_loses_an_engine_and_is_preempted_and_ends_well(box: Onebox) -> None:
    profile = box.profile("short", environment={"NOTE": "two words"}, secrets={"TEST_SECRET": "env"})
    box.environment["TEST_SECRET"] = SECRET
    job = box.submit_run("short", "sft.steps=0", "train.steps=12", "train.tasks_per_step=2", profile=profile)
    job.wait_for("the engine", lambda: job.processes("arpo_megatron.engine.server.main"))
    engine = job.processes("arpo_megatron.engine.server.main")[0]
    job.wait_for("training", lambda: job.in_phase("rollout", 0))
    ranks = job.processes("arpo_megatron.cluster.rank")
    assert {rank.environ()["SLURMD_NODENAME"] for rank in ranks} == {"n1", "n2"}
    assert all(str(job.run / "submissions") in rank.cwd() for rank in ranks), "not the code that was submitted"
    assert engine.environ()["SLURMD_NODENAME"] == "n2"
    engine.kill()
    assert "engine" in (health := box.arpo("health", str(job.run))) and " up " in health  # the tools, at least
    job.wait_for("the engine's restart", lambda: "engine is up again" in job.said())
    box.slurm("scancel", "--signal=USR1", job.id)
    assert job.end() == "COMPLETED", str(job)
    assert job.shown("Restarts") == "1"
    assert [row["step"] for row in job.rows()] == [*range(1, 13)]
    assert (job.run / "export" / "model.safetensors").exists()
    assert job.nothing_is_left()
    for path in job.run.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), f"a secret is in {path}"


def test_every_step_sees_all_gpus_of_its_node_so_that_the_plan_decides(box: Onebox) -> None:
    """Two steps at once, as an engine and the trainer that share GPUs are; Slurm believes in the GPUs."""
    config = resolve.resolve("quickstart", overrides=["parallel.data=8", "engine.placement=colocated"])
    profile = load_profile(box.profile("gpus", gpu_request="gres"))
    plan = lay_out_nodes(config, 8, 1)
    backend = SlurmBackend(profile, plan, [Node("n1", "127.0.0.11")], RunDirectory(box.runs / "gpus"), "0")
    # Each says whether it has met the other, however busy the machine is.
    told = (
        'echo "$CUDA_VISIBLE_DEVICES"; : >"$0"; for _ in {1..600}; do [ -e "$1" ] && exit; sleep 0.1; done; echo alone'
    )
    here = [str(box.runs / name) for name in ("a-is-here", "b-is-here")]
    steps = [
        shlex.join(backend.step("a", backend.nodes, 1, ["bash", "-c", told, *here])),
        shlex.join(backend.step("b", backend.nodes, 8, ["bash", "-c", told, *reversed(here)])),
    ]
    words = ["salloc", "-Q", "-N1", "-wn1", "--exclusive", *gpu_options(profile, plan)]
    said = box.slurm(*words, "bash", "-c", f"{steps[0]} & {steps[1]} & wait")
    assert said.split() == ["0,1,2,3,4,5,6,7"] * 9


def test_the_doctor_knows_what_slurm_will_refuse(box: Onebox) -> None:
    said = box.arpo("doctor", "quickstart", "--cluster", box.profile("well"))
    assert "preemption   REQUEUE, with a warning 120 s before the end" in said
    ill = box.profile("ill", partition="nowhere", gpus_per_node=16)
    assert "failure  partition    nowhere does not exist" in box.arpo("doctor", "--cluster", ill, ok=False)
    assert "sbatch refused the job" in box.arpo("submit", "quickstart", "--cluster", ill, ok=False)
    assert not list(box.runs.glob("quickstart*")), "a refused run leaves nothing behind"
    many = box.profile("many", gpus_per_node=16)
    assert "the profile requests 16 GPUs" in box.arpo("doctor", "--cluster", many, ok=False)
