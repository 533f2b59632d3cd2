"""Finished trees on disk: RUN_DIR/trees/step_NNNNNN.parquet, one row per tree, for pandas, polars and `arpo trees`.

A file is written completely or not at all; a step that is repeated after a resume replaces its file. Pages carry
checksums, so a damaged file is detected.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arpo_megatron.errors import UserError
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.tree import RolloutTree, Segment, stored_routes
from arpo_megatron.utils.atomic import atomic_write

if TYPE_CHECKING:
    import pyarrow as pa

Decode = Callable[[Sequence[int]], str]
_ROWS_PER_GROUP = 16  # bounds the memory of a reader that wants a few trees
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


def step_file(run: RunDirectory, step: int) -> Path:
    """Return the path of the file with the trees of a step."""
    return run.trees / f"step_{step:06d}.parquet"


def stored_steps(run: RunDirectory) -> list[int]:
    """Return the steps with stored trees, ascending. Raises UserError if there are none."""
    found = [_STEP_FILE.fullmatch(path.name) for path in run.trees.glob("step_*.parquet")]
    steps = sorted(int(name[1]) for name in found if name)  # other files are ignored
    if not steps:
        raise UserError(f"{run.path} holds no trees yet")
    return steps


@dataclass(slots=True)
class TreeLog:
    """Writes each step's trees. Trees that the disk refuses are counted and lost: they must not end a run."""

    run: RunDirectory
    """The run whose directory receives them."""
    log: Callable[[str], None]
    """Receives one line, at the first failure."""
    _failed: bool = field(default=False, init=False)

    def store(self, step: int, scored: Sequence[ScoredTree], decode: Decode) -> int:
        """Write a step's trees. Return the number of trees that could not be written."""
        try:
            write_trees(step_file(self.run, step), step, scored, decode)
        except OSError as error:
            if not self._failed:
                self.log(
                    f"the trees of step {step} are not stored ({error}); training continues, and metric "
                    "trees_not_stored counts the trees that are lost"
                )
            self._failed = True
            return len(scored)
        return 0


def write_trees(path: Path, step: int, scored: Sequence[ScoredTree], decode: Decode) -> None:
    """Write a step's trees in the format of docs/run-directory.md. Raises OSError and leaves nothing then."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist([_row(step, item, decode) for item in scored], schema=_schema())
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path, durable=True) as partial:
        pq.write_table(table, partial, compression="zstd", row_group_size=_ROWS_PER_GROUP, write_page_checksum=True)


def read_trees(path: Path) -> list[StoredTree]:
    """Read a file of `write_trees`. Raises UserError, with the row, if the file is missing or damaged."""
    columns = ["task_id", "ground_truth", "begun_in_step", "grow_seconds", "rewards", "dropped", "replayed", "segments"]
    found = []
    for number, row in enumerate(_read(path, columns)):
        try:
            found.append(_stored(row))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise _damaged(path, error, f"row {number} (from 0), ") from None
    return found


def read_summaries(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a tree file without their segments. Raises UserError like `read_trees`."""
    columns = ["step", "task_id", "leaves", "forks", "rewards", "unique_tokens", "flat_tokens"]
    columns += ["grow_seconds", "dropped"]
    return _read(path, columns)


def _read(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, columns=list(columns), partitioning=None, page_checksum_verification=True)
        if table.column_names != list(columns):
            raise ValueError(f"it has no {', '.join(sorted(set(columns) - set(table.column_names)))}")
        rows: list[dict[str, Any]] = table.to_pylist()
        return rows
    except FileNotFoundError:
        raise UserError(f"no trees at {path}") from None
    except (OSError, ValueError, MemoryError, pa.ArrowException) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception, where: str = "") -> UserError:
    return UserError(f"{path} is not a file of trees: {where}{(str(error).splitlines() or [type(error).__name__])[0]}")


def _schema() -> "pa.Schema":
    """Return the columns in the order of docs/run-directory.md."""
    import pyarrow as pa

    text, number = pa.string(), pa.int32()
    branch = pa.struct({"dH": pa.float64(), "probability": pa.float64(), "draw": pa.float64(), "why": text})
    tool = pa.struct({"name": text, "arguments": text, "status": text, "seconds": pa.float64(), "cached": pa.bool_()})
    routes = pa.struct({"layers": number, "top_k": number, "experts": pa.list_(pa.int16())})
    segment = pa.struct(
        {
            "role": text,
            "parent": number,
            "text": text,
            "token_ids": pa.list_(number),
            "logprobs": pa.list_(pa.float32()),
            "entropies": pa.list_(pa.float32()),
            "policy_version": number,
            "finish": text,
            "branch": branch,
            "tool": tool,
            "routes": routes,
        }
    )
    return pa.schema(
        {
            "step": number,
            "task_id": text,
            "prompt": text,
            "ground_truth": text,
            "source": text,
            "begun_in_step": number,
            "grow_seconds": pa.float64(),
            "leaves": pa.list_(number),
            "rewards": pa.list_(pa.float64()),
            "accuracies": pa.list_(pa.float64()),
            "format_ok": pa.list_(pa.bool_()),
            "terms": pa.list_(pa.struct({"name": text, "values": pa.list_(pa.float64())})),
            "forks": number,
            "unique_tokens": number,
            "flat_tokens": number,
            "dropped": text,
            "replayed": number,
            "segments": pa.list_(segment),
        }
    )


def _row(step: int, item: ScoredTree, decode: Decode) -> dict[str, Any]:
    tree, task = item.tree, item.task
    return {
        "step": step,
        "task_id": task.id,
        "prompt": task.prompt_text,
        "ground_truth": task.ground_truth,
        "source": task.source,
        "begun_in_step": tree.step,
        "grow_seconds": tree.seconds,
        "leaves": tree.leaves(),
        "rewards": item.rewards,
        "accuracies": item.accuracies,
        "format_ok": item.format_ok,
        "terms": [{"name": name, "values": values} for name, values in item.terms.items()],
        "forks": tree.forks,
        "unique_tokens": tree.unique_tokens,
        "flat_tokens": tree.flat_tokens,
        "dropped": item.dropped,
        "replayed": item.replayed,
        "segments": [_segment(segment, decode) for segment in tree.segments],
    }


def _segment(segment: Segment, decode: Decode) -> dict[str, Any]:
    branch, tool = segment.branch, segment.tool
    return {
        "role": segment.role.value,
        "parent": segment.parent,
        "text": decode(segment.token_ids.tolist()),
        "token_ids": segment.token_ids,
        "logprobs": segment.logprobs,
        "entropies": segment.entropies,
        "policy_version": segment.policy_version,
        "finish": segment.finish and segment.finish.value,
        "branch": branch and asdict(branch),
        "tool": tool and {**asdict(tool), "arguments": json.dumps(dict(tool.arguments))},
        "routes": stored_routes(segment.routes),
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
        fields = {name: value for name, value in stored.items() if value is not None and name != "text"}
        if "tool" in fields:
            fields["tool"] = fields["tool"] | {"arguments": json.loads(fields["tool"]["arguments"])}
        segments.append(fields)
    return RolloutTree.from_dict(
        {"task_id": row["task_id"], "step": row["begun_in_step"], "seconds": row["grow_seconds"], "segments": segments}
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
