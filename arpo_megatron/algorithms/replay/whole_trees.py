"""Helpers of buffers that store trees: what of a tree is stored, and its bytes in a checkpoint."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import msgspec
import numpy as np

from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.tasks.base import Task
from arpo_megatron.tree import RolloutTree


def storable_tree(item: ScoredTree, rows: Sequence[int] | None = None) -> ScoredTree:
    """Return the tree as it is replayed, or only its trajectories of these rows (ascending).

    Expert routes are left out because newer weights choose others; so are the terms of rewards.
    """
    tree = item.tree
    leaves = tree.leaves()
    chosen = np.arange(len(leaves)) if rows is None else np.asarray(rows, dtype=int)
    held = sorted({index for row in chosen for index in tree.path(leaves[row])} - {0})
    kept = RolloutTree(tree.task_id, tree.prompt_ids, step=tree.step, seconds=tree.seconds)
    places = {0: 0}
    for index in held:
        segment = tree.segments[index]
        places[index] = kept.append(places[segment.parent], replace(segment, routes=None))
    return ScoredTree(
        item.task, kept, item.rewards[chosen], item.accuracies[chosen], item.format_ok[chosen], replayed=len(chosen)
    )


def encode_trees(items: Iterable[ScoredTree]) -> bytes:
    """Encode stored trees, in the lossless form of trees."""
    return msgspec.msgpack.encode(
        [
            {
                "task": asdict(item.task),
                "tree": item.tree.to_dict(),
                "rewards": item.rewards.tolist(),
                "accuracies": item.accuracies.tolist(),
                "format_ok": item.format_ok.tolist(),
            }
            for item in items
        ]
    )


def decode_trees(state: bytes) -> list[ScoredTree]:
    """Return the trees that `encode_trees` encoded, with every trajectory counted as replayed."""
    rows: list[dict[str, Any]] = msgspec.msgpack.decode(state)
    return [
        ScoredTree(
            _task(row["task"]),
            RolloutTree.from_dict(row["tree"]),
            np.array(row["rewards"], float),
            np.array(row["accuracies"], float),
            np.array(row["format_ok"], bool),
            replayed=len(row["rewards"]),
        )
        for row in rows
    ]


def _task(row: Mapping[str, Any]) -> Task:
    return Task(**{**row, "messages": tuple(row["messages"])})


def replay_metrics(kept: Iterable[ScoredTree], ages: Sequence[int]) -> dict[str, float]:
    """Return `replay/...`: the number of trees trained again (one age each), of stored trajectories, and those ages."""
    return {
        "replay/trees": len(ages),
        "replay/stored": sum(len(item.rewards) for item in kept),
        **({"replay/age": float(np.mean(ages)), "replay/age_max": max(ages)} if ages else {}),
    }
