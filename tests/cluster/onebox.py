"""A real Slurm of two nodes on this machine, and jobs on it."""

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
"""Words that make a step of the quickstart take seconds, on two ranks."""
LIVE = {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SIGNALING"}
MOMENT_S = 600.0
LOOK_S = 0.5
"""Between two looks, each of which asks Slurm and goes through all processes: the job wants the cores."""
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
        """A field of `scontrol show job`."""
        found = re.search(rf"(?:^|\s){name}=(\S*)", self.box.slurm("scontrol", "-o", "show", "job", job or self.id))
        return found[1] if found else ""

    def state(self, job: str = "") -> str:
        return self.shown("JobState", job)

    def said(self) -> str:
        """What the role supervisor has said, in all its lives."""
        logs = sorted((self.run / "logs").glob("log-*.out"), key=lambda path: path.stat().st_mtime)
        return "".join(path.read_text() for path in logs)

    def rows(self, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
        path = self.run / name
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def in_phase(self, name: str, step: int) -> bool:
        return any(row.get("name") == name and row.get("step") == step for row in self.rows("events.jsonl"))

    def wait_for(self, what: str, condition: Callable[[], object], *, dead: bool = False) -> None:
        """`dead`: the job may have ended."""
        deadline = time.monotonic() + MOMENT_S
        while time.monotonic() < deadline:
            if condition():
                return
            state = self.state()
            assert dead or state in LIVE, f"{state} before {what}: {self}"
            time.sleep(LOOK_S)
        raise AssertionError(f"no {what} within {MOMENT_S:g} s: {self}")

    def end(self, job: str = "") -> str:
        """Wait until it has ended, and nothing of it is left; returns its state."""
        self.wait_for("end", lambda: self.state(job) not in LIVE, dead=True)
        return self.state(job)

    def nothing_is_left(self) -> bool:
        deadline = time.monotonic() + END_S
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        return not left

    def processes(self, module: str = "") -> list[psutil.Process]:
        """Those that name the run directory in their words or environment; with `module` the ones that are that."""
        found = []
        for process in psutil.process_iter():
            try:
                words, variables = process.cmdline(), process.environ().values()
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
            ours = any(str(self.run) in word for word in (*words, *variables))
            wanted = not module or (module in words[1:5] and "python" in Path(words[0]).name)
            if ours and wanted and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found

    def __str__(self) -> str:
        return f"{self.run}\n{self.said()[-3000:]}"


@dataclass
class Onebox:
    """Started by `start`, ended by `stop`."""

    folder: Path
    runs: Path
    environment: dict[str, str] = field(default_factory=dict)

    @classmethod
    def start(cls, runs: Path, **variables: str) -> "Onebox":
        """`variables` of the script."""
        folder = Path(tempfile.mkdtemp(prefix="onebox-", dir="/tmp"))
        box = cls(folder, runs, {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PYTHONPATH": str(ROOT)})
        subprocess.run(
            [SCRIPT, "up", folder], env={**os.environ, "PORT": str(_ports()), **variables}, check=True, timeout=300
        )
        runs.mkdir(parents=True, exist_ok=True)
        return box

    def stop(self) -> None:
        subprocess.run([SCRIPT, "down", self.folder], check=True, timeout=300)
        left = [p for p in psutil.process_iter() if any(str(self.folder) in word for word in _words(p))]
        assert not left
        shutil.rmtree(self.folder)

    def lose_power(self, node: str) -> None:
        """End its slurmd, the steps' daemons and what they run at once: none may live to tell of another's end."""
        there, log = [], str(self.folder / "log" / f"slurmd.{node}.log")  # Slurm's own have it open
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

    def slurm(self, *words: str) -> str:
        return subprocess.run(
            words, env=self.environment, capture_output=True, text=True, check=True, timeout=MOMENT_S
        ).stdout

    def arpo(self, *words: str, ok: bool = True, **variables: str) -> str:
        """What `arpo` says, on both channels."""
        done = subprocess.run(
            [*ARPO, *words], env={**self.environment, **variables}, capture_output=True, text=True, timeout=MOMENT_S
        )
        assert (done.returncode == 0) is ok, done.stdout + done.stderr
        return done.stdout + done.stderr

    def profile(self, name: str = "test", **values: Any) -> str:
        """A profile file of its own."""
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
        self, name: str, *words: str, profile: str = "", nodes: int = 2, options: tuple[str, ...] = ()
    ) -> Job:
        run = self.runs / name
        where = ["--cluster", profile or self.profile(), "--nodes", str(nodes), *options]
        said = self.arpo("submit", "quickstart", *where, f"run_dir={run}", *TINY, *words)
        found = re.search(r": job ([\d, ]+), run directory", said)
        assert found, said
        return Job(self, run, found[1].split(", "))

    def resume(self, job: Job, *words: str) -> Job:
        said = self.arpo("resume", str(job.run), *words)
        found = re.search(r": job ([\d, ]+), run directory", said)
        assert found, said
        return Job(self, job.run, found[1].split(", "))


def _ports() -> int:
    """The first of three neighbours that are free."""
    while True:
        first = random.SystemRandom().randrange(20000, 30000)
        try:
            for port in range(first, first + 3):
                with closing(socket.socket()) as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return []
