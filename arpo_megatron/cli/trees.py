"""`arpo trees` and `arpo replay-tree`: show a run's stored trees, and check that their decisions can be recomputed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.inputs import load_tokenizer
from arpo_megatron.jobs.run_directory import RunDirectory, start_model
from arpo_megatron.monitor.tree_store import (
    StoredTree,
    rank_for_display,
    read_summaries,
    read_trees,
    step_file,
    stored_steps,
)
from arpo_megatron.monitor.tree_view import printable, render_tree, save_svg
from arpo_megatron.tree import RolloutTree
from arpo_megatron.utils.atomic import atomic_write


def show_trees(run: RunDirectory, *, step: int | None, tree: int | None, count: int, svg: Path | None) -> None:
    """List the stored trees of a step and draw some of them, in the terminal or as SVG.

    Args:
        run: run with stored trees.
        step: step of the trees; None for the newest.
        tree: number of the tree to draw, as listed; None to draw `count` trees, most informative first.
        count: number of trees to draw; 0 only lists.
        svg: file for the drawing.

    Raises:
        UserError: no such trees are stored, or the file cannot be written.
    """
    steps = stored_steps(run)
    path = step_file(run, steps[-1] if step is None else step)
    if svg is None:
        Console().print(_table(path, steps))
    stored = read_trees(path) if count or tree is not None else []
    chosen = rank_for_display(stored)[:count] if tree is None else [_numbered(stored, tree, path)]
    if not chosen:
        return
    tokenizer = load_tokenizer(start_model(resolve.read(run.config), run, "sft"))
    pictures = [_picture(item, lambda ids: str(tokenizer.decode(ids))) for item in chosen]
    if svg is None:
        Console().print(Group(*pictures))
        return
    try:
        save_svg(Group(*pictures), svg, title=f"arpo trees {run.path}")
    except OSError as error:
        raise UserError(f"cannot write {svg}: {error.strerror}") from None


def write_reflections(run: RunDirectory, *, step: int | None, file: Path, text: str) -> None:
    """Write the reflection data of a run's trees, and print the number of rows.

    Args:
        run: run with stored trees.
        step: step of the trees; None for all stored ones.
        file: .jsonl file for `sft.data`.
        text: the sentence between the wrong and the right branch.

    Raises:
        UserError: no trees are stored, none of them has a failed branch next to a success, or the file cannot be
            written.
    """
    from arpo_megatron.tasks.sft.reflections import reflection_rows

    if file.suffix != ".jsonl":
        raise UserError(f"--reflections {file}: the name must end in .jsonl")
    job = resolve.read(run.config)
    tokens = load_tokenizer(start_model(job, run, "sft")).encode(text, add_special_tokens=False)
    rows = []
    for number in stored_steps(run) if step is None else [step]:
        for item in read_trees(step_file(run, number)):
            if item.complete:
                solved = [reward > job.reward.success_threshold for reward in item.rewards]
                rows += [json.dumps(row) for row in reflection_rows(item.tree, solved, tokens)]
    if not rows:
        raise UserError(f"{run.path}: no stored tree has a failed branch with a call next to a success")
    try:
        with atomic_write(file) as partial:
            partial.write_text("\n".join(rows) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from None
    print(f"{len(rows)} failed branches, each with the right one next to it: {file}")


def replay_trees(file: Path, *, tree: int | None, config: Path | None) -> bool:
    """Recompute the decisions of stored trees, print the outcome, and return whether all match.

    Args:
        file: RUN_DIR/trees/step_N.parquet.
        tree: number of one tree; None for all.
        config: config of the run; None for that of the run directory that contains the file.

    Raises:
        UserError: the file, the config or the tokenizer cannot be read.
    """
    from arpo_megatron.algorithms.branching import make_branch_policy
    from arpo_megatron.algorithms.branching.random_forks import at_rate
    from arpo_megatron.rollout.replay_decisions import DecisionMismatchError, replay_decisions
    from arpo_megatron.rollout.worker import TokenizerCodec

    run = RunDirectory(file.resolve().parent.parent)
    if config is None and not run.config.is_file():
        raise UserError(f"{file} is not in a run directory: give the run's config with --config")
    job = resolve.read(config or run.config)
    vocabulary_size = TokenizerCodec(start_model(job, run, "sft")).vocabulary_size
    stored = read_trees(file)
    numbers = range(len(stored)) if tree is None else [tree]
    decisions = 0
    incomplete = mixed = 0
    for number in numbers:
        item = _numbered(stored, number, file)
        if not item.complete:
            if item.dropped is None or item.rewards:
                found, leaves = len(item.rewards), len(item.tree.leaves())
                print(printable(f"tree {number} ({item.tree.task_id}): {found} rewards for {leaves} trajectories"))
                return False
            incomplete += 1  # the tree was dropped before it was complete
            continue
        if item.replayed:  # a replayed trajectory replaced a sampled one
            mixed += 1
            continue
        try:
            algorithm = at_rate(job.algorithm, _fork_rate(item.tree))
            policy = make_branch_policy(algorithm, vocabulary_size=vocabulary_size, seed=job.seed)
            decisions += replay_decisions(item.tree, policy)
        except DecisionMismatchError as difference:
            print(printable(f"tree {number} ({item.tree.task_id}): {difference}"))
            return False
    if incomplete:
        print(f"{incomplete} trees were dropped before they were complete; they are skipped")
    if mixed:
        print(f"{mixed} trees contain replayed trajectories; they are skipped")
    print(f"{len(numbers) - incomplete - mixed} trees, {decisions} decisions: all follow from tree, entropies and seed")
    return True


def _fork_rate(tree: RolloutTree) -> float | None:
    """Return the chance of a tree's first decision; trees with a matched fork rate have one for all."""
    return next((segment.branch.probability for segment in tree.segments if segment.branch is not None), None)


def _picture(item: StoredTree, decode: Callable[[list[int]], str]) -> RenderableType:
    return render_tree(item.tree, decode, item.rewards if item.complete else [])


def _numbered(stored: list[StoredTree], number: int, path: Path) -> StoredTree:
    if not 0 <= number < len(stored):
        raise UserError(f"{path} has no tree {number}: it has trees 0 to {len(stored) - 1}")
    return stored[number]


def _table(path: Path, steps: list[int]) -> Table:
    """Return a table with one row per tree, in stored order."""
    rows = read_summaries(path)
    title = f"{path} (stored: steps {steps[0]} to {steps[-1]})"
    table = Table(title=Text(title), title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    for name in ("tree", "step", "task", "leaves", "forks", "reward", "unique/flat", "seconds", "dropped"):
        table.add_column(name, justify="left" if name == "task" else "right", overflow="fold")
    for number, row in enumerate(rows):
        table.add_row(*(Text(printable(cell)) for cell in (str(number), *_cells(row))))  # no markup
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    rewards, unique, flat = row["rewards"], row["unique_tokens"], row["flat_tokens"]
    return [
        str(row["step"]),
        row["task_id"],
        str(len(row["leaves"])),
        str(row["forks"]),
        f"{sum(rewards) / len(rewards):+.3f}" if rewards else "-",
        f"{unique}/{flat}",
        f"{row['grow_seconds']:.1f}",
        row["dropped"] or "",
    ]
