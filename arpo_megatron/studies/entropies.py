"""Entropy after tool results compared with the other tokens, from stored trees (arXiv 2507.19849, section 2.2).

Trees store the exact entropy of every sampled token in nats. A turn starts after the prompt or after a tool result.
Branching looks at its first `algorithm.entropy_tokens` tokens; all its later tokens count as "elsewhere". A weight push
in the middle of a turn starts a new segment, but not a new turn.

Runs of the same seed start from the same cold start, so they are one observation: they are averaged first, and
intervals are over seeds.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.monitor.tree_store import read_trees, step_file, stored_steps
from arpo_megatron.studies.curves import Estimate
from arpo_megatron.studies.plot import Band, Panel, draw
from arpo_megatron.tree import Role, RolloutTree
from arpo_megatron.utils.text import markdown

if TYPE_CHECKING:
    import pandas as pd

PROMPT = "prompt"
"""Start of a turn without a preceding tool result; other turns are named after their tool."""
ELSEWHERE = "elsewhere"
"""Tokens after the first `algorithm.entropy_tokens` of any turn."""
_LATER = -1  # their position
_Run = tuple[int, str]  # seed and name


def collect(runs: Sequence[RunDirectory]) -> "pd.DataFrame":
    """Return the mean entropies of the trees that the runs have stored.

    Returns:
        one row per run, step, start of turn and position. A token that several trajectories share counts once. Columns:

        - run: the directory as given
        - seed: seed of the run's config
        - step
        - after: "prompt", a tool's name, or "elsewhere"
        - position: token of the turn, from 0; -1 for the tokens elsewhere
        - tokens: number of tokens
        - entropy: their mean in nats

    Raises:
        UserError: a run is given twice, or no run has stored trees.
    """
    import pandas as pd

    paths = [run.path.resolve() for run in runs]
    if repeated := [run.path for run, path in zip(runs, paths, strict=True) if paths.count(path) > 1]:
        raise UserError(f"the same run is given twice: {repeated[0]} and {repeated[1]}")
    rows = [row for run in runs for row in _run_rows(run)]
    if not rows:
        raise UserError(f"no tree with sampled tokens is stored in {', '.join(str(run.path) for run in runs)}")
    return pd.DataFrame(rows)


def _run_rows(run: RunDirectory) -> list[dict[str, Any]]:
    config = resolve.read(run.config)
    columns = {"run": str(run.path), "seed": config.seed}
    first = config.algorithm.entropy_tokens
    return [{**columns, **row} for step in stored_steps(run) for row in _step_rows(run, step, first)]


def _step_rows(run: RunDirectory, step: int, first: int) -> list[dict[str, Any]]:
    found: dict[tuple[str, int], list[float]] = {}
    for stored in read_trees(step_file(run, step)):
        for after, position, entropy in tree_entropies(stored.tree, first):
            found.setdefault((after, position), []).append(entropy)
    return [
        {"step": step, "after": after, "position": position, "tokens": len(own), "entropy": sum(own) / len(own)}
        for (after, position), own in sorted(found.items())
    ]


def tree_entropies(tree: RolloutTree, first: int) -> list[tuple[str, int, float]]:
    """Return (after, position, entropy) of every sampled token, with `first` tokens per turn not elsewhere."""
    found = []
    for segment in tree.segments:
        if segment.role is not Role.MODEL or segment.entropies is None:
            continue
        above, before = tree.segments[segment.parent], 0
        while above.role is Role.MODEL:  # the start of this turn, before a push
            before += len(above)
            above = tree.segments[above.parent]
        after = above.tool.name if above.tool is not None else PROMPT
        for position, entropy in enumerate(segment.entropies.tolist(), before):
            found.append((after, position, entropy) if position < first else (ELSEWHERE, _LATER, entropy))
    return found


def write_report(rows: "pd.DataFrame", directory: Path, made_by: str) -> list[Path]:
    """Write README.md, entropy.svg and entropy.parquet for the rows of `collect`, and return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    page, plot, parquet = (directory / name for name in ("README.md", "entropy.svg", "entropy.parquet"))
    rows.to_parquet(parquet, index=False)
    y = "mean entropy (nats)"
    by_position, by_step = bands(rows[rows.after != ELSEWHERE], "position"), bands(rows, "step")
    draw([Panel(by_position, "token of the turn", y), Panel(by_step, "training step", y)], plot)
    page.write_text(render(rows, made_by), encoding="utf-8")
    return [page, plot, parquet]


def render(rows: "pd.DataFrame", made_by: str) -> str:
    """Return the page of the entropy study in Markdown."""
    seeds = rows.seed.nunique()
    sample = _sample(seeds, len(rows[["seed", "run"]].drop_duplicates()))
    shown = "mean and 95 % interval over" if seeds > 1 else "mean of"
    sections = [
        "# entropy",
        "Entropy of the policy's next token, for the first `algorithm.entropy_tokens` tokens of turns after a tool "
        "result and after the prompt. All later tokens of turns are elsewhere.",
        _finding(rows),
        "Runs of one seed are one observation: they are averaged first. Intervals are Student's at 95 % over seeds.",
        f"![Mean entropy by token and by step, {shown} {sample}](entropy.svg)",
        f"Mean entropy in nats of the n-th token of a turn, over {sample} and all their steps:",
        _mean_table(rows),
        "Share of all tokens and of their summed entropy; then the share of the entropy after tool results that the "
        "n-th token after each tool holds:",
        _share_table(rows),
        f"{made_by} The Parquet file holds every mean.",
    ]
    return "\n\n".join(sections) + "\n"


def _sample(seeds: int, runs: int) -> str:
    return f"{seeds} seed{'' if seeds == 1 else 's'} ({runs} run{'' if runs == 1 else 's'})"


def _mean_table(rows: "pd.DataFrame") -> str:
    positions = _positions(rows)
    lines = []
    for name, band in bands(rows, "position").items():
        means = dict(zip(band.x.tolist(), band.mean.tolist(), strict=True))
        cells = [f"{means[p + 1]:.3f}" if p + 1 in means else "" for p in positions]
        lines.append([name, *cells, f"{_mean(_run_means(rows[rows.after == name])):.3f}"])
    return markdown(["after", *(str(p + 1) for p in positions), "all of these"], lines)


def _share_table(rows: "pd.DataFrame") -> str:
    positions = _positions(rows)
    sums = rows.assign(nats=rows.tokens * rows.entropy)
    after_tools = sums[_after_tool(sums)]
    shares = (after_tools.groupby(["after", "position"]).nats.sum() / after_tools.nats.sum()).to_dict()
    lines = []
    for name, group in sums.groupby("after"):
        cells = [f"{shares[name, p]:.1%}" if (name, p) in shares else "" for p in positions]
        totals = [f"{group[column].sum() / sums[column].sum():.1%}" for column in ("tokens", "nats")]
        lines.append([str(name), *totals, *cells])
    return markdown(["after", "of tokens", "of entropy", *(str(p + 1) for p in positions)], lines)


def _after_tool(rows: "pd.DataFrame") -> "pd.Series[bool]":
    return ~rows.after.isin([PROMPT, ELSEWHERE])


def _positions(rows: "pd.DataFrame") -> list[int]:
    return sorted(set(rows.position) - {_LATER})


def _finding(rows: "pd.DataFrame") -> str:
    tools = _run_means(rows[_after_tool(rows)])
    if not tools:
        return "No turn starts after a tool result: nothing to compare."
    findings = [f"The first tokens after a tool result have {_mean(tools):.3f} nats on average."]
    for start, title in {PROMPT: "First tokens after the prompt", ELSEWHERE: "Tokens elsewhere"}.items():
        others = _run_means(rows[rows.after == start])
        differences = {run: tools[run] - others[run] for run in tools if run in others}
        if not differences:
            findings.append(f"{title}: none in the same run, nothing to compare.")
            continue
        mean = _mean({run: others[run] for run in differences})
        gain = Estimate.over_seeds(_seed_means(differences))
        if gain.seeds < 2:
            findings.append(f"{title} have {mean:.3f}, a difference of {gain.value:+.3f} (one seed, no interval).")
        else:
            sample = _sample(gain.seeds, len(differences))
            ends = f"{gain.low:+.3f} to {gain.high:+.3f}"
            findings.append(f"{title} have {mean:.3f}; the difference is {gain.value:+.3f} ({ends}) over {sample}.")
    return " ".join(findings)


def _run_means(rows: "pd.DataFrame") -> dict[_Run, float]:
    """Return each run's mean over tokens."""
    return {
        (int(seed), run): float((group.entropy * group.tokens).sum() / group.tokens.sum())
        for (seed, run), group in rows.groupby(["seed", "run"])
    }


def _seed_means(values: Mapping[_Run, float]) -> list[float]:
    """Return the mean over the runs of each seed."""
    seeds = sorted({seed for seed, _ in values})
    return [float(np.mean([value for (seed, _), value in values.items() if seed == own])) for own in seeds]


def _mean(values: Mapping[_Run, float]) -> float:
    return float(np.mean(_seed_means(values)))


def bands(rows: "pd.DataFrame", axis: str) -> dict[str, Band]:
    """Return a line for each start of turn: the mean over seeds along a column, with positions counted from 1."""
    found = {}
    for after, group in rows.groupby("after"):
        means = [Estimate.over_seeds(_seed_means(_run_means(same))) for _, same in group.groupby(axis)]
        x = np.unique(group[axis]).astype(np.float64) + (axis == "position")
        found[str(after)] = Band.of(x, means)
    return found
