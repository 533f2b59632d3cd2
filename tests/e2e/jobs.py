"""How the end-to-end tests call the command line."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from arpo_megatron.monitor.tree_store import StoredTree, read_trees
from arpo_megatron.rollout.record import TreeRecord, UntrainedTree, decode_records
from arpo_megatron.trainer.step_journal import StepJournal, StepSnapshot
from arpo_megatron.tree import Role
from tests.repo.metric_names import documented_metrics

Job = subprocess.Popen[str]
Start = Callable[[list[str]], Job]
MOMENT_S = 600.0  # deadline for a job to reach the state a test waits for
ARPO = [sys.executable, "-m", "arpo_megatron"]
SEED = 7
SHORT_SFT = ("sft.steps=120",)
"""Overrides of a cold start after which the model calls tools, though not well."""
TASKS = 4
SHORT = [f"train.tasks_per_step={TASKS}", "evaluation.before=false", "evaluation.after=false"]
"""Overrides that make a step of the quickstart take seconds."""
TWO_RANKS = ["parallel.tensor=2", "parallel.sequence=true"]
AHEAD = ["rollout.max_staleness=1"]
"""Overrides with which trees are in flight at any moment."""


def quickstart(command: str, run: Path, *overrides: str) -> list[str]:
    """Return the command line of `arpo train` or `arpo sft` for the quickstart recipe in the directory `run`."""
    return [*ARPO, command, "quickstart", f"run_dir={run}", f"seed={SEED}", *overrides]


def run_to_end(command: list[str], run: Path) -> str:
    """Run a job that must succeed; returns its terminal output."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"logs in {run / 'logs'}\n{done.stderr[-3000:]}"
    return done.stderr


def wait_for(what: str, condition: Callable[[], object], job: Job, every_s: float = 0.01) -> None:
    deadline = time.monotonic() + MOMENT_S
    while time.monotonic() < deadline:
        if condition():
            return
        assert job.poll() is None, f"the job ended before {what}: {job.communicate()[1]}"
        time.sleep(every_s)
    raise AssertionError(f"no {what} within {MOMENT_S:g} s")


def undocumented(row: dict[str, Any]) -> list[str]:
    """Return the names in a row of metrics that docs/reference/run-directory.md lacks."""
    return sorted(set(row) - documented_metrics())


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Read the whole lines of a JSONL file that may still grow, or may not exist yet."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def trained(run: Path) -> list[StoredTree]:
    """Read the trees of all steps, without the dropped ones."""
    files = sorted((run / "trees").iterdir())
    return [item for path in files for item in read_trees(path) if item.dropped is None]


def check_steps(run: Path, steps: int) -> None:
    """Check that every step of a `SHORT` job trained its trees, none lost and none twice, on weights the engine has."""
    rows = rows_of(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [*range(1, steps + 1)]
    assert all(row["trees"] == TASKS and not row["dropped/failed"] for row in rows)
    # Also after a restart, although the files of the engine have the weights of step 0. None: all samples were stale.
    assert all(row["logprob_gap"] is None or row["logprob_gap"] < 1e-3 for row in rows)
    assert sorted(path.name for path in (run / "trees").iterdir()) == [
        f"step_00000{step}.parquet" for step in range(1, steps + 1)
    ]
    assert len({item.tree.task_id for item in trained(run)}) == steps * TASKS


def journal_of(run: Path, step: int) -> StepSnapshot | None:
    """Read the journal of the step after `step`, if the run wrote one."""
    copy = run / "copy_of_step_journal.msgpack"  # a read removes the journal of another step
    with suppress(FileNotFoundError):
        copy.write_bytes((run / "step_journal.msgpack").read_bytes())
    return StepJournal(copy, run / "checkpoints", 1, 0.0, print).read(step)


def unfinished(run: Path) -> list[UntrainedTree]:
    """Return the trees that a resumed run begins with: from the step's journal, else from the newest checkpoint."""
    newest = max((run / "checkpoints").glob("step_*[0-9]"), key=lambda path: int(path.name.removeprefix("step_")))
    snapshot = journal_of(run, int(newest.name.removeprefix("step_")))
    return snapshot.trees if snapshot is not None else decode_records((newest / "trees.msgpack").read_bytes())


def check_kept(run: Path, trees: list[UntrainedTree]) -> None:
    """Check that all that these trees had sampled was trained: tokens, log-probs (bits), versions, tool answers."""
    by_task = {item.tree.task_id: item.tree for item in trained(run)}
    sampled = 0
    for tree in trees:
        record, segments = TreeRecord.from_entries(tree.entries), by_task[tree.task_id].segments
        for part in (part for parts in record.generations.values() for part in parts):
            assert any(
                segment.policy_version == part.weight_version
                and segment.logprobs is not None
                and part.logprobs.tobytes() in segment.logprobs.tobytes()
                and part.token_ids.tobytes() in segment.token_ids.tobytes()
                for segment in segments
                if segment.role is Role.MODEL
            )
            sampled += len(part.token_ids)
        results = [segment.token_ids.tolist() for segment in segments if segment.role is Role.TOOL]
        assert all(answer.token_ids.tolist() in results for answer in record.tool_results.values())
    assert sampled > 0, "no tree was in flight"


def kill_service(job: int, module: str) -> None:
    """Kill a service of the job with that process id, and all its workers, with SIGKILL."""
    for process in psutil.Process(job).children(recursive=True):
        with suppress(psutil.Error):  # it has ended, or is ending
            if module in " ".join(process.cmdline()):
                process.kill()
