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
        format_ok: bool[leaves], whether the trajectory keeps to the tag protocol.
    """

    task: Task
    tree: RolloutTree
    rewards: NDArray[np.float64]
    accuracies: NDArray[np.float64]
    format_ok: NDArray[np.bool_]


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
    """Trees ordered for showing: those whose forks decided between right and wrong first, short ones before long."""

    def decisive_forks(item: StoredTree) -> int:
        tree, earned = item.tree, dict(zip(item.tree.leaves(), item.rewards, strict=True))
        outcomes: list[set[float]] = [set() for _ in tree.segments]
        for leaf, reward in earned.items():
            for index in tree.path(leaf):
                outcomes[index].add(reward)
        forks = [below for index, below in enumerate(tree.children()) if index > 0 and len(below) > 1]
        return sum(len(set().union(*(outcomes[child] for child in below))) > 1 for below in forks)

    return sorted(stored, key=lambda item: (-decisive_forks(item), item.tree.unique_tokens))


def draw_trees(run: RunDirectory, *, step: int | None, count: int, svg: Path | None) -> None:
    """Draw `count` stored trees of a step (None: the newest), the most telling first, on the screen or as SVG.

    Raises:
        UserError: no trees are stored, or the file cannot be written.
    """
    from rich.console import Console, Group

    from arpo_megatron import resolve
    from arpo_megatron.monitor.tree_view import render_tree, save_svg
    from arpo_megatron.preparation import load_tokenizer, model_path

    stored = read_trees(step_file(run, latest_step(run) if step is None else step))
    tokenizer = load_tokenizer(model_path(resolve.load(run.config), run))
    pictures = [
        render_tree(item.tree, lambda ids: str(tokenizer.decode(ids)), item.rewards)
        for item in most_telling(stored)[:count]
    ]
    if svg is None:
        Console().print(Group(*pictures))
        return
    try:
        save_svg(Group(*pictures), svg, title=f"arpo trees {run.path}")
    except OSError as error:
        raise UserError(f"cannot write {svg}: {error.strerror}") from None
