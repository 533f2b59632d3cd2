"""Services that die or hang are restarted at their address a limited number of times; `arpo health` shows it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from arpo_megatron.errors import UserError
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.health import print_health, read_health
from arpo_megatron.launch.supervisor import FIRST_PAUSE_S, Supervisor
from arpo_megatron.utils.ports import free_ports
from arpo_megatron.utils.processes import ProcessDiedError
from arpo_megatron.utils.service_spec import ServiceSpec
from arpo_megatron.utils.signals import Interrupted
from tests.faults import without_end

SERVER = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(str(os.getpid()).encode())
    def log_message(self, *_):
        pass
print("serving", flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


@pytest.fixture
def supervisor(run: RunDirectory) -> Iterator[Supervisor]:
    with Supervisor(run.logs) as supervisor:
        yield supervisor


def program(
    run: RunDirectory,
    name: str = "toy",
    code: str = SERVER,
    *,
    startup_timeout_s: float = 120.0,
    hang_timeout_s: float = 120.0,
    grace_s: float = 0.0,
    held_by: Path | None = None,
) -> ServiceSpec:
    (port,) = free_ports(1)
    return ServiceSpec(
        name=name,
        url=f"http://127.0.0.1:{port}",
        command=[sys.executable, "-c", code, str(port)],
        log=run.logs / f"{name}.log",
        environment=dict(os.environ),
        startup_timeout_s=startup_timeout_s,
        hang_timeout_s=hang_timeout_s,
        grace_s=grace_s,
        held_by=held_by,
    )


def answer(url: str) -> int | None:
    """Return the id of the process that serves there; None without one."""
    try:
        return int(requests.get(url, timeout=5).text)
    except requests.RequestException:
        return None


def wait_until(condition: Callable[[], Any], within_s: float = 120.0) -> Any:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError("it did not happen in time")


def events(run: RunDirectory) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.events.read_text().splitlines()]


@pytest.mark.parametrize(
    ("fault", "why"), [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "did not answer for 3 s")]
)
def test_dead_or_hung_service_is_restarted_at_its_address(
    run: RunDirectory, supervisor: Supervisor, fault: signal.Signals, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hang_timeout_s = 3.0 if fault is signal.SIGSTOP else 120.0
    toy, other = program(run, hang_timeout_s=hang_timeout_s), program(run, "other")
    with supervisor.serving(run, restarts=3):
        supervisor.serve(toy, other)
        first, bystander = answer(toy.url), answer(other.url)
        assert first
        os.kill(first, fault)
        second = wait_until(lambda: (pid := answer(toy.url)) and pid != first and pid)
        assert not psutil.pid_exists(first)
        assert answer(other.url) == bystander
        wait_until(lambda: len(events(run)) == 2)
        notes = [event["text"] for event in events(run)]
        assert notes == [f"toy {why}; restart 1 of 3 in {FIRST_PAUSE_S:g} s", "toy is up again"]
        assert [(event["service"], event["state"]) for event in events(run)] == [("toy", "down"), ("toy", "up")]
        supervisor.check()
        health = {role.name: role for role in read_health(run)}
        assert (health["toy"].pid, health["toy"].up, health["toy"].restarts) == (second, True, 1)
        assert health["toy"].last_error == why
        assert (health["other"].restarts, health["other"].last_error) == (0, "")
        print_health(run)
        assert why in capsys.readouterr().out
    assert answer(toy.url) is None
    assert not psutil.pid_exists(second)
    with pytest.raises(UserError, match="the job has ended"):
        read_health(run)


def test_service_is_restarted_while_the_kernel_does_not_end_the_old_process(
    run: RunDirectory, supervisor: Supervisor
) -> None:
    toy = program(run, hang_timeout_s=3.0)
    with supervisor.serving(run, restarts=3):
        supervisor.serve(toy)
        first = answer(toy.url)
        assert first
        with without_end(first):
            os.kill(first, signal.SIGKILL)
            wait_until(lambda: (pid := answer(toy.url)) and pid != first)
        assert f"did not answer for 3 s; SIGKILL has not ended process {first}" in events(run)[0]["text"]


def test_service_in_its_first_start_is_not_down(
    run: RunDirectory, supervisor: Supervisor, capsys: pytest.CaptureFixture[str]
) -> None:
    may_serve = run.path / "may_serve"
    waiting = f"import pathlib, time\nwhile not pathlib.Path({str(may_serve)!r}).exists():\n    time.sleep(0.05)\n"
    toy = program(run, code=waiting + SERVER)

    def look() -> None:
        if not may_serve.exists():
            print_health(run)
            may_serve.touch()

    with supervisor.serving(run, restarts=1):
        supervisor.checks.append(look)  # called while `start` waits
        supervisor.serve(toy)
        output = capsys.readouterr().out
        assert " starting " in output and " down " not in output
        may_serve.unlink()
        os.kill(answer(toy.url) or 0, signal.SIGKILL)
        wait_until(lambda: not read_health(run)[0].up)
        print_health(run)
        assert " down " in capsys.readouterr().out


def test_job_ends_with_the_reason_after_the_last_restart(run: RunDirectory, supervisor: Supervisor) -> None:
    toy = program(run)
    trainer = supervisor.start("trainer", [sys.executable, "-c", "import time; time.sleep(600)"])
    with supervisor.serving(run, restarts=1):
        supervisor.serve(toy)
        names = {role.name: role.pid for role in read_health(run)}
        assert names["trainer"] == trainer.process.pid
        killed: set[int] = set()

        def kill_again() -> None:
            pid = answer(toy.url)
            if pid is not None and pid not in killed:
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)

        with pytest.raises(ProcessDiedError) as caught:
            supervisor.wait(trainer, poll=kill_again)
    assert len(killed) == 2
    first_line, *log = str(caught.value).splitlines()
    assert first_line == (
        "toy was killed by SIGKILL, after 1 restarts of services within an hour (engine.restarts); "
        f"log: {run.logs / 'toy.log'}"
    )
    assert log == ["  | serving", "  | serving"]


def test_old_restarts_do_not_count(run: RunDirectory, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arpo_megatron.launch.supervisor.RESTARTS_WITHIN_S", 0.0)
    toy = program(run)

    def is_back(old: int) -> bool:
        supervisor.check()
        return answer(toy.url) not in (None, old)

    with supervisor.serving(run, restarts=1):
        supervisor.serve(toy)
        for _ in range(2):
            last = answer(toy.url)
            assert last
            os.kill(last, signal.SIGKILL)
            wait_until(partial(is_back, last))
    downs = [event["text"] for event in events(run) if event["state"] == "down"]
    assert [text.partition("; ")[2][:14] for text in downs] == ["restart 1 of 1"] * 2


def test_pauses_between_restarts_double(run: RunDirectory, supervisor: Supervisor) -> None:
    # It ends after its second answer: ready, then alive once.
    fragile = SERVER.replace("Threading", "").replace("http.server.HTTPServer(", "s = http.server.HTTPServer(")
    fragile = fragile.replace(".serve_forever()", "; s.handle_request(); s.handle_request()")
    with supervisor.serving(run, restarts=2):
        supervisor.serve(program(run, code=fragile, hang_timeout_s=4.0))
        with pytest.raises(ProcessDiedError, match="ended with exit code 0, after 2 restarts"):
            wait_until(supervisor.check)
    pauses = [event["text"].rpartition(" in ")[2] for event in events(run) if "restart" in event["text"]]
    assert pauses == [f"{FIRST_PAUSE_S:g} s", f"{2 * FIRST_PAUSE_S:g} s"]


@pytest.mark.parametrize(
    ("code", "ready_s", "why"),
    [
        ("import sys; print('no such file'); sys.exit(2)", 120.0, "ended with exit code 2; log: .*\n  | no such file"),
        ("import time; time.sleep(600)", 1.5, "was not ready after 1.5 s"),
    ],
)
def test_service_that_never_came_up_is_not_restarted(
    run: RunDirectory, supervisor: Supervisor, code: str, ready_s: float, why: str
) -> None:
    with (
        pytest.raises(ProcessDiedError, match=f"broken {why}"),
        supervisor.serving(run, restarts=9),
    ):
        supervisor.serve(program(run), program(run, "broken", code, startup_timeout_s=ready_s))
    assert not run.events.exists()
    assert not run.health.exists()


@pytest.mark.parametrize(("grace_s", "output"), [(120.0, "serving\nbye\n"), (0.0, "serving\n")])
def test_service_with_grace_ends_in_order(
    run: RunDirectory, supervisor: Supervisor, grace_s: float, output: str
) -> None:
    polite = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: (print('bye', flush=True), os._exit(0)))\n"
    toy = program(run, code=SERVER.replace("class", f"{polite}class", 1), grace_s=grace_s)
    with supervisor.serving(run, restarts=3):
        supervisor.serve(toy)
    assert toy.log.read_text() == output


LAUNCHER = """
import sys, time
from pathlib import Path
sys.path[:0] = [{tests!r}]
from tests.launch.test_supervisor import SERVER, program
from arpo_megatron.launch.supervisor import Supervisor
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.utils.signals import interrupt_on_signals
interrupt_on_signals()
run = RunDirectory(Path({path!r}))
with Supervisor(run.logs) as supervisor, supervisor.serving(run, restarts=3):
    toy = program(run, code={code!r} or SERVER)
    supervisor.serve(toy)
    print(toy.url, flush=True)
    time.sleep(600)
"""


def launcher(run: RunDirectory, code: str = "") -> list[str]:
    """Return the command of a job with one service, which runs `code` instead of a server if it is given."""
    tests = str(Path(__file__).resolve().parents[2])
    return [sys.executable, "-c", LAUNCHER.format(tests=tests, path=str(run.path), code=code)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_services_end_with_a_job_that_is_interrupted_while_they_start(
    run: RunDirectory, number: signal.Signals
) -> None:
    log = run.logs / "toy.log"
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"  # never answers
    with subprocess.Popen(launcher(run, code), start_new_session=True, stderr=subprocess.DEVNULL) as job:
        wait_until(lambda: log.exists() and log.read_text().endswith("\n"))
        os.killpg(job.pid, number)
        job.wait(timeout=60)
    assert not psutil.pid_exists(int(log.read_text()))
    assert not run.health.exists()


def test_signal_before_the_thread_of_a_service_starts_is_no_error(
    run: RunDirectory, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_arguments: object) -> None:  # stands in for a signal within a few milliseconds
        raise Interrupted

    with pytest.raises(Interrupted), supervisor.serving(run, restarts=3):
        monkeypatch.setattr("arpo_megatron.launch.supervisor.write_health", interrupted)
        supervisor.serve(program(run))


def test_services_die_with_a_killed_job(run: RunDirectory) -> None:
    with subprocess.Popen(launcher(run), stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        url = job.stdout.readline().strip()
        pid = answer(url)
        assert pid
        assert read_health(run)[0].pid == pid
        job.kill()
    wait_until(lambda: not psutil.pid_exists(pid))
    with pytest.raises(UserError, match="the job has ended"):
        read_health(run)


def test_service_with_lent_memory_stays_down_until_it_is_returned(run: RunDirectory, supervisor: Supervisor) -> None:
    toy = program(run, held_by=run.memory_lent)
    with supervisor.serving(run, restarts=3):
        supervisor.serve(toy)
        first = answer(toy.url)
        assert first
        run.memory_lent.touch()
        os.kill(first, signal.SIGKILL)
        wait_until(run.events.exists)
        time.sleep(FIRST_PAUSE_S + 1.0)  # it would be back by now
        assert answer(toy.url) is None
        run.memory_lent.unlink()
        assert wait_until(lambda: answer(toy.url)) != first


def test_log_that_grows_too_large_is_rotated(
    run: RunDirectory, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arpo_megatron.launch.supervisor.MAX_LOG_BYTES", 100)
    monkeypatch.setattr("arpo_megatron.launch.supervisor._SIZE_INTERVAL_S", 0.0)
    go = run.path / "go"
    script = f"""
import os, time
print("x" * 200, flush=True)
while not os.path.exists({str(go)!r}): time.sleep(0.01)
print("later")
"""
    process = supervisor.start("talks", [sys.executable, "-c", script])

    def poll() -> None:
        if (log := process.log.with_name("talks.log.1")).exists() and log.stat().st_size:
            go.touch()

    supervisor.wait(process, poll=poll)
    assert process.log.with_name("talks.log.1").read_text() == "x" * 200 + "\n"
    assert process.log.read_text() == "later\n"
