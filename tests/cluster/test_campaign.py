"""Faults of a cluster: the final state of the job, exact continuation of the training, and no leftovers."""

import getpass
import json
import re
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from arpo_megatron.cluster.submissions import submissions_of
from arpo_megatron.config import ModelConfig
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.models.random_init import save_random_weights
from arpo_megatron.models.tiny import make_model_directory, train_bpe
from tests.cluster import sshd
from tests.cluster.onebox import LIVE, TINY, Job, Onebox
from tests.cluster.pyxis import pyxis
from tests.faults import small_disk
from tests.packages import install

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slurm_campaign]

UPDATES = 600
EXACT = ("loss", "grad_norm", "lr", "tokens")
TEMPLATE = "{% for m in messages %}{{ m['content'] }}<|endoftext|>{% endfor %}"


@dataclass(frozen=True)
class Undisturbed:
    """An undisturbed supervised training: its overrides, and the metrics of each update."""

    overrides: tuple[str, ...]
    rows: list[dict[str, Any]]


@pytest.fixture(scope="module")
def calm(box: Onebox) -> Undisturbed:
    """The reference: two ranks on two nodes, without engines, so that a start takes seconds."""
    talks, model = box.runs / "talks.jsonl", box.runs / "model"
    turns = [(f"what is thing {number}?", f"a number, {number * number}") for number in range(64)]
    messages = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in turns]
    talks.write_text("".join(json.dumps({"messages": each}) + "\n" for each in messages))
    tokenizer = train_bpe([talks.read_text()], 400)
    tokenizer.chat_template = TEMPLATE
    make_model_directory(model, ModelConfig(hidden_size=32, layers=2, heads=2, kv_heads=2, ffn_size=64), tokenizer)
    save_random_weights(model, seed=1)
    overrides = (
        f"model.path={model}",
        f"sft.data={talks}",
        "sft.batch=32",
        "sft.save_every=10",
        "model.max_length=128",
    )
    job = box.submit_run("undisturbed", *overrides, f"sft.steps={UPDATES}")
    assert job.end() == "COMPLETED", str(job)
    return Undisturbed(overrides, job.rows("sft_metrics.jsonl"))


def start(
    box: Onebox,
    calm: Undisturbed,
    name: str,
    *,
    updates: int = UPDATES,
    profile: str = "",
    nodes: int = 2,
    chain: int = 1,
) -> Job:
    options = ("--chain", str(chain)) if chain > 1 else ()
    return box.submit_run(name, *calm.overrides, f"sft.steps={updates}", profile=profile, nodes=nodes, options=options)


def trains(job: Job, update: int = 25) -> None:
    """Wait until `updates` updates are done; all but the last ten are saved."""
    job.wait_for(f"update {update}", lambda: len(job.rows("sft_metrics.jsonl")) >= update)
    job.wait_for("a checkpoint", lambda: any((job.run / "sft_checkpoints").glob("step_*[0-9]")))


def is_whole(job: Job, calm: Undisturbed) -> None:
    """Check a completed job: each update once, with the reference metrics, an export, and no process left."""
    assert job.end() == "COMPLETED", str(job)
    rows = job.rows("sft_metrics.jsonl")
    assert [[row[name] for name in EXACT] for row in rows] == [[row[name] for name in EXACT] for row in calm.rows]
    assert [row["step"] for row in rows] == list(range(1, UPDATES + 1))
    assert (job.run / "sft" / "model.safetensors").exists()
    assert job.nothing_is_left()


def failed(job: Job, code: str) -> str:
    assert job.end() == "FAILED", str(job)
    assert job.shown("ExitCode") == code
    assert job.nothing_is_left()
    return job.log()


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


def test_cancelled_job_leaves_no_process(box: Onebox, calm: Undisturbed) -> None:
    job = start(box, calm, "cancelled")
    trains(job)
    assert "cancelled job" in box.arpo("cancel", str(job.run))
    assert job.end() == "CANCELLED"
    assert job.nothing_is_left()
    assert "no waiting or running job" in box.arpo("cancel", str(job.run), ok=False)
    # A supervisor removes it unless it is killed, and these nodes share /tmp: so this is left by a KILL.
    left = Path(f"/tmp/arpo-{job.id}")
    left.mkdir(exist_ok=True)
    is_whole(box.resume(job), calm)
    assert not left.exists(), "the next job removes what is left on its nodes"


def preempts(box: Onebox, job: Job, calm: Undisturbed) -> None:
    """Take the nodes of a job for an urgent one, and check that the job saves before and completes after it."""
    urgent = box.slurm("sbatch", "--parsable", "-p", "urgent", "-N2", "--exclusive", "-o/dev/null", "--wrap=sleep 3")
    job.wait_for("requeue", lambda: job.shown("Restarts") == "1")
    assert "asked to end: " in job.log()
    is_whole(job, calm)
    assert job.state(urgent.strip()) == "COMPLETED"


def test_preempted_job_saves_and_is_requeued(box: Onebox, calm: Undisturbed) -> None:
    job = start(box, calm, "preempted")
    trains(job)
    preempts(box, job, calm)


@pytest.fixture
def plain_box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Onebox]:
    """A Slurm that sends TERM to preempted jobs, as most do.

    Without cgroups, which need root of a whole machine. Like with cgroups, the steps' sruns get no signal.
    """
    slurm = Onebox.start(tmp_path_factory.mktemp("plain"), PROCTRACK="pgid", WARNING="")
    yield slurm
    slurm.stop()


def test_job_preempted_with_term_saves_in_its_grace_time(plain_box: Onebox, calm: Undisturbed) -> None:
    job = start(plain_box, calm, "term")
    trains(job)
    preempts(plain_box, job, calm)
    assert re.search(r"Slurm's TERM, \d+ s before the end: the trainer saves and ends", job.log())


def test_job_is_requeued_even_if_it_cannot_save(box: Onebox, calm: Undisturbed) -> None:
    """With proctrack/linuxproc, TERM reaches all processes, including the steps' sruns."""
    job = start(box, calm, "all-term")
    trains(job)
    box.slurm("scancel", "--signal=TERM", job.id)
    job.wait_for("requeue", lambda: job.shown("Restarts") == "1")
    is_whole(job, calm)


@pytest.mark.parametrize("requeue", [True, False])
def test_job_without_requeue_has_saved(box: Onebox, calm: Undisturbed, requeue: bool) -> None:
    """The profile has requeue=false, or Slurm refuses a requeue."""
    name = "refused" if requeue else "forbidden"
    job = start(box, calm, name, profile=box.profile(name, requeue=requeue))
    if requeue:
        box.slurm("scontrol", "update", f"JobId={job.id}", "Requeue=0")
    assert job.shown("Requeue") == "0"
    trains(job)
    box.slurm("scancel", "--signal=USR1", job.id)
    output = failed(job, "75:0")
    assert "`arpo resume` continues the run" in output and "Traceback" not in output
    assert ("scontrol requeue" in output) is requeue
    is_whole(box.resume(job), calm)


def test_training_continues_exactly_after_the_time_limit(box: Onebox, calm: Undisturbed) -> None:
    """One to two minutes after its start, a job is continued by the next one of its chain, or is requeued.

    Both run at the same time, on one node each. Their training would take longer than the time limit.
    """
    endless, profile = 100_000, box.profile("short", time="00:03:00", signal_s=60)
    chain = start(box, calm, "chain", updates=endless, profile=profile, nodes=1, chain=2)
    alone = start(box, calm, "alone", updates=endless, profile=profile, nodes=1)
    first, second = chain.ids
    chain.wait_for("the end of the first link", lambda: chain.state(first) not in LIVE, dead=True)
    assert chain.state(first) == "COMPLETED", str(chain)
    assert f"saved; job {second} continues the run" in chain.log()
    alone.wait_for("requeue", lambda: alone.shown("Restarts") == "1")
    assert alone.log().count("Slurm's warning: the trainer saves and ends") == 1
    # All rows at the requeue are of the first run.
    done = {job.run.name: len(job.rows("sft_metrics.jsonl")) for job in (chain, alone)}
    for job, last in ((chain, second), (alone, alone.id)):
        more = done[job.run.name] + 10
        job.wait_for("more", lambda job=job, more=more: len(job.rows("sft_metrics.jsonl")) >= more, dead=True)
        assert job.state(last) in LIVE
        box.arpo("cancel", str(job.run))
        assert job.end(last) == "CANCELLED"
        assert job.nothing_is_left()
    rows = {job.run.name: job.rows("sft_metrics.jsonl") for job in (chain, alone)}
    whole = start(box, calm, "endless", updates=endless)
    wanted = max(len(each) for each in rows.values())
    whole.wait_for("as many updates", lambda: len(whole.rows("sft_metrics.jsonl")) >= wanted)
    box.arpo("cancel", str(whole.run))
    assert whole.end() == "CANCELLED"
    undisturbed = whole.rows("sft_metrics.jsonl")
    for each in rows.values():
        assert [row["step"] for row in each] == list(range(1, len(each) + 1))
        assert [[row[name] for name in EXACT] for row in each] == [
            [row[name] for name in EXACT] for row in undisturbed[: len(each)]
        ]


def test_next_job_of_a_chain_continues_after_a_failure(box: Onebox, calm: Undisturbed) -> None:
    job = start(box, calm, "mortal", chain=2)
    job.wait_for("ranks", lambda: len(job.processes("arpo_megatron.cluster.rank")) == 2)
    victim = job.processes("arpo_megatron.cluster.rank")[0]
    trains(job)
    victim.kill()
    assert job.end() == "FAILED", str(job)
    is_whole(Job(box, job.run, job.ids[1:]), calm)


def test_unneeded_jobs_of_a_chain_are_cancelled(box: Onebox, calm: Undisturbed) -> None:
    job = start(box, calm, "unneeded", chain=3)
    is_whole(job, calm)
    assert [job.end(link) for link in job.ids] == ["COMPLETED", "CANCELLED", "CANCELLED"]


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


@pytest.fixture
def contained(box: Onebox) -> Iterator[dict[str, Any]]:
    """Values of a profile with a container."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("no mount namespaces: containers cannot be stood for")
    with pyxis(box.environment) as values:
        yield values


def test_containers_need_no_shared_tmp(box: Onebox, contained: dict[str, Any], tmp_path: Path) -> None:
    (own := tmp_path / "own.py").write_text("from arpo_megatron.algorithms.losses.ppo import Ppo as Own\n")
    profile = box.profile("contained", **contained, environment={"NOTE": "of the profile"})
    overrides = ["sft.steps=0", "train.steps=1", f"algorithm.loss={own}:Own"]
    job = box.submit_run("contained", *overrides, profile=profile)
    job.wait_for("training", lambda: job.in_phase("rollout", 0))
    variables = [rank.environ() for rank in job.processes("arpo_megatron.cluster.rank")]
    assert {(each["NOTE"], each["ONLY_IN_THE_IMAGE"]) for each in variables} == {("of the profile", "yes")}
    assert job.end() == "COMPLETED", str(job)
    image = Path(contained["container"])
    assert not image.with_name("unpacked").read_text().strip(), "an image is left, or a step joined another one"
    removed = image.with_name("removed").read_text().splitlines()
    assert sorted(removed) == [f"n1 arpo-{job.id}", f"n2 arpo-{job.id}"], "an image is unpacked once"
    assert job.nothing_is_left()
    assert not list(Path("/tmp").glob(f"arpo-{job.id}")), "the scratch directory is left"


def test_missing_container_image_ends_the_job_and_its_chain(
    box: Onebox, calm: Undisturbed, contained: dict[str, Any]
) -> None:
    image = Path(contained["container"])
    image.unlink()
    # No job may end before all are in the queue, because it would not cancel later ones.
    box.slurm("scontrol", "update", "NodeName=n[1-2]", "State=DRAIN", "Reason=later")
    job = start(box, calm, "container", profile=box.profile("container", **contained), chain=3)
    box.slurm("scontrol", "update", "NodeName=n[1-2]", "State=RESUME")
    output = failed(job, "2:0")
    assert job.shown("RunTime").startswith("00:00:"), "it took a minute"
    assert "arpo: doctor: a node cannot start the container" in output
    assert f"pyxis: No such file or directory: {image}" in output
    assert [job.state(link) for link in job.ids] == ["FAILED", "CANCELLED", "CANCELLED"]
    is_whole(box.resume(job, "--cluster", box.profile("bare")), calm)


@pytest.fixture
def taken() -> Iterator[tuple[int, list[socket.socket]]]:
    """A range of 64 ports that are all in use on both nodes, with their sockets."""
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


def test_used_ports_are_avoided_and_too_few_ports_are_reported(
    box: Onebox, calm: Undisturbed, taken: tuple[int, list[socket.socket]]
) -> None:
    first, sockets = taken
    sockets[126].close()
    sockets[127].close()  # the supervisor finds a port for the all-reduce, the services none
    profile = box.profile("ports", ports=[first, first + 63])
    output = failed(start(box, calm, "no-ports", profile=profile), "2:0")
    assert "arpo: doctor: ports on n" in output
    for listener in sockets[:80]:
        listener.close()
    is_whole(start(box, calm, "ports", profile=profile), calm)


def test_concurrent_jobs_do_not_disturb_each_other(box: Onebox, calm: Undisturbed) -> None:
    jobs = [start(box, calm, f"side-{index}", nodes=1) for index in range(2)]
    for job in jobs:
        job.wait_for("running", lambda job=job: job.state() == "RUNNING")
    for job in jobs:
        trains(job, 1)
    for job in jobs:
        is_whole(job, calm)


def test_run_in_the_queue_is_not_submitted_again(box: Onebox, calm: Undisturbed) -> None:
    job = start(box, calm, "twice", updates=100_000)  # longer than until the second command
    try:
        before = (job.run / "config.yaml").read_bytes()
        output = box.arpo("resume", str(job.run), "engine.restarts=7", ok=False)
        assert f"job {job.id} of twice is in the queue" in output
        trains(job)
        assert (job.run / "config.yaml").read_bytes() == before
    finally:
        box.arpo("cancel", str(job.run))
    assert job.end() == "CANCELLED"
    assert job.nothing_is_left()


def test_remote_login_node_is_reached_over_ssh(box: Onebox, calm: Undisturbed, tmp_path: Path) -> None:
    if why := install(sshd.SSHD, sshd.PACKAGE):
        pytest.skip(f"no sshd: {why}")
    secret, run = secrets.token_hex(16), box.runs / "over-ssh"
    config = tmp_path / "steps.yaml"
    config.write_text(f"sft:\n  steps: {UPDATES}\n")
    here = {"SLURM_CONF": "/nowhere", "TEST_SECRET": secret}  # this machine has no Slurm
    with sshd.sshd(SLURM_CONF=str(box.folder / "slurm.conf")) as server:
        where = {"ssh": f"{getpass.getuser()}@127.0.0.1:{server.port}", "identity": str(server.key)}
        profile = box.profile("elsewhere", **where, python=sys.executable, secrets={"TEST_SECRET": "env"})
        arguments = [
            "--cluster",
            profile,
            "--nodes",
            "2",
            "--config",
            str(config),
            f"run_dir={run}",
            *TINY,
            *calm.overrides,
        ]
        assert "#SBATCH --nodes=2" in box.arpo("submit", "quickstart", "--dry-run", *arguments, **here)
        output = box.arpo("submit", "quickstart", *arguments, **here)
        assert f"arpo status over-ssh --cluster {profile}" in output
        found = re.search(r": job (\d+), run directory", output)
        assert found, output
        job = Job(box, run, [found[1]])
        trains(job, 1)
        assert f"over-ssh: job {job.id} RUNNING" in box.arpo("status", "over-ssh", "--cluster", profile, **here)
        is_whole(job, calm)
        logs = box.arpo("logs", "over-ssh", "--cluster", profile, "--follow", "--lines", "1000", **here)
        assert f"job {job.id} on n1, n2" in logs and "exported to" in logs
        assert "no waiting or running job" in box.arpo("cancel", "over-ssh", "--cluster", profile, ok=False, **here)
        (submission,) = submissions_of(RunDirectory(run))
        code = Path.home() / ".arpo" / "code" / submission["tree"]
        for path in (server.log, *run.rglob("*"), *code.rglob("*")):
            assert not path.is_file() or secret.encode() not in path.read_bytes(), f"a secret is in {path}"
        shutil.rmtree(code)
    assert "cannot be reached over SSH" in box.arpo("status", "--cluster", profile, ok=False, **here)
