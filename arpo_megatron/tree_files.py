"""Finished trees on disk: RUN_DIR/trees/step_NNNNNN.jsonl, one tree with its scores a line."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from arpo_megatron.errors import UserError
from arpo_megatron.run_directory import RunDirectory
from arpo_megatron.tasks.base import Task
from arpo_megatron.tree import RolloutTree


@dataclass(frozen=True, slots=True)
class ScoredTree:
    """A finished tree of a task with what its leaves earned.

    Attributes:
        task: the question.
        tree: its trajectories.
        rewards: float64[leaves] in the order of `tree.leaves()`.
        accuracies: float64[leaves], how right each answer is, in [0, 1].
    """

    task: Task
    tree: RolloutTree
    rewards: NDArray[np.float64]
    accuracies: NDArray[np.float64]


def step_file(run: RunDirectory, step: int) -> Path:
    """Where the trees of a step are."""
    return run.trees / f"step_{step:06d}.jsonl"


def write_trees(path: Path, scored: Sequence[ScoredTree]) -> None:
    """Write a step's trees; the file exists wholly or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    with partial.open("w", encoding="utf-8") as file:
        for item in scored:
            row = {
                "task": {"id": item.task.id, "prompt": item.task.prompt_text, "ground_truth": item.task.ground_truth},
                "rewards": item.rewards.tolist(),
                "accuracies": item.accuracies.tolist(),
                "tree": item.tree.to_dict(),
            }
            file.write(json.dumps(row) + "\n")
    partial.replace(path)


@dataclass(frozen=True, slots=True)
class StoredTree:
    """One line of a tree file."""

    ground_truth: str
    tree: RolloutTree
    rewards: list[float]


def read_trees(path: Path) -> list[StoredTree]:
    """What `write_trees` wrote. Raises UserError where the file is missing."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        raise UserError(f"no trees at {path}") from None
    rows = [json.loads(line) for line in lines]
    return [StoredTree(row["task"]["ground_truth"], RolloutTree.from_dict(row["tree"]), row["rewards"]) for row in rows]


def latest_step(run: RunDirectory) -> int:
    """The newest step with stored trees. Raises UserError where there is none."""
    steps = [int(path.stem.removeprefix("step_")) for path in run.trees.glob("step_*.jsonl")]
    if not steps:
        raise UserError(f"{run.path} holds no trees yet")
    return max(steps)


def most_telling(stored: Sequence[StoredTree]) -> list[StoredTree]:
    """Trees ordered so that those with forks and with both right and wrong leaves come first."""

    def forks(item: StoredTree) -> int:
        return sum(1 for index, below in enumerate(item.tree.children()) if index > 0 and len(below) > 1)

    return sorted(stored, key=lambda item: (len(set(item.rewards)) > 1, forks(item)), reverse=True)


def draw_trees(run: RunDirectory, *, step: int | None, count: int) -> None:
    """Draw `count` stored trees of a step (None: the newest) on standard output, the most telling first."""
    from rich.console import Console

    from arpo_megatron import resolve
    from arpo_megatron.monitor.tree_view import render_tree
    from arpo_megatron.preparation import load_tokenizer, model_path

    stored = read_trees(step_file(run, latest_step(run) if step is None else step))
    tokenizer = load_tokenizer(model_path(resolve.load(run.config), run))
    console = Console()
    for item in most_telling(stored)[:count]:
        console.print(render_tree(item.tree, lambda ids: str(tokenizer.decode(ids)), item.rewards))
