"""A real Slurm with two nodes on this machine, and its jobs."""

import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "slurm" / "onebox" / "onebox.sh"
ARPO = [sys.executable, "-m", "arpo_megatron"]
TINY = [
    "platform=cpu",
    "parallel.data=2",
    "train.tasks_per_step=4",
    "evaluation.before=false",
    "evaluation.after=false",
]
"""Overrides with which a step of the quickstart takes seconds, on two ranks."""
LIVE = {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SIGNALING"}
MOMENT_S = 600.0
LOOK_S = 0.5
"""Interval of checks. Each calls Slurm and lists all processes, and the job needs the cores."""
END_S = 30.0


@dataclass(frozen=True)
class Job:
    """A submitted run."""

    box: "Onebox"
    run: Path
    ids: list[str]

    @property
    def id(self) -> str:
        return self.ids[0]

    def shown(self, name: str, job: str = "") -> str:
        """Return a field of `scontrol show job`."""
        found = re.search(rf"(?:^|\s){name}=(\S*)", self.box.slurm("scontrol", "-o", "show", "job", job or self.id))
        return found[1] if found else ""

    def state(self, job: str = "") -> str:
        return self.shown("JobState", job)

    def log(self) -> str:
        """Return the supervisor's output of all restarts."""
        logs = sorted((self.run / "logs").glob("log-*.out"), key=lambda path: path.stat().st_mtime)
        return "".join(path.read_text() for path in logs)

    def rows(self, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
        path = self.run / name
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def in_phase(self, name: str, step: int) -> bool:
        return any(row.get("name") == name and row.get("step") == step for row in self.rows("events.jsonl"))

    def wait_for(self, what: str, condition: Callable[[], object], *, dead: bool = False) -> None:
        """Wait for a condition. With `dead`, the job may end in the meantime."""
        deadline = time.monotonic() + MOMENT_S
        while time.monotonic() < deadline:
            if condition():
                return
            state = self.state()
            assert dead or state in LIVE, f"{state} before {what}: {self}"
            time.sleep(LOOK_S)
        raise AssertionError(f"no {what} within {MOMENT_S:g} s: {self}")

    def end(self, job: str = "") -> str:
        """Wait for the end of the job and return its state."""
        self.wait_for("end", lambda: self.state(job) not in LIVE, dead=True)
        return self.state(job)

    def nothing_is_left(self) -> bool:
        deadline = time.monotonic() + END_S
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        return not left

    def processes(self, module: str = "") -> list[psutil.Process]:
        """Return the processes with the run directory in arguments or environment (and, if given, of `module`)."""
        found = []
        for process in psutil.process_iter():
            try:
                arguments, variables = process.cmdline(), process.environ().values()
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
            ours = any(str(self.run) in word for word in (*arguments, *variables))
            wanted = not module or (module in arguments[1:5] and "python" in Path(arguments[0]).name)
            if ours and wanted and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found

    def __str__(self) -> str:
        return f"{self.run}\n{self.log()[-3000:]}"


@dataclass
class Onebox:
    """A Slurm, from `start` to `stop`."""

    folder: Path
    runs: Path
    environment: dict[str, str] = field(default_factory=dict)

    @classmethod
    def start(cls, runs: Path, **variables: str) -> "Onebox":
        """Start Slurm; `variables` are environment variables of onebox.sh."""
        folder = Path(tempfile.mkdtemp(prefix="onebox-", dir="/tmp"))
        box = cls(folder, runs, {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PYTHONPATH": str(ROOT)})
        subprocess.run(
            [SCRIPT, "up", folder], env={**os.environ, "PORT": str(_ports()), **variables}, check=True, timeout=300
        )
        runs.mkdir(parents=True, exist_ok=True)
        return box

    def stop(self) -> None:
        subprocess.run([SCRIPT, "down", self.folder], check=True, timeout=300)
        left = [p for p in psutil.process_iter() if any(str(self.folder) in word for word in _arguments(p))]
        assert not left
        shutil.rmtree(self.folder)

    def lose_power(self, node: str) -> None:
        """Kill the node's slurmd, its step daemons and their tasks at once, so that none can report another's end."""
        there, log = [], str(self.folder / "log" / f"slurmd.{node}.log")  # Slurm's daemons have it open
        for process in psutil.process_iter():
            try:
                variables, files = process.environ(), {file.path for file in process.open_files()}
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
            ours = variables.get("SLURM_CONF") == self.environment["SLURM_CONF"]
            if log in files or (ours and variables.get("SLURMD_NODENAME") == node):
                there.append(process)
        for end in (psutil.Process.suspend, psutil.Process.kill):
            for process in there:
                with suppress(psutil.NoSuchProcess):
                    end(process)

    def slurm(self, *arguments: str) -> str:
        """Run a Slurm command as `slurm.call` does, with SIGPIPE ignored."""
        return subprocess.run(
            arguments,
            env=self.environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=MOMENT_S,
            restore_signals=False,
        ).stdout

    def arpo(self, *arguments: str, ok: bool = True, **variables: str) -> str:
        """Run `arpo` and return standard output and error."""
        done = subprocess.run(
            [*ARPO, *arguments], env={**self.environment, **variables}, capture_output=True, text=True, timeout=MOMENT_S
        )
        assert (done.returncode == 0) is ok, done.stdout + done.stderr
        return done.stdout + done.stderr

    def profile(self, name: str = "test", **values: Any) -> str:
        """Write a profile and return its path."""
        path = self.runs / f"{name}.yaml"
        plain = {
            "account": "root",
            "partition": "batch",
            "runs": str(self.runs),
            "time": "00:20:00",
            "gpus_per_node": 8,
        }
        path.write_text(json.dumps({**plain, "mem": None, "signal_s": 60, **values}))  # YAML is JSON's superset
        return str(path)

    def submit_run(
        self, name: str, *arguments: str, profile: str = "", nodes: int = 2, options: tuple[str, ...] = ()
    ) -> Job:
        run = self.runs / name
        where = ["--cluster", profile or self.profile(), "--nodes", str(nodes), *options]
        output = self.arpo("submit", "quickstart", *where, f"run_dir={run}", *TINY, *arguments)
        found = re.search(r": job ([\d, ]+), run directory", output)
        assert found, output
        return Job(self, run, found[1].split(", "))

    def resume(self, job: Job, *arguments: str) -> Job:
        output = self.arpo("resume", str(job.run), *arguments)
        found = re.search(r": job ([\d, ]+), run directory", output)
        assert found, output
        return Job(self, job.run, found[1].split(", "))


def _ports() -> int:
    """Return the first of three consecutive free ports."""
    while True:
        first = random.SystemRandom().randrange(20000, 30000)
        try:
            for port in range(first, first + 3):
                with closing(socket.socket()) as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first


def _arguments(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return []
