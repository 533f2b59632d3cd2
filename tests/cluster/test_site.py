"""A job with the surroundings of a cluster: containers, used ports, other jobs, and a login node reached by SSH."""

import getpass
import re
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from arpo_megatron.cluster.submissions import submissions_of
from arpo_megatron.jobs.run_directory import RunDirectory
from tests.cluster import sshd
from tests.cluster.onebox import TINY, Job, Onebox
from tests.cluster.pyxis import pyxis
from tests.cluster.training import UPDATES, Undisturbed, failed, is_whole, start, trains
from tests.packages import install

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slurm_campaign]


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
