"""How the end-to-end tests call the command line."""

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from arpo_megatron.monitor.tree_store import StoredTree, read_trees
from arpo_megatron.rollout.record import TreeRecord, UnfinishedTree, unpack_trees
from arpo_megatron.trainer.step_journal import StepJournal, StepSnapshot
from arpo_megatron.tree import Role
from tests.repo.metric_names import documented_metrics

ARPO = [sys.executable, "-m", "arpo_megatron"]
SEED = 7
SHORT = ["train.tasks_per_step=4", "evaluation.before=false", "evaluation.after=false"]
"""Words that make a step of the quickstart take seconds."""
AHEAD = ["rollout.max_staleness=1", "algorithm.trajectory_weight_limit=2"]
"""Words with which trees are under way at any moment."""


def quickstart(command: str, run: Path, *words: str) -> list[str]:
    """The command line of `arpo train` or `arpo sft` on the quickstart recipe in the directory `run`."""
    return [*ARPO, command, "quickstart", f"run_dir={run}", f"seed={SEED}", *words]


def run_to_end(command: list[str], run: Path) -> str:
    """Run a job that must end well; returns what it said on the terminal."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"logs in {run / 'logs'}\n{done.stderr[-3000:]}"
    return done.stderr


def undocumented(row: dict[str, Any]) -> list[str]:
    """Names in a row of metrics that docs/run-directory.md does not have."""
    return sorted(set(row) - documented_metrics())


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSONL file that may still be growing or not be there yet."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def trained(run: Path) -> list[StoredTree]:
    """The trees of all steps, without those that were dropped."""
    files = sorted((run / "trees").iterdir())
    return [item for path in files for item in read_trees(path) if item.dropped is None]


def under_way(run: Path, step: int) -> StepSnapshot | None:
    """What a run that had done so many steps wrote of the next one."""
    copy = run / "copy_of_step_journal.msgpack"  # reading removes what is of another step
    with suppress(FileNotFoundError):
        copy.write_bytes((run / "step_journal.msgpack").read_bytes())
    return StepJournal(copy, run / "checkpoints", 1, 0.0, print).read(step)


def unfinished(run: Path) -> list[UnfinishedTree]:
    """The trees that a resumed run begins with: those of the newest checkpoint, or of the step that was under way."""
    newest = max((run / "checkpoints").glob("step_*[0-9]"), key=lambda path: int(path.name.removeprefix("step_")))
    moment = under_way(run, int(newest.name.removeprefix("step_")))
    return moment.trees if moment is not None else unpack_trees((newest / "trees.msgpack").read_bytes())


def check_kept(run: Path, trees: list[UnfinishedTree]) -> None:
    """All that these had sampled was trained: tokens, log-probs to the bit, versions, and answers of tools."""
    by_task = {item.tree.task_id: item.tree for item in trained(run)}
    sampled = 0
    for tree in trees:
        record, segments = TreeRecord.of(tree.entries), by_task[tree.task_id].segments
        for part in (part for parts in record.sampled.values() for part in parts):
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
        assert all(answer.token_ids.tolist() in results for answer in record.answered.values())
    assert sampled > 0, "nothing was under way"
