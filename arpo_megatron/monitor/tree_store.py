"""Finished trees on disk: RUN_DIR/trees/step_NNNNNN.parquet, one row per tree, for pandas, polars and `arpo trees`.

A file is written completely or not at all; a step that is repeated after a resume replaces its file. Pages carry
checksums, so a damaged file is detected.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from arpo_megatron.errors import UserError
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.monitor.tree_schema import is_read_as, tree_schema
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.tree import Role, RolloutTree, Segment, stored_routes
from arpo_megatron.utils.atomic import atomic_write

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

Decode = Callable[[Sequence[int]], str]
_ROWS_PER_GROUP = 16  # bounds the memory of a reader that wants a few trees
_SUMMARY = ("step", "task_id", "leaves", "forks", "rewards", "unique_tokens", "flat_tokens", "grow_seconds", "dropped")
_LOST = ("lost", "needs", "same_calls", "answered_shares")
_DERIVED = ("text", "trainer_logprobs")
"""Fields of a stored segment that a `Segment` does not have."""
_BAD_ROW = (ValueError, LookupError, TypeError, AttributeError)
_STEP_FILE = re.compile(r"step_(\d{6,})\.parquet")


@dataclass(frozen=True, slots=True)
class StoredTree:
    """The columns of a tree file that are needed to draw and replay a tree. A dropped tree has no rewards."""

    ground_truth: str
    tree: RolloutTree
    rewards: list[float]
    dropped: str | None = None
    replayed: int = 0

    @property
    def complete(self) -> bool:
        """Whether all its trajectories have ended, so that each has a reward."""
        return len(self.rewards) == len(self.tree.leaves())


@dataclass(frozen=True, slots=True)
class TrainedTree:
    """The values that the trainer computed for a tree before the updates of its step."""

    advantages: NDArray[np.float64]
    """float64[leaves], or float64[leaves, segments] if the segments of a trajectory differ."""
    logprobs: NDArray[np.float64]
    """float64[tokens] in segment-index order: the trainer's log-probs in nats of what the engine sampled, under the
    policy that the step began with; NaN outside MODEL tokens."""


def held_out_file(run: RunDirectory, step: int) -> Path:
    """Return the path of the file with the trajectories of the held-out tasks after a step."""
    return run.held_out / f"step_{step:06d}.parquet"


def step_file(run: RunDirectory, step: int) -> Path:
    """Return the path of the file with the trees of a step."""
    return run.trees / f"step_{step:06d}.parquet"


def stored_steps(run: RunDirectory) -> list[int]:
    """Return the steps with stored trees, ascending. Raises UserError if there are none."""
    if steps := steps_in(run.trees):
        return steps
    raise UserError(f"{run.path} holds no trees yet")


def steps_in(folder: Path) -> list[int]:
    """Return the steps whose trees a folder holds, ascending. Files with other names are ignored."""
    found = (_STEP_FILE.fullmatch(path.name) for path in folder.glob("step_*.parquet"))
    return sorted(int(name[1]) for name in found if name)


@dataclass(slots=True)
class TreeLog:
    """Writes each step's trees. Trees that the disk refuses are counted and lost: they must not end a run."""

    run: RunDirectory
    """The run whose directory receives them."""
    log: Callable[[str], None]
    """Receives one line, at the first failure."""
    _failed: bool = field(default=False, init=False)

    def store(
        self, step: int, scored: Sequence[ScoredTree], decode: Decode, trained: Sequence[TrainedTree] = ()
    ) -> int:
        """Write a step's trees, as `write_trees` does. Return the number of trees that could not be written."""
        try:
            write_trees(step_file(self.run, step), step, scored, decode, trained)
        except OSError as error:
            if not self._failed:
                self.log(
                    f"the trees of step {step} are not stored ({error}); training continues, and metric "
                    "trees_not_stored counts the trees that are lost"
                )
            self._failed = True
            return len(scored)
        return 0


def write_trees(
    path: Path, step: int, scored: Sequence[ScoredTree], decode: Decode, trained: Sequence[TrainedTree] = ()
) -> None:
    """Write a step's trees in the format of docs/reference/run-directory.md.

    Args:
        path: the file.
        step: number of the step, from 1.
        scored: its trees.
        decode: token ids -> text.
        trained: values of the first trees; the others were not trained.

    Raises:
        OSError: the disk refuses the file; none is left.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [_row(step, item, decode, own) for item, own in zip_longest(scored, trained)]
    table = pa.Table.from_pylist(rows, schema=tree_schema())
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial:
        pq.write_table(table, partial, compression="zstd", row_group_size=_ROWS_PER_GROUP, write_page_checksum=True)


def read_trees(path: Path) -> list[StoredTree]:
    """Read a file of `write_trees`. Raises UserError, with the row, if the file is missing or damaged."""
    columns = ["task_id", "ground_truth", "begun_in_step", "grow_seconds", "rewards", "dropped", "replayed", "lost"]
    columns.append("segments")
    found = []
    for number, row in enumerate(read_summaries(path, columns)):
        try:
            found.append(_stored(row))
        except _BAD_ROW as error:
            raise _damaged(path, error, f"row {number} (from 0), ") from None
    return found


def read_summaries(path: Path, columns: Sequence[str] = _SUMMARY) -> list[dict[str, Any]]:
    """Read some columns of a tree file: by default all that summarize a tree without its segments.

    Args:
        path: a file of `write_trees`.
        columns: their names; `segments.list.element.NAME` is one field of the segments.

    Raises:
        UserError: as `read_trees` does.
    """
    with _open(path) as file:
        return _rows(file.read(columns=list(columns)), columns)


def read_row(path: Path, number: int) -> dict[str, Any]:
    """Read the row of one tree (from 0) with all its columns but the routes; other trees of the file are not decoded.

    Raises:
        UserError: as `read_trees` does, or the file has no such tree.
    """
    row = _read_row(path, number)
    try:
        _check_row(row)
    except _BAD_ROW as error:
        raise _damaged(path, error, f"row {number} (from 0), ") from None
    return row


def _read_row(path: Path, number: int) -> dict[str, Any]:
    with _open(path) as file:
        schema = tree_schema()
        parts = [f"segments.list.element.{part.name}" for part in schema.field("segments").type.value_type]
        columns = [*(name for name in schema.names if name != "segments"), *parts]
        columns.remove("segments.list.element.routes")
        if not 0 <= number < file.metadata.num_rows:
            raise UserError(f"{path} has no tree {number}: it has trees 0 to {file.metadata.num_rows - 1}")
        group, first = 0, 0
        while number >= first + file.metadata.row_group(group).num_rows:
            group, first = group + 1, first + file.metadata.row_group(group).num_rows
        return _rows(file.read_row_group(group, columns=columns).slice(number - first, 1), columns)[0]


@contextmanager
def _open(path: Path) -> "Iterator[pq.ParquetFile]":
    """Yield an open file of trees. Whatever fails while it is read is raised as a UserError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except FileNotFoundError:
        raise UserError(f"no trees at {path}") from None
    except (OSError, ValueError, MemoryError, pa.ArrowException) as error:
        raise _damaged(path, error) from None


def _rows(table: "pa.Table", columns: Sequence[str]) -> list[dict[str, Any]]:
    missing = {name.partition(".")[0] for name in columns} - set(table.column_names)
    if not missing and (parts := {name.split(".")[3] for name in columns if name.startswith("segments.")}):
        missing = parts - {part.name for part in table.schema.field("segments").type.value_type}
    if missing:
        raise ValueError(f"it has no {', '.join(sorted(missing))}")
    schema = tree_schema()
    for column in table.schema:
        if not is_read_as(column.type, wanted := schema.field(column.name).type):
            raise ValueError(f"column {column.name} has type {column.type}, not {wanted}")
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def _check_row(row: dict[str, Any]) -> None:
    """Raise one of `_BAD_ROW` if a row with all columns is no whole tree."""
    stored = _stored(row)
    if row["leaves"] != stored.tree.leaves() or len(stored.rewards) not in (0, len(row["leaves"])):
        raise ValueError("leaves and rewards are not those of its segments")
    for index, segment in enumerate(row["segments"]):
        gaps = segment["trainer_logprobs"]
        if segment["text"] is None or (gaps is not None and len(gaps) != len(segment["token_ids"])):
            raise ValueError(f"segment {index} lacks its text, or a trainer_logprob per token")
    if any(term is None or None in (term["name"], term["values"]) for term in row["terms"]):
        raise ValueError("a term lacks name or values")


def _damaged(path: Path, error: Exception, where: str = "") -> UserError:
    return UserError(f"{path} is not a file of trees: {where}{(str(error).splitlines() or [type(error).__name__])[0]}")


def _row(step: int, item: ScoredTree, decode: Decode, trained: TrainedTree | None) -> dict[str, Any]:
    tree, task = item.tree, item.task
    ends = np.cumsum([len(segment) for segment in tree.segments])
    logprobs = [None] * len(ends) if trained is None else np.split(trained.logprobs, ends[:-1])
    advantages = [] if trained is None else list(trained.advantages.reshape(len(trained.advantages), -1))
    return {
        "step": step,
        "task_id": task.id,
        "prompt": task.prompt_text,
        "ground_truth": task.ground_truth,
        "aliases": task.aliases,
        "source": task.source,
        "begun_in_step": tree.step,
        "grow_seconds": tree.seconds,
        "leaves": tree.leaves(),
        "rewards": item.rewards,
        "accuracies": item.accuracies,
        "format_ok": item.format_ok,
        "terms": [{"name": name, "values": values} for name, values in item.terms.items()],
        "answers": item.answers,
        "format_faults": item.format_faults,
        "advantages": advantages,
        "forks": tree.forks,
        "unique_tokens": tree.unique_tokens,
        "flat_tokens": tree.flat_tokens,
        "dropped": item.dropped,
        "replayed": item.replayed,
        "lost": _lost_json(tree),
        "segments": [_segment(segment, decode, own) for segment, own in zip(tree.segments, logprobs, strict=True)],
    }


def _lost_json(tree: RolloutTree) -> str | None:
    """Return what weights of trees with failed calls need; None if there is nothing."""
    if tree.lost is None and not tree.needs and not tree.same_calls and not tree.answered_shares:
        return None
    data = tree.to_dict()
    return json.dumps({name: data[name] for name in _LOST})


def _segment(segment: Segment, decode: Decode, trainer_logprobs: NDArray[np.float64] | None) -> dict[str, Any]:
    branch, tool = segment.branch, segment.tool
    return {
        "role": segment.role.value,
        "parent": segment.parent,
        "text": decode(segment.token_ids.tolist()),
        "token_ids": segment.token_ids,
        "logprobs": segment.logprobs,
        "trainer_logprobs": trainer_logprobs if segment.role is Role.MODEL else None,
        "entropies": segment.entropies,
        "policy_version": segment.policy_version,
        "finish": segment.finish and segment.finish.value,
        "branch": branch and asdict(branch),
        "tool": tool and {**asdict(tool), "arguments": json.dumps(dict(tool.arguments))},
        "routes": stored_routes(segment.routes),
        "turn_rewards": None if segment.rewards is None else json.dumps(dict(segment.rewards)),
        "ended_s": segment.ended_s,
    }


def _stored(row: dict[str, Any]) -> StoredTree:
    tree, rewards, replayed = _tree(row), [float(reward) for reward in row["rewards"]], row["replayed"]
    if not 0 <= replayed <= len(tree.leaves()):
        raise ValueError(f"{replayed} of {len(tree.leaves())} trajectories are replayed ones")
    return StoredTree(row["ground_truth"], tree, rewards, row["dropped"], replayed)


def _tree(row: dict[str, Any]) -> RolloutTree:
    segments = []
    for index, stored in enumerate(row["segments"]):
        if stored is None:
            raise ValueError(f"segment {index} is null")
        fields = {name: value for name, value in stored.items() if value is not None and name not in _DERIVED}
        if "tool" in fields:
            fields["tool"] = fields["tool"] | {"arguments": json.loads(fields["tool"]["arguments"])}
        if "turn_rewards" in fields:
            fields["rewards"] = json.loads(fields.pop("turn_rewards"))
        segments.append(fields)
    lost = json.loads(row["lost"]) if row["lost"] else {}
    return RolloutTree.from_dict(
        {"task_id": row["task_id"], "step": row["begun_in_step"], "seconds": row["grow_seconds"], "segments": segments}
        | lost
    )


def rank_for_display(stored: Sequence[StoredTree]) -> list[StoredTree]:
    """Order trees for display: first those whose forks decided between right and wrong, short ones before long ones.

    Dropped trees are left out.
    """

    def decisive_forks(item: StoredTree) -> int:
        tree, earned = item.tree, dict(zip(item.tree.leaves(), item.rewards, strict=True))
        outcomes: list[set[float]] = [set() for _ in tree.segments]
        for leaf, reward in earned.items():
            for index in tree.path(leaf):
                outcomes[index].add(reward)
        forks = [below for index, below in enumerate(tree.children()) if index > 0 and len(below) > 1]
        return sum(len(set().union(*(outcomes[child] for child in below))) > 1 for below in forks)

    complete = [item for item in stored if item.complete]
    return sorted(complete, key=lambda item: (-decisive_forks(item), item.tree.unique_tokens))
