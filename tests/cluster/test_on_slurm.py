"""Jobs on a real Slurm of two nodes, and what becomes of them when something fails."""

import secrets
import shlex
import time

import pytest
from onebox import Job, Onebox

from arpo_megatron import resolve
from arpo_megatron.cluster.plan import plan_roles
from arpo_megatron.cluster.profile import load_profile
from arpo_megatron.cluster.site import SlurmSite, gpu_words
from arpo_megatron.cluster.slurm import Node
from arpo_megatron.run_directory import RunDirectory

pytestmark = pytest.mark.timeout(900)

EXACT = ("loss", "grad_norm", "lr", "tokens")
COLD = ["sft.steps=40", "sft.batch=16", "sft.save_every=10"]
SECRET = secrets.token_hex(16)


def test_a_job_survives_a_dead_rank_a_dead_engine_and_a_preemption(box: Onebox) -> None:
    """Three lives of one run: killed in the cold start, resumed, preempted in training, requeued, done."""
    profile = box.profile("lives", environment={"NOTE": "two words"}, secrets={"TEST_SECRET": "env"})
    job = _submit_with_secret(box, profile)
    job.wait_for("25 updates", lambda: len(job.rows("sft_metrics.jsonl")) >= 25)
    before = job.rows("sft_metrics.jsonl")
    ranks = job.processes("arpo_megatron.cluster.rank")
    assert len(ranks) == 2
    assert {rank.environ()["SLURMD_NODENAME"] for rank in ranks} == {"n1", "n2"}
    assert all(str(job.run / "submissions") in rank.cwd() for rank in ranks), "not the code that was submitted"
    next(rank for rank in ranks if rank.environ()["SLURM_PROCID"] == "1").kill()
    assert job.end() == "FAILED"
    assert job.shown("ExitCode") == "1:0"
    assert "sft was killed by" in job.said() or "sft ended with exit code" in job.said(), str(job)
    assert "sft.log" in job.said()
    assert job.nothing_is_left()

    job = box.resume(job)
    job.wait_for("training", lambda: job.in_phase("rollout", 0))
    after = {row["step"]: row for row in job.rows("sft_metrics.jsonl")}
    assert len(after) == 40
    for row in before:  # 20 updates were saved; those after them were done twice
        assert {name: row[name] for name in EXACT} == {name: after[row["step"]][name] for name in EXACT}
    engine = job.processes("arpo_megatron.rollout.sglang_main")[0]
    assert engine.environ()["SLURMD_NODENAME"] == "n2"
    engine.kill()
    job.wait_for("the engine's restart", lambda: "engine is up again" in job.said())
    job.wait_for("a checkpoint", (job.run / "checkpoints" / "step_1").exists)
    box.slurm("scancel", "--signal=USR1", job.id)
    job.wait_for("the second start", lambda: job.shown("Restarts") == "1")
    assert "asked to end: " in job.said()
    assert job.end() == "COMPLETED"
    assert [row["step"] for row in job.rows()] == [1, 2, 3]
    assert "resumed from step_" in job.said()
    assert (job.run / "export" / "model.safetensors").exists()
    assert job.nothing_is_left()
    for path in job.run.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), f"a secret is in {path}"


def _submit_with_secret(box: Onebox, profile: str) -> Job:
    box.environment["TEST_SECRET"] = SECRET
    return box.submit("lives", *COLD, "train.steps=3", profile=profile)


def test_every_step_sees_all_gpus_of_its_node_so_that_the_plan_decides(box: Onebox) -> None:
    """Two steps at once, as an engine and the trainer that share GPUs are; Slurm believes in the GPUs."""
    config = resolve.resolve("quickstart", words=["parallel.data=8", "engine.placement=colocated"])
    profile = load_profile(box.profile("gpus", gpu_request="gres"))
    plan = plan_roles(config, 8, 1)
    site = SlurmSite(profile, plan, [Node("n1", "127.0.0.11")], RunDirectory(box.runs / "gpus"), "0")
    told = 'echo "$CUDA_VISIBLE_DEVICES"; sleep 1'
    steps = [
        shlex.join(site.step(name, site.nodes, tasks, ["bash", "-c", told])) for name, tasks in (("a", 1), ("b", 8))
    ]
    words = ["salloc", "-Q", "-N1", "-wn1", "--exclusive", *gpu_words(profile, plan)]
    started = time.monotonic()
    said = box.slurm(*words, "bash", "-c", f"{steps[0]} & {steps[1]} & wait")
    assert said.split() == ["0,1,2,3,4,5,6,7"] * 9
    assert time.monotonic() - started < 10, "the steps waited for each other"


def test_the_doctor_knows_what_slurm_will_refuse(box: Onebox) -> None:
    said = box.arpo("doctor", "quickstart", "--cluster", box.profile("well"))
    assert "preemption   REQUEUE, with the warning" in said
    ill = box.profile("ill", partition="nowhere", gpus_per_node=16)
    assert "failure  partition    nowhere does not exist" in box.arpo("doctor", "--cluster", ill, ok=False)
    assert "sbatch refused the job" in box.arpo("submit", "quickstart", "--cluster", ill, ok=False)
    assert not list(box.runs.glob("quickstart*")), "a refused run leaves nothing behind"
    many = box.profile("many", gpus_per_node=16)
    assert "the profile says 16 GPUs" in box.arpo("doctor", "--cluster", many, ok=False)
