"""From another machine, here a network namespace with a cable to the job's, no port of a job accepts a connection."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.jobs import SHORT, Start, journal_of, quickstart, wait_for

pytestmark = [pytest.mark.timeout(1600), pytest.mark.slow_campaign]

OURS, THEIRS = "198.51.100.1", "198.51.100.2"
NEW_NETWORK = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--net"]
LISTENING = """
import psutil
print(*{each.laddr.port for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN})
"""
CONNECT = """
import socket, sys
for port in sys.argv[2:]:
    try:
        socket.create_connection((sys.argv[1], int(port)), 5).close()
        print(port, "accepts")
    except ConnectionRefusedError:
        print(port, "refuses")
"""


def inside(pid: int, *command: str) -> list[str]:
    """Return a command that runs in the network of a process."""
    user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
    return ["nsenter", "--target", str(pid), "--net", *user, *command]


def listening(machine: int) -> set[int]:
    """Return all TCP ports that are open in the network of a process."""
    words = inside(machine, sys.executable, "-c", LISTENING)
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    return {int(port) for port in done.stdout.split()}


def connect(machine: int, *ports: int) -> dict[int, str]:
    """Try ports of the job's machine from another one; return what each did."""
    words = inside(machine, sys.executable, "-c", CONNECT, OURS, *map(str, ports))
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    return {int(port): answer for port, answer in (line.split() for line in done.stdout.splitlines())}


def lay_cable(job: int, other: int) -> None:
    """Connect the networks of two processes."""
    for pid, words in (
        (job, f"link add cable type veth peer name cable netns {other}"),
        (job, f"addr add {OURS}/30 dev cable"),
        (job, "link set cable up"),
        (other, f"addr add {THEIRS}/30 dev cable"),
        (other, "link set cable up"),
    ):
        subprocess.run(inside(pid, "ip", *words.split()), check=True, timeout=60)


def test_no_port_of_a_job_accepts_a_connection_from_another_machine(start: Start, warm_run: Path) -> None:
    engines = ("engine.replicas=2", "engine.router=sglang")
    command = quickstart("train", warm_run, "train.steps=9", "rollout.journal_every_s=0.1", *engines, *SHORT)
    job = start([*NEW_NETWORK, "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command])
    wait_for("answers of step 2", lambda: (snapshot := journal_of(warm_run, 1)) and snapshot.entries > 3, job)
    other = subprocess.Popen(inside(job.pid, "unshare", "--net", "sleep", "600"))
    control = subprocess.Popen(
        inside(job.pid, sys.executable, "-m", "http.server", "--bind", "0.0.0.0", "18080"), stderr=subprocess.DEVNULL
    )
    try:
        wait_for("a network of its own", lambda: network(other.pid) != network(job.pid), job)
        lay_cable(job.pid, other.pid)
        wait_for("an open port", lambda: connect(other.pid, 18080) == {18080: "accepts"}, job)
        ports = listening(job.pid) - {18080}
        assert len(ports) >= 10, "also those of the second engine and the router"
        assert connect(other.pid, *ports) == dict.fromkeys(ports, "refuses")
    finally:
        for process in (other, control):
            process.kill()
            process.wait()


def network(pid: int) -> str:
    """Return the network namespace of a process."""
    return str(Path(f"/proc/{pid}/ns/net").readlink())
