"""The shell scripts of Slurm steps: the scratch directory on a node, and signals."""

import os
import signal
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from arpo_megatron.cluster.backend import MAKE_SCRATCH, SERVICE, TASK, SlurmBackend
from arpo_megatron.cluster.slurm import Node
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.plan.node_layout import lay_out_nodes
from tests.cluster.stand_in import profile
from tests.cluster.test_supervise import NOBODYS


def test_scratch_directory_is_made_and_others_are_listed() -> None:
    folder = Path(f"/tmp/arpo-{NOBODYS}")
    try:
        output = subprocess.run(
            ["bash", "-c", MAKE_SCRATCH, "arpo", folder], capture_output=True, text=True, check=True
        )
        assert str(folder) in output.stdout.split() and folder.stat().st_mode & 0o777 == 0o700
    finally:
        folder.rmdir()


def test_scratch_directory_is_made_while_others_in_tmp_go(tmp_path: Path) -> None:
    ended = threading.Event()

    def make_and_remove() -> None:
        while not ended.is_set():
            for made in [tempfile.mkdtemp(dir="/tmp") for _ in range(200)]:
                Path(made).rmdir()

    command = ["bash", "-c", MAKE_SCRATCH, "arpo", tmp_path / "arpo-7"]
    with ThreadPoolExecutor() as pool:
        pool.submit(make_and_remove)
        try:
            done = [subprocess.run(command, capture_output=True, text=True) for _ in range(20)]
        finally:
            ended.set()
    assert {(each.returncode, each.stderr) for each in done} == {(0, "")}


@pytest.mark.parametrize("whose", ["ours", "a link", "somebody else's"])
def test_scratch_directory_of_another_user_is_refused(whose: str, tmp_path: Path) -> None:
    folder = tmp_path / "arpo-7"
    if whose == "a link":
        (tmp_path / "elsewhere").mkdir(0o755)
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir(0o755)
    if whose == "somebody else's":
        if os.geteuid():
            pytest.skip("only root can make a directory somebody else's")
        os.chown(folder, 65534, 65534)
    done = subprocess.run(["bash", "-c", MAKE_SCRATCH, "arpo", folder], capture_output=True, text=True)
    assert done.returncode == (whose != "ours")
    assert folder.stat().st_mode & 0o777 == (0o700 if whose == "ours" else 0o755)
    assert done.stderr == ("" if whose == "ours" else f"{folder} is there already, and it is not ours\n")


@pytest.mark.parametrize(("task", "ends_on_term"), [(TASK, 7), (SERVICE, 143)])
def test_steps_ignore_slurms_signals(task: str, ends_on_term: int) -> None:
    """The child of slurmstepd gets the signals. A service ends on TERM, and its exit code is the step's."""
    inside = 'echo up; read -r; [ -n "$REPLY" ] || kill -TERM $$; exit 7'
    for word, code in (("x\n", 7), ("\n", ends_on_term)):
        command = ["bash", "-c", task, "arpo", "bash", "-c", inside]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as step:
            assert step.stdin is not None and step.stdout is not None
            assert step.stdout.readline() == "up\n"
            for number in (signal.SIGUSR1, signal.SIGTERM):
                step.send_signal(number)
            step.stdin.write(word)
            step.stdin.close()
            assert step.wait(30) == code


def test_tool_services_are_on_one_node_after_the_other(tmp_path: Path) -> None:
    overrides = ["platform=cpu", "parallel.data=3", "sandbox.replicas=4"]
    layout = lay_out_nodes(resolve.resolve("quickstart", overrides=overrides), 8, 3)
    nodes = [Node(f"n{index}", f"127.0.0.1{index}") for index in range(3)]
    backend = SlurmBackend(profile(), layout, nodes, RunDirectory(tmp_path), "7")
    hosts = [backend.host(f"sandbox-{index}") for index in range(4)]
    assert hosts == ["127.0.0.10", "127.0.0.11", "127.0.0.12", "127.0.0.10"]
    assert backend.host("rollout") == backend.host("router") == "127.0.0.10"
    assert layout.describe()[0] == "sandbox   nodes 0 to 2, CPU"
