"""Entropy after tool results against elsewhere, from stored trees: the paper's first observation.

It is that of arXiv 2507.19849, section 2.2.

Trees hold the entropy of every sampled token, exact, in nats. A turn begins behind the prompt or behind a tool's
result; its first `algorithm.entropy_tokens` tokens are where branching looks, and all later tokens of turns are
elsewhere. A turn that weights were pushed into goes on in a segment of its own, whose tokens are counted on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from arpo_megatron import resolve
from arpo_megatron.errors import UserError
from arpo_megatron.run_directory import RunDirectory
from arpo_megatron.study.picture import Band, Panel, draw
from arpo_megatron.study.statistics import Paired, interval
from arpo_megatron.tree import Role, RolloutTree
from arpo_megatron.tree_files import read_trees, step_file, stored_steps

if TYPE_CHECKING:
    import pandas as pd

START = "prompt"
"""Where a turn begins that no tool result precedes; the others are named after their tool."""
ELSEWHERE = "elsewhere"
"""Behind the first tokens of any turn."""
_LATER = -1  # the position of all of those


@dataclass(slots=True)
class _Sum:
    """Entropies of one place and position."""

    count: int = 0
    total: float = 0.0


def collect(runs: Sequence[RunDirectory]) -> "pd.DataFrame":
    """Mean entropies of the trees of runs.

    Returns:
        columns run, step, behind ("prompt", a tool's name, or "elsewhere"), position (from 0, in the turn, less than
        the run's `algorithm.entropy_tokens`; -1: all later ones, elsewhere), tokens, entropy (mean, nats). A token that
        several trajectories share counts once.

    Raises:
        UserError: no run has stored trees.
    """
    import pandas as pd

    rows = [row for run in runs for row in _rows(run)]
    if not rows:
        raise UserError(f"no tree with sampled tokens is stored in {', '.join(str(run.path) for run in runs)}")
    return pd.DataFrame(rows)


def _rows(run: RunDirectory) -> list[dict[str, Any]]:
    first = resolve.load(run.config).algorithm.entropy_tokens
    return [row for step in stored_steps(run) for row in _of_step(run, step, first)]


def _of_step(run: RunDirectory, step: int, first: int) -> list[dict[str, Any]]:
    sums: dict[tuple[str, int], _Sum] = {}
    for stored in read_trees(step_file(run, step)):
        for behind, position, entropy in _measured(stored.tree, first):
            found = sums.setdefault((behind, position), _Sum())
            found.count += 1
            found.total += entropy
    return [
        {
            "run": run.path.name, "step": step, "behind": behind, "position": position, "tokens": found.count,
            "entropy": found.total / found.count,
        }
        for (behind, position), found in sorted(sums.items())
    ]  # fmt: skip


def _measured(tree: RolloutTree, first: int) -> list[tuple[str, int, float]]:
    """(behind, position, entropy) of every sampled token; `first` tokens of a turn belong to where it begins."""
    found = []
    for segment in tree.segments:
        if segment.role is not Role.MODEL or segment.entropies is None:
            continue
        above, before = tree.segments[segment.parent], 0
        while above.role is Role.MODEL:  # the beginning of this turn, before a push
            before += len(above)
            above = tree.segments[above.parent]
        behind = above.tool.name if above.tool is not None else START
        for position, entropy in enumerate(segment.entropies.tolist(), before):
            found.append((behind, position, entropy) if position < first else (ELSEWHERE, _LATER, entropy))
    return found


def write_report(rows: "pd.DataFrame", directory: Path, made_by: str) -> list[Path]:
    """Write entropy.parquet, entropy.svg and README.md for what `collect` found. Returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    parquet, picture, page = (directory / name for name in ("entropy.parquet", "entropy.svg", "README.md"))
    rows.to_parquet(parquet, index=False)
    y = "mean entropy (nats)"
    by_position, by_step = _bands(rows[rows.behind != ELSEWHERE], "position"), _bands(rows, "step")
    draw([Panel(by_position, "token of the turn", y), Panel(by_step, "training step", y)], picture)
    page.write_text(render(rows, made_by), encoding="utf-8")
    return [page, picture, parquet]


def render(rows: "pd.DataFrame", made_by: str) -> str:
    """The page in Markdown."""
    runs = rows.run.nunique()
    table = _bands(rows, "position")
    positions = sorted(set(rows.position) - {_LATER})
    lines = [
        ["behind", *(str(position + 1) for position in positions), "all of these"],
        ["---"] * (len(positions) + 2),
    ]
    for name, band in table.items():
        means = dict(zip(band.x.tolist(), band.mean.tolist(), strict=True))
        over_all = np.mean(list(_means(rows[rows.behind == name]).values()))
        lines.append([name, *(f"{means[p + 1]:.3f}" if p + 1 in means else "" for p in positions), f"{over_all:.3f}"])
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    parts = [
        "# entropy",
        "Entropy of the policy's next token: of the first `algorithm.entropy_tokens` tokens of turns behind a tool's "
        "result and behind the prompt, and elsewhere, which is all later tokens of turns.",
        _finding(rows),
        f"![Mean entropy by token and by step, mean and 95 % interval over {runs} runs](entropy.svg)",
        f"Mean entropy in nats of the n-th token of a turn, over {runs} runs and all their steps:",
        text,
        made_by,
    ]
    return "\n\n".join(parts) + "\n"


def _finding(rows: "pd.DataFrame") -> str:
    tools = ~rows.behind.isin([START, ELSEWHERE])
    after = _means(rows[tools])
    if not after:
        return "No turn begins behind a tool's result: nothing to compare."
    said = [f"The first tokens behind a tool's result have {np.mean(list(after.values())):.3f} nats on average."]
    places = {START: "first tokens behind the prompt", ELSEWHERE: "tokens elsewhere"}
    for place, words in places.items():
        other = _means(rows[rows.behind == place])
        if both := [run for run in after if run in other]:
            gain = Paired.of([after[run] for run in both], [other[run] for run in both])
            said.append(_compared(words, float(np.mean([other[run] for run in both])), gain))
        else:
            said.append(f"There are no {words} in the same run: nothing to compare with.")
    return " ".join(said)


def _compared(words: str, mean: float, gain: Paired) -> str:
    text = f"{words[0].upper()}{words[1:]} have {mean:.3f}"
    if np.isnan(gain.p):
        return f"{text}, a difference of {gain.difference:+.3f} (one run)."
    return (
        f"{text}; the difference is {gain.difference:+.3f} ({gain.low:+.3f} to {gain.high:+.3f}) over {gain.seeds} "
        "runs."
    )


def _means(rows: "pd.DataFrame") -> dict[str, float]:
    """Mean over tokens of each run."""
    return {run: float((group.entropy * group.tokens).sum() / group.tokens.sum()) for run, group in rows.groupby("run")}


def _bands(rows: "pd.DataFrame", axis: str) -> dict[str, Band]:
    """A line for each place: the mean over runs at every value of the axis, positions counted from 1."""
    bands = {}
    for behind, group in rows.groupby("behind"):
        x, columns = [], []
        for value, part in group.groupby(axis):
            per_run = list(_means(part).values())
            x.append(float(value) + (axis == "position"))
            columns.append((float(np.mean(per_run)), *interval(per_run)))
        mean, low, high = np.array(columns).T
        bands[str(behind)] = Band(np.array(x), mean, low, high)
    return bands
