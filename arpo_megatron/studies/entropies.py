"""Entropy after tool results against elsewhere, from stored trees: the paper's first observation.

It is that of arXiv 2507.19849, section 2.2.

Trees hold the entropy of every sampled token, exact, in nats. A turn begins behind the prompt or behind a tool's
result; its first `algorithm.entropy_tokens` tokens are where branching looks, and all later tokens of turns are
elsewhere. A turn that weights were pushed into goes on in a segment of its own, whose tokens are counted on.

Runs of one seed are one observation, as in the other studies: they begin with the same cold start. They are averaged
first, and intervals are over seeds.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.monitor.tree_store import read_trees, step_file, stored_steps
from arpo_megatron.studies.picture import Band, Panel, draw
from arpo_megatron.studies.report import markdown
from arpo_megatron.studies.statistics import Mean, interval
from arpo_megatron.tree import Role, RolloutTree

if TYPE_CHECKING:
    import pandas as pd

START = "prompt"
"""Where a turn begins that no tool result precedes; the others are named after their tool."""
ELSEWHERE = "elsewhere"
"""Behind the first tokens of any turn."""
_LATER = -1  # the position of all of those
_FEW = 4  # runs that a command names although a glob would
_Run = tuple[int, str]  # its seed and name


@dataclass(slots=True)
class _Sum:
    """Entropies of one place and position."""

    count: int = 0
    total: float = 0.0


def collect(runs: Sequence[RunDirectory]) -> "pd.DataFrame":
    """Mean entropies of the trees of runs.

    Returns:
        columns run (its directory's name, with as many above it as tell the runs apart), seed (of the run's config),
        step, behind ("prompt", a tool's name, or "elsewhere"), position (from 0, in the turn, less than the run's
        `algorithm.entropy_tokens`; -1: all later ones, elsewhere), tokens, entropy (mean, nats). A token that several
        trajectories share counts once.

    Raises:
        UserError: a run is given twice, or none has stored trees.
    """
    import pandas as pd

    paths = [run.path.resolve() for run in runs]
    for number, path in enumerate(paths):
        if path in paths[:number]:
            raise UserError(f"{runs[number].path} is given twice: it is the run {runs[paths.index(path)].path}")
    rows = [row for run, name in zip(runs, _ends(paths, 1), strict=True) for row in _rows(run, name)]
    if not rows:
        raise UserError(f"no tree with sampled tokens is stored in {', '.join(str(run.path) for run in runs)}")
    return pd.DataFrame(rows)


def _ends(paths: Sequence[Path], least: int) -> list[str]:
    """The last names of different paths: `least` of each, or as many more as tell them apart."""
    ends, longest = [str(path) for path in paths], max(len(path.parts) for path in paths)
    for count in range(longest, least - 1, -1):
        shorter = [str(Path(*path.parts[-count:])) for path in paths]
        if len(set(shorter)) < len(paths):
            break
        ends = shorter
    return ends


def command(runs: Sequence[Path], out: Path) -> str:
    """The command for these directories, to be run where this one was.

    Many runs that are all there is in their directory are told as a glob. Of an absolute path outside the working
    directory the last names are told: what is above them says nothing on another machine.
    """
    above = runs[0].parent
    if len(runs) > _FEW and {path for path in above.iterdir() if not path.name.startswith(".")} == set(runs):
        folder = _told([above / "*"])[0].rpartition("/")[0]
        words = [f"{shlex.quote(folder)}/*" if folder else "*"]
    else:
        words = [shlex.quote(word) for word in _told(runs)]
    return " ".join(["arpo study entropy", *words, "--out", shlex.quote(_told([out])[0])])


def _told(paths: Sequence[Path]) -> list[str]:
    here = Path.cwd()
    near = [path.relative_to(here) if path.is_relative_to(here) else path for path in paths]
    far = [path for path in near if path.is_absolute()]
    ends = dict(zip(far, _ends(far, 3), strict=True)) if far else {}
    return [ends.get(path, str(path)) for path in near]


def _rows(run: RunDirectory, name: str) -> list[dict[str, Any]]:
    config = resolve.load(run.config)
    first = config.algorithm.entropy_tokens
    return [
        {"run": name, "seed": config.seed, **row} for step in stored_steps(run) for row in _of_step(run, step, first)
    ]


def _of_step(run: RunDirectory, step: int, first: int) -> list[dict[str, Any]]:
    sums: dict[tuple[str, int], _Sum] = {}
    for stored in read_trees(step_file(run, step)):
        for behind, position, entropy in _measured(stored.tree, first):
            found = sums.setdefault((behind, position), _Sum())
            found.count += 1
            found.total += entropy
    return [
        {
            "step": step, "behind": behind, "position": position, "tokens": found.count,
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
    seeds = rows.seed.nunique()
    over = _over(seeds, len(rows[["seed", "run"]].drop_duplicates()))
    shown = "mean and 95 % interval over" if seeds > 1 else "mean of"
    parts = [
        "# entropy",
        "Entropy of the policy's next token: of the first `algorithm.entropy_tokens` tokens of turns behind a tool's "
        "result and behind the prompt, and elsewhere, which is all later tokens of turns.",
        _finding(rows),
        "Runs of one seed are one observation: they are averaged first. Intervals are Student's at 95 % over seeds.",
        f"![Mean entropy by token and by step, {shown} {over}](entropy.svg)",
        f"Mean entropy in nats of the n-th token of a turn, over {over} and all their steps:",
        _mean_table(rows),
        "Where the entropy is: each place's share of all tokens and of their entropy, summed over tokens; and of the "
        "entropy behind tool results, the share that the n-th token holds behind each tool:",
        _share_table(rows),
        made_by,
    ]
    return "\n\n".join(parts) + "\n"


def _over(seeds: int, runs: int) -> str:
    """What a mean is over, in words."""
    return f"{seeds} seed{'' if seeds == 1 else 's'} ({runs} run{'' if runs == 1 else 's'})"


def _mean_table(rows: "pd.DataFrame") -> str:
    positions = _positions(rows)
    lines = []
    for name, band in _bands(rows, "position").items():
        means = dict(zip(band.x.tolist(), band.mean.tolist(), strict=True))
        cells = [f"{means[p + 1]:.3f}" if p + 1 in means else "" for p in positions]
        lines.append([name, *cells, f"{_mean(_means(rows[rows.behind == name])):.3f}"])
    return markdown(["behind", *(str(p + 1) for p in positions), "all of these"], lines)


def _share_table(rows: "pd.DataFrame") -> str:
    positions = _positions(rows)
    sums = rows.assign(nats=rows.tokens * rows.entropy)
    behind_tools = sums[_behind_tool(sums)]
    at = (behind_tools.groupby(["behind", "position"]).nats.sum() / behind_tools.nats.sum()).to_dict()
    lines = []
    for name, group in sums.groupby("behind"):
        cells = [f"{at[name, p]:.1%}" if (name, p) in at else "" for p in positions]
        shares = [f"{group[what].sum() / sums[what].sum():.1%}" for what in ("tokens", "nats")]
        lines.append([str(name), *shares, *cells])
    return markdown(["behind", "of tokens", "of entropy", *(str(p + 1) for p in positions)], lines)


def _behind_tool(rows: "pd.DataFrame") -> "pd.Series[bool]":
    return ~rows.behind.isin([START, ELSEWHERE])


def _positions(rows: "pd.DataFrame") -> list[int]:
    return sorted(set(rows.position) - {_LATER})


def _finding(rows: "pd.DataFrame") -> str:
    after = _means(rows[_behind_tool(rows)])
    if not after:
        return "No turn begins behind a tool's result: nothing to compare."
    said = [f"The first tokens behind a tool's result have {_mean(after):.3f} nats on average."]
    places = {START: "first tokens behind the prompt", ELSEWHERE: "tokens elsewhere"}
    for place, words in places.items():
        other = _means(rows[rows.behind == place])
        if both := {run: (after[run] - other[run]) for run in after if run in other}:
            said.append(_compared(words, _mean({run: other[run] for run in both}), both))
        else:
            said.append(f"There are no {words} in the same run: nothing to compare with.")
    return " ".join(said)


def _compared(words: str, mean: float, differences: Mapping[_Run, float]) -> str:
    text = f"{words[0].upper()}{words[1:]} have {mean:.3f}"
    by_seed = _by_seed(differences)
    gain = Mean.of(by_seed)
    if len(by_seed) < 2:
        return f"{text}, a difference of {gain.value:+.3f} (one seed: nothing can be said about chance)."
    over = _over(len(by_seed), len(differences))
    return f"{text}; the difference is {gain.value:+.3f} ({gain.low:+.3f} to {gain.high:+.3f}) over {over}."


def _means(rows: "pd.DataFrame") -> dict[_Run, float]:
    """Mean over tokens of each run."""
    return {
        (int(seed), run): float((group.entropy * group.tokens).sum() / group.tokens.sum())
        for (seed, run), group in rows.groupby(["seed", "run"])
    }


def _by_seed(values: Mapping[_Run, float]) -> list[float]:
    """The mean over the runs of each seed."""
    seeds = sorted({seed for seed, _ in values})
    return [float(np.mean([value for (seed, _), value in values.items() if seed == own])) for own in seeds]


def _mean(values: Mapping[_Run, float]) -> float:
    return float(np.mean(_by_seed(values)))


def _bands(rows: "pd.DataFrame", axis: str) -> dict[str, Band]:
    """A line for each place: the mean over seeds at every value of the axis, positions counted from 1."""
    bands = {}
    for behind, group in rows.groupby("behind"):
        x, columns = [], []
        for value, part in group.groupby(axis):
            per_seed = _by_seed(_means(part))
            x.append(float(value) + (axis == "position"))
            columns.append((float(np.mean(per_seed)), *interval(per_seed)))
        mean, low, high = np.array(columns).T
        bands[str(behind)] = Band(np.array(x), mean, low, high)
    return bands
