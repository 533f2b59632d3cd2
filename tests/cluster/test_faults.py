"""Processes, nodes and disks that fail during a job: its final state, exact continuation, and no leftovers."""

import re
import subprocess
from contextlib import suppress

import psutil
import pytest

from tests.cluster.onebox import LIVE, Job, Onebox
from tests.cluster.training import Undisturbed, failed, is_whole, start, trains
from tests.faults import small_disk

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slurm_campaign]


def test_killed_rank_ends_the_job_and_resume_is_exact(box: Onebox, calm: Undisturbed) -> None:
    job = start(box, calm, "rank")
    # Early, because on a busy machine the search may take longer than the rest of the training.
    job.wait_for("ranks", lambda: len(job.processes("arpo_megatron.cluster.rank")) == 2)
    ranks = job.processes("arpo_megatron.cluster.rank")
    victim = next(rank for rank in ranks if rank.environ()["SLURM_PROCID"] == "1")
    trains(job)
    victim.kill()
    job.wait_for("end", lambda: job.state() not in LIVE, dead=True)
    found = re.search(r"arpo: sft ended with exit code (\d+); log: .*sft.log", job.log())
    assert found, str(job)
    # srun's code is the highest of the ranks': 137 of the killed one, unless the other rank ended first.
    failed(job, f"{found[1]}:0")
    is_whole(box.resume(job), calm)


@pytest.mark.parametrize(
    ("service", "module"), [("sandbox", "tools_sandbox"), ("engine", "arpo_megatron.engine.server.main")]
)
def test_killed_service_is_restarted(box: Onebox, service: str, module: str) -> None:
    job = box.submit_run(f"killed-{service}", "sft.steps=0", "train.steps=12")
    job.wait_for("the service", lambda: job.processes(module))
    victim = job.processes(module)[0]
    job.wait_for("training", lambda: job.in_phase("rollout", 0))
    victim.kill()
    job.wait_for("restart", lambda: f"{service} is up again" in job.log())
    assert job.end() == "COMPLETED", str(job)
    assert [row["step"] for row in job.rows()] == [*range(1, 13)]
    assert job.nothing_is_left()


def test_job_with_killed_supervisor_resumes_on_fewer_nodes(box: Onebox, calm: Undisturbed) -> None:
    job = start(box, calm, "supervisor")
    job.wait_for("supervisor", lambda: job.processes("arpo_megatron.cluster"))
    # A child between fork and exec looks the same, but is younger.
    victim = min(job.processes("arpo_megatron.cluster"), key=psutil.Process.create_time)
    trains(job)
    victim.kill()
    failed(job, "137:0")
    again = box.resume(job, "--nodes", "1")
    is_whole(again, calm)
    assert again.shown("NumNodes") == "1"


def test_next_job_of_a_chain_continues_after_a_failure(box: Onebox, calm: Undisturbed) -> None:
    job = start(box, calm, "mortal", chain=2)
    job.wait_for("ranks", lambda: len(job.processes("arpo_megatron.cluster.rank")) == 2)
    victim = job.processes("arpo_megatron.cluster.rank")[0]
    trains(job)
    victim.kill()
    assert job.end() == "FAILED", str(job)
    is_whole(Job(box, job.run, job.ids[1:]), calm)


def test_job_is_requeued_without_a_dead_node(box: Onebox, calm: Undisturbed) -> None:
    """New steps have the numbers of old steps that Slurm is still killing on the lost node."""
    job = start(box, calm, "node")
    trains(job)
    box.lose_power("n2")
    job.wait_for("requeue", lambda: job.shown("Restarts") == "1", dead=True)
    job.wait_for("its reason", lambda: "DUE TO NODE FAILURE" in job.log(), dead=True)
    # Slurm repeats kills for the lost node, also of this job, until it knows that the node is down.
    job.wait_for("n2 down", lambda: "down" in box.slurm("sinfo", "-hNo%N %T", "-nn2"))
    subprocess.run(["/usr/sbin/slurmd", "-N", "n2"], env=box.environment, check=True)
    is_whole(job, calm)


def test_job_ended_by_a_full_disk_resumes_with_free_space(box: Onebox, calm: Undisturbed) -> None:
    disk = box.runs / "disk"
    disk.mkdir()
    with small_disk(disk, 1300 * 2**20):
        filler = disk / "filler"
        job = start(box, calm, "disk/run")
        trains(job)
        with filler.open("wb", buffering=0) as file, suppress(OSError):  # the job writes too, so the free space changes
            while True:
                file.write(bytes(2**20))
        output = failed(job, "2:0")
        assert "checkpoints in a row could not be saved" in output or "No space left on device" in output
        filler.unlink()
        is_whole(box.resume(job), calm)
