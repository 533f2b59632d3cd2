"""The supervisor with 64 nodes on this machine: how long a start takes, and a storm of failures.

Real are Slurm, its 64 node daemons, the supervisor and its probes. The services are small HTTP servers: 64 engines
would need 200 GB of memory.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from arpo_megatron.cluster.backend import SlurmBackend, drop_slurm_variables
from arpo_megatron.cluster.slurm import allocated_nodes
from arpo_megatron.config import JobConfig
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.supervisor import Supervisor
from arpo_megatron.plan.node_layout import lay_out_nodes
from arpo_megatron.utils.service_spec import ServiceSpec
from tests.cluster.onebox import ROOT, Onebox
from tests.cluster.stand_in import profile

NODES = 64
SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""


def config() -> JobConfig:
    return resolve.resolve(
        "quickstart", overrides=["platform=cpu", f"parallel.data={NODES}", f"engine.replicas={NODES}"]
    )


def job(folder: Path) -> dict[str, float]:
    """Run inside the allocation: start a service per node, one step of a task per node, then kill every service."""
    run = RunDirectory(folder)
    nodes = allocated_nodes(os.environ["SLURM_JOB_NODELIST"])
    number = os.environ["SLURM_JOB_ID"]
    drop_slurm_variables()
    backend = SlurmBackend(profile(runs=str(folder)), lay_out_nodes(config(), 0, len(nodes)), nodes, run, number)
    seconds, began = {}, time.monotonic()

    def lap(name: str) -> None:
        nonlocal began
        seconds[name], began = round(time.monotonic() - began, 1), time.monotonic()

    program = folder / "server.py"
    program.write_text(SERVER)
    with backend.prepared(), Supervisor(run.logs) as supervisor, supervisor.serving(run, restarts=4 * NODES):
        lap("scratch directories")
        ranks = backend.step("ranks", nodes, 1, [sys.executable, "-S", "-c", ""])
        supervisor.wait(supervisor.start("ranks", ranks))
        lap("one step of a task per node")
        specs = [service(backend, run, program, index) for index in range(len(nodes))]
        supervisor.serve(*specs)
        lap("services up")
        found = servers(program)
        assert len(found) == len(nodes), len(found)
        for process in found:
            process.send_signal(signal.SIGKILL)
        while len(list(servers(program))) < len(nodes) or not all_up(run, len(nodes)):
            supervisor.check()
            time.sleep(0.5)
        lap("all services up after all were killed")
    lap("end")
    return seconds


def service(backend: SlurmBackend, run: RunDirectory, program: Path, index: int) -> ServiceSpec:
    name = f"engine-{index}"
    host, port = backend.host(name), 30000 + index
    return backend.wrap_service(
        name,
        ServiceSpec(
            name=name,
            url=f"http://{host}:{port}",
            command=[sys.executable, "-S", str(program), host, str(port)],
            log=run.logs / f"{name}.log",
            environment=dict(os.environ),
            startup_timeout_s=300.0,
            hang_timeout_s=120.0,
        ),
    )


def servers(program: Path) -> list[psutil.Process]:
    def ours(process: psutil.Process) -> bool:
        try:
            words = process.cmdline()
        except psutil.Error:
            return False
        return len(words) == 5 and words[2] == str(program) and "python" in words[0]

    return [process for process in psutil.process_iter() if ours(process)]


def all_up(run: RunDirectory, count: int) -> bool:
    rows = json.loads(run.health.read_text())["processes"]
    return sum(row["up"] and row["restarts"] >= 1 for row in rows) == count


@pytest.fixture
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Onebox]:
    box = Onebox.start(tmp_path_factory.mktemp("runs"), NODES=str(NODES), CPUS="2")
    yield box
    box.stop()


@pytest.mark.slurm_campaign
@pytest.mark.timeout(1800)
def test_supervisor_starts_and_restarts_services_on_64_nodes(box: Onebox) -> None:
    folder = box.runs / "scale"
    (folder / "logs").mkdir(parents=True)
    command = [
        "salloc",
        "-Q",
        f"-N{NODES}",
        "--exclusive",
        sys.executable,
        "-m",
        "tests.cluster.test_scale",
        str(folder),
    ]
    output = box.slurm("env", f"PYTHONPATH={ROOT}", *command)
    seconds = json.loads(output.splitlines()[-1])
    print(seconds)
    assert not servers(folder / "server.py")
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert sum(event["kind"] == "restart" and "restart " in event["text"] for event in events) >= NODES


if __name__ == "__main__":
    print(json.dumps(job(Path(sys.argv[1]))), flush=True)
