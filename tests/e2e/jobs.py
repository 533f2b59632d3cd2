"""How the end-to-end tests call the command line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from arpo_megatron.monitor import catalogue

ARPO = [sys.executable, "-m", "arpo_megatron"]
SEED = 7
SHORT = ["train.tasks_per_step=4", "evaluation.before=false", "evaluation.after=false"]
"""Words that make a step of the quickstart take seconds."""


def quickstart(command: str, run: Path, *words: str) -> list[str]:
    """The command line of `arpo train` or `arpo sft` on the quickstart recipe in the directory `run`."""
    return [*ARPO, command, "quickstart", f"run_dir={run}", f"seed={SEED}", *words]


def run_to_end(command: list[str], run: Path) -> str:
    """Run a job that must end well; returns what it said on the terminal."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"logs in {run / 'logs'}\n{done.stderr[-3000:]}"
    return done.stderr


def undocumented(row: dict[str, Any]) -> list[str]:
    """Names in a row of metrics that docs/run-directory.md does not have."""
    return sorted(set(row) - set(catalogue.metrics()))


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSONL file that may still be growing or not be there yet."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
