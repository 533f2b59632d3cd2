"""Every way in which a cluster fails a job: the final state, and that training goes on with nothing left behind."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from onebox import Job, Onebox

pytestmark = [pytest.mark.timeout(900), pytest.mark.slurm_campaign]

STEPS = 3
COLD = ["sft.steps=20", "sft.batch=16"]


@pytest.fixture(scope="module")
def cold(box: Onebox) -> Path:
    """A run that nothing disturbs; the others begin with its cold start."""
    job = box.submit("undisturbed", *COLD, "train.steps=1")
    assert job.end() == "COMPLETED", str(job)
    return job.run


def start(box: Onebox, cold: Path, name: str, *words: str, profile: str = "", nodes: int = 2, chain: int = 1) -> Job:
    (box.runs / name).mkdir()
    for part in ("initial_model", "cold_start"):
        shutil.copytree(cold / part, box.runs / name / part)
    steps = [] if any(word.startswith("train.steps") for word in words) else [f"train.steps={STEPS}"]
    options = ("--chain", str(chain)) if chain > 1 else ()
    return box.submit(name, *COLD, *steps, *words, profile=profile, nodes=nodes, options=options)


def trains(job: Job, step: int = 1) -> None:
    """Wait until a rollout after `step` steps has begun and their checkpoint is there."""
    job.wait_for(f"checkpoint {step}", (job.run / "checkpoints" / f"step_{step}").exists)
    job.wait_for(f"rollout {step + 1}", lambda: job.in_phase("rollout", step))


def is_whole(job: Job, steps: int = STEPS) -> None:
    """It has ended well: every step once, the export there, no process left."""
    assert job.end() == "COMPLETED", str(job)
    assert [row["step"] for row in job.rows()] == list(range(1, steps + 1))
    assert (job.run / "export" / "model.safetensors").exists()
    assert job.nothing_is_left()


def failed(job: Job, code: str) -> str:
    assert job.end() == "FAILED", str(job)
    assert job.shown("ExitCode") == code
    assert job.nothing_is_left()
    return job.said()


def test_a_killed_tool_service_is_restarted(box: Onebox, cold: Path) -> None:
    job = start(box, cold, "tools")
    trains(job)
    job.processes("tools_sandbox")[0].kill()
    job.wait_for("restart", lambda: "sandbox is up again" in job.said())
    is_whole(job)


def test_a_killed_supervisor_ends_the_job_which_goes_on_with_fewer_nodes(box: Onebox, cold: Path) -> None:
    job = start(box, cold, "supervisor")
    trains(job)
    job.processes("arpo_megatron.cluster")[0].kill()
    failed(job, "137:0")
    again = box.resume(job, "--nodes", "1")
    is_whole(again)
    assert again.shown("NumNodes") == "1"
    assert "resumed from step_" in again.said()


def test_a_cancelled_job_leaves_nothing(box: Onebox, cold: Path) -> None:
    job = start(box, cold, "cancelled")
    trains(job)
    assert "cancelled job" in box.arpo("cancel", str(job.run))
    assert job.end() == "CANCELLED"
    assert job.nothing_is_left()
    assert "no job that waits or runs" in box.arpo("cancel", str(job.run), ok=False)
    assert not list(job.run.glob("checkpoints/*.tmp"))


def test_a_preempted_job_saves_and_comes_back(box: Onebox, cold: Path) -> None:
    job = start(box, cold, "preempted")
    trains(job)
    urgent = box.slurm("sbatch", "--parsable", "-p", "urgent", "-N2", "--exclusive", "-o/dev/null", "--wrap=sleep 3")
    job.wait_for("requeue", lambda: job.shown("Restarts") == "1")
    assert "asked to end: " in job.said()
    is_whole(job)
    assert job.state(urgent.strip()) == "COMPLETED"


def test_a_chain_goes_on_when_time_is_up(box: Onebox, cold: Path) -> None:
    profile = box.profile("short", time="00:03:00", signal_s=60)
    job = start(box, cold, "chain", "train.steps=60", profile=profile, chain=4)
    for link in job.ids:
        job.wait_for(f"end of {link}", lambda link=link: job.state(link) in {"COMPLETED", "CANCELLED"}, dead=True)
    states = [job.state(link) for link in job.ids]
    assert states[:2] == ["COMPLETED", "COMPLETED"], states
    assert f"saved; job {job.ids[1]} goes on" in job.said()
    assert [row["step"] for row in job.rows()] == list(range(1, len(job.rows()) + 1))
    assert len(job.rows()) == 60 or states[-1] == "COMPLETED"
    assert job.nothing_is_left()


def test_a_job_leaves_a_dead_node_and_comes_back(box: Onebox, cold: Path) -> None:
    job = start(box, cold, "node")
    trains(job)
    for process in psutil.process_iter():  # as when the machine loses power
        try:
            words, variables = " ".join(process.cmdline()), process.environ()
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
        mine = variables.get("SLURM_CONF", "").startswith(str(box.folder)) or str(box.folder) in words
        there = variables.get("SLURMD_NODENAME") == "n2" or words.endswith("-N n2") or "-n2" in words.split(" ")[0]
        if mine and there:
            process.kill()
    job.wait_for("requeue", lambda: job.shown("Restarts") == "1", dead=True)
    assert "n2 cannot be reached any more" in job.said()
    # Until Slurm knows that the node is down it repeats what it could not tell it: to end this very job, too.
    job.wait_for("n2 down", lambda: "down" in box.slurm("sinfo", "-hNo%N %T", "-nn2"))
    subprocess.run(["/usr/sbin/slurmd", "-N", "n2"], env=box.environment, check=True)
    is_whole(job)


def test_a_full_disk_ends_a_job_that_goes_on_when_there_is_room(box: Onebox, cold: Path) -> None:
    disk = box.runs / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1300m", "tmpfs", disk], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"no small disk can be made: {mount.stderr}")
    try:
        filler = disk / "filler"
        job = start(box, cold, "disk/run", "train.steps=30")
        trains(job)
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free - 2**20)
        said = failed(job, "2:0")
        assert "checkpoints in a row could not be saved" in said
        filler.unlink()
        done = max(int(path.name[5:]) for path in (job.run / "checkpoints").glob("step_*[0-9]"))
        again = box.resume(job, f"train.steps={done + 2}")
        assert again.end() == "COMPLETED", str(again)
        assert [row["step"] for row in again.rows()] == list(range(1, done + 3))
    finally:
        job.end()
        subprocess.run(["umount", "-l", disk], check=True)


def test_a_container_that_is_not_there_ends_the_job_at_once(box: Onebox, cold: Path) -> None:
    profile = box.profile("container", container="/not/there.sqsh")
    started = time.monotonic()
    job = start(box, cold, "container", profile=profile)
    said = failed(job, "2:0")
    assert time.monotonic() - started < 60
    assert "arpo: doctor: a node cannot even run it" in said


@pytest.fixture
def taken() -> Iterator[tuple[int, list[socket.socket]]]:
    """A range of 64 ports, all of them taken on both nodes; the sockets can be closed one by one."""
    first = 23000
    with ExitStack() as stack:
        sockets = []
        for port in range(first, first + 64):
            for host in ("127.0.0.11", "127.0.0.12"):
                listener = stack.enter_context(socket.socket())
                listener.bind((host, port))
                listener.listen()
                sockets.append(listener)
        yield first, sockets


def test_taken_ports_are_left_alone_and_a_lack_of_them_is_told(
    box: Onebox, cold: Path, taken: tuple[int, list[socket.socket]]
) -> None:
    first, sockets = taken
    sockets[126].close()
    sockets[127].close()  # the supervisor finds one port to meet at, the services none
    profile = box.profile("ports", ports=[first, first + 63])
    said = failed(start(box, cold, "no-ports", profile=profile), "2:0")
    assert "arpo: doctor: ports on n" in said
    for listener in sockets[:80]:
        listener.close()
    is_whole(start(box, cold, "ports", "train.steps=1", profile=profile), 1)


def test_two_jobs_side_by_side_do_not_disturb_each_other(box: Onebox, cold: Path) -> None:
    jobs = [start(box, cold, f"side-{index}", "train.steps=2", nodes=1) for index in range(2)]
    for job in jobs:
        job.wait_for("training", lambda job=job: job.in_phase("rollout", 0))
    assert {job.state() for job in jobs} == {"RUNNING"}
    for job in jobs:
        is_whole(job, 2)


def test_a_job_of_the_same_run_is_not_submitted_twice(box: Onebox, cold: Path) -> None:
    job = start(box, cold, "twice", "train.steps=1")
    assert f"job {job.id} of twice is in the queue" in box.arpo("resume", str(job.run), ok=False)
    is_whole(job, 1)
