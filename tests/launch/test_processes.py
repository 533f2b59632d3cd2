"""The processes of a job end together, whichever ends first, and leave nothing behind."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import tracemalloc
from functools import partial
from pathlib import Path

import psutil
import pytest

from arpo_megatron.launch.backend import LocalBackend
from arpo_megatron.launch.supervisor import Supervisor
from arpo_megatron.utils.processes import ProcessDiedError, bind_to_parent, first_failure, last_lines
from tests.faults import without_end

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
    "print('up', flush=True); time.sleep(600)",
]


def gone(pid: int, within_s: float = 60.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def test_wait_returns_when_the_process_ends_well(tmp_path: Path) -> None:
    polls = []
    with Supervisor(tmp_path) as supervisor:
        supervisor.wait(
            supervisor.start("quick", [sys.executable, "-c", "print('hello')"]), poll=lambda: polls.append(1)
        )
    assert (tmp_path / "quick.log").read_text() == "hello\n"
    assert polls


def test_first_failure_names_the_log_and_ends_all_processes(tmp_path: Path) -> None:
    with pytest.raises(ProcessDiedError) as caught, Supervisor(tmp_path) as supervisor:
        sleeper = supervisor.start("trainer", SLEEP)
        supervisor.start("engine", [sys.executable, "-c", "import sys; print('out of memory'); sys.exit(3)"])
        supervisor.wait(sleeper)
    assert "engine ended with exit code 3" in str(caught.value)
    assert str(tmp_path / "engine.log") in str(caught.value)
    assert "out of memory" in str(caught.value)
    assert gone(sleeper.process.pid)


def test_wait_ends_when_another_process_is_killed(tmp_path: Path) -> None:
    with (
        pytest.raises(ProcessDiedError, match="sandbox was killed by SIGKILL"),
        Supervisor(tmp_path) as supervisor,
    ):
        trainer, sandbox = supervisor.start("trainer", SLEEP), supervisor.start("sandbox", SLEEP)
        os.kill(sandbox.process.pid, signal.SIGKILL)
        supervisor.wait(trainer)


def test_stop_kills_groups_that_ignore_sigterm(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as supervisor:
        role = supervisor.start("stubborn", STUBBORN)
        while role.log.read_text() != "up\n":
            time.sleep(0.02)
        family = [role.process.pid, *(child.pid for child in psutil.Process(role.process.pid).children())]
        assert len(family) == 2
        started = time.monotonic()
    assert time.monotonic() - started < 60
    assert all(gone(pid) for pid in family)


def test_process_that_the_kernel_does_not_end_holds_up_no_end_of_a_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Supervisor(tmp_path) as supervisor:
        process = supervisor.start("trainer", SLEEP).process
        with without_end(process.pid):
            supervisor.stop()  # would wait for as long as the device hangs
            assert process.poll() is None
    expected = f"arpo: SIGKILL has not ended process {process.pid}: it waits for a device or a filesystem"
    assert expected in capsys.readouterr().err
    assert process.wait(60) == -signal.SIGKILL


def test_cause_of_a_failure_is_read_from_the_end_of_a_large_log(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    with log.open("wb") as file:
        file.truncate(306 * 2**20)
        file.seek(0, os.SEEK_END)
        file.write(b"\n---- rank 3 failed:\nno memory left\n---- end of that rank's report\n")
    tracemalloc.start()
    try:
        assert first_failure(log) == "  | ---- rank 3 failed:\n  | no memory left"
        assert last_lines(log, count=1) == "  | ---- end of that rank's report"
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()


def test_processes_die_with_a_killed_launcher(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from arpo_megatron.launch.supervisor import Supervisor\n"
        f"supervisor = Supervisor(Path({str(tmp_path)!r})); supervisor.__enter__()\n"
        "child = supervisor.start('child', [sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.process.pid, flush=True)\n"
        "time.sleep(600)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    child = int(launcher.stdout.readline())
    assert psutil.pid_exists(child)
    launcher.kill()
    launcher.wait()
    assert gone(child)


def test_process_whose_parent_has_ended_does_not_start() -> None:
    def started_by(parent: int) -> "subprocess.CompletedProcess[str]":
        began = [sys.executable, "-c", "print('began')"]
        return subprocess.run(began, preexec_fn=partial(bind_to_parent, parent), stdout=subprocess.PIPE, text=True)

    with subprocess.Popen(["true"]) as parent:
        pass
    assert (started_by(parent.pid).returncode, started_by(parent.pid).stdout) == (1, "")
    assert (started_by(os.getpid()).returncode, started_by(os.getpid()).stdout) == (0, "began\n")


HOLDER = """
import sys
from arpo_megatron.launch.backend import LocalBackend
with LocalBackend().scratch() as folder:
    (folder / "socket").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_scratch_of_a_killed_job_is_removed_by_the_next_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command, env = [sys.executable, "-c", HOLDER], {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        theirs = Path(job.stdout.readline().strip())
        with LocalBackend().scratch() as ours:
            assert (theirs / "socket").exists()  # its job lives
        assert not ours.exists()
        job.kill()
        job.wait()
        assert theirs.exists()
        with LocalBackend().scratch() as ours:
            assert list(tmp_path.iterdir()) == [ours]
    assert not list(tmp_path.iterdir())


def test_killed_task_is_named_before_its_peers(tmp_path: Path) -> None:
    report = "---- rank 0 failed:\nRuntimeError: Connection closed by peer\n"
    log = tmp_path / "log"
    log.write_text(f"srun: error: n2: task 1: Killed\n{report}srun: error: n1: task 0: Exited with exit code 1\n")
    assert first_failure(log).splitlines()[:2] == ["  | srun: error: n2: task 1: Killed", "  | ---- rank 0 failed:"]
    log.write_text(f"srun: error: n1: task 0: Exited with exit code 1\n{report}")
    assert first_failure(log).startswith("  | ---- rank 0 failed:")
