"""The report of a study: Markdown with table and findings, Parquet with every evaluation, and the picture.

All sentences are made from the figures, whatever these say.
"""

import datetime
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil

from arpo_megatron.errors import UserError
from arpo_megatron.studies.designs import BASE_ARM, Design
from arpo_megatron.studies.picture import Band, Panel, draw
from arpo_megatron.studies.statistics import (
    ArmFigures,
    Curve,
    Mean,
    Paired,
    budget_of,
    calls_to_reach,
    compare,
    improved,
    interval,
    mean_curve,
    share_of_calls,
)
from arpo_megatron.studies.table import ALL

if TYPE_CHECKING:
    import pandas as pd

FIGURES = ("reward", "success")
_POINTS = 40  # of a drawn curve


@dataclass(frozen=True, slots=True)
class StudyResults:
    """What a study has measured, ready to be said.

    Attributes:
        design: which study.
        rows: from `table.collect`, of all seeds.
        seeds: those for which every arm's run is finished; the others are left out.
        command: that made it.
        left_out: the other seeds of the study.
    """

    design: Design
    rows: "pd.DataFrame"
    seeds: Sequence[int]
    command: str
    left_out: Sequence[int]

    @classmethod
    def of(cls, design: Design, rows: "pd.DataFrame", command: str, planned: Sequence[int]) -> "StudyResults":
        """Of a study with the seeds `planned`. Raises UserError where none of them has all its runs."""
        seeds = [
            int(seed)
            for seed, group in rows[rows.level == ALL].groupby("seed")
            if set(group.arm) == set(design.arms)
        ]  # fmt: skip
        if not seeds:
            raise UserError("no seed has a finished run of every arm yet: nothing can be compared")
        return cls(design, rows, seeds, command, [seed for seed in planned if seed not in seeds])

    @property
    def compared_rows(self) -> "pd.DataFrame":
        """The rows of `seeds`, which all that is said is about."""
        return self.rows[self.rows.seed.isin(self.seeds)]

    def curves(self, figure: str, level: str = ALL) -> dict[str, list[Curve]]:
        """A curve a seed for each arm.

        At step 0 all arms of a seed have the same weights, so each begins with the mean of what was measured there.
        """
        rows = self.compared_rows
        wanted = rows[rows.level == level].copy()
        start = wanted.step == 0
        wanted.loc[start, figure] = wanted[start].groupby("seed")[figure].transform("mean")
        found: dict[str, list[Curve]] = {}
        for arm in self.design.arms:
            own = wanted[wanted.arm == arm].dropna(subset=[figure]).sort_values("step")
            found[arm] = [
                Curve(group.tool_calls_executed.to_numpy(np.float64), group[figure].to_numpy(np.float64))
                for _, group in own.groupby("seed")
            ]
        return found

    def compared(self, figure: str) -> list[ArmFigures]:
        """Every arm against the control in one figure, at equal calls."""
        curves = self.curves(figure)
        return compare(curves, self.design.control, budget_of(curves), self.steps())

    def steps(self) -> dict[str, int]:
        """Training steps of each arm's runs."""
        return {arm: int(group.step.max()) for arm, group in self.compared_rows.groupby("arm")}


def write_report(found: StudyResults, directory: Path) -> list[Path]:
    """Write results.parquet, curves.svg and README.md. Returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    parquet, picture, page = (directory / name for name in ("results.parquet", "curves.svg", "README.md"))
    found.rows.to_parquet(parquet, index=False)
    panels = [
        Panel(
            {arm: _band(curves) for arm, curves in found.curves(figure).items()},
            "executed tool calls in training",
            f"held-out {figure}",
        )
        for figure in FIGURES
    ]
    draw(panels, picture)
    page.write_text(render(found), encoding="utf-8")
    return [page, picture, parquet]


def render(found: StudyResults) -> str:
    """The page in Markdown."""
    design, rewards = found.design, found.compared("reward")
    budget = budget_of(found.curves("reward"))
    seeds = f"{len(found.seeds)} seed{'s' if len(found.seeds) > 1 else ''}"
    parts = [
        f"# {design.name}",
        design.about,
        *_findings(found, rewards),
        f"![Held-out reward and success over executed tool calls, mean and 95 % interval over {seeds}](curves.svg)",
        f"At {budget:,.0f} executed calls, which every run has made; mean over {seeds} with Student's 95 % interval. "
        f'"Gain" is the mean difference from {design.control} in the same seed, with its own, and the '
        "p of a paired t-test, not corrected for the number of arms.",
        _table(rewards),
        "Success at the same calls, and by level at the end of each run:",
        _success_table(found),
        f"{_trouble(found)} {made_by(found.command)}{_left_out(found)}",
    ]
    return "\n\n".join(parts) + "\n"


def _table(figures: Sequence[ArmFigures]) -> str:
    head = ["arm", "calls a step", "reward", "gain", "p", "mean reward up to there", "gain", "p"]
    rows = [
        [
            item.arm, f"{item.calls_a_step:.1f}",
            _mean(item.final), *_gain(item.final_gain), _mean(item.area), *_gain(item.area_gain),
        ]
        for item in figures
    ]  # fmt: skip
    return markdown(head, rows)


def _success_table(found: StudyResults) -> str:
    levels = sorted(set(found.compared_rows.level) - {ALL})
    ends = {
        level: {arm: Mean.of([float(curve.values[-1]) for curve in curves]) for arm, curves in by_arm.items()}
        for level, by_arm in ((level, found.curves("success", level)) for level in levels)
    }
    rows = [
        [item.arm, _mean(item.final), *_gain(item.final_gain), *(_mean(ends[level][item.arm]) for level in levels)]
        for item in found.compared("success")
    ]
    return markdown(["arm", "success", "gain", "p", *levels], rows)


def _findings(found: StudyResults, rewards: Sequence[ArmFigures]) -> list[str]:
    """Paragraphs: where all begin, each arm against the control at equal calls, how many calls to the control's end."""
    design = found.design
    curves = {arm: mean_curve(group) for arm, group in found.curves("reward").items()}
    start = float(np.mean([curve.values[0] for curve in curves.values()]))
    budget = budget_of(found.curves("reward"))
    said = [f"All arms of a seed begin with the same cold start, whose mean held-out reward is {start:.3f}."]
    compared = [_compared(item, gain) for item in rewards if (gain := item.final_gain) is not None]
    if compared:
        said.append(f"After {budget:,.0f} calls, compared with {design.control}:")
        said.append("\n".join(f"- {line}" for line in compared))
    said += [_pair(found, one, other) for one, other in design.pairs if one in curves and other in curves]
    if BASE_ARM in curves and design.control in curves and design.control != BASE_ARM:
        said.append(_claim(curves, found.curves("reward"), BASE_ARM, design.control))
    return said


def _compared(item: ArmFigures, gain: Paired) -> str:
    return f"{item.arm} is at {item.final.value:.3f}, {_told(gain)}"


def _told(gain: Paired) -> str:
    """A difference, its interval, and whether that leaves 0 out."""
    sentence = _signed(gain.difference)
    if np.isnan(gain.p):
        return f"{sentence} (one seed: nothing can be said about chance)"
    told = gain.low > 0 or gain.high < 0
    return f"{sentence} ({_ends(gain.low, gain.high)}: {'' if told else 'not '}told from 0 by {gain.seeds} seeds)"


def _pair(found: StudyResults, one: str, other: str) -> str:
    """Two arms against each other, at the calls at which all are compared."""
    by_arm = found.curves("reward")
    pair = {arm: by_arm[arm] for arm in (one, other)}
    gain = next(item for item in compare(pair, other, budget_of(by_arm), found.steps()) if item.arm == one)
    if gain.final_gain is None or gain.area_gain is None:
        raise ValueError(f"{one} is compared with itself")
    return (
        f"{one} less {other}, in the same way: {_told(gain.final_gain)}; of the mean reward up to there "
        f"{_told(gain.area_gain)}."
    )


def _claim(mean: Mapping[str, Curve], curves: Mapping[str, Sequence[Curve]], arm: str, control: str) -> str:
    """The paper's claim as far as this study tests it: the calls for the reward that the control ends with."""
    start, goal, spent = (float(x) for x in (*mean[control].values[[0, -1]], mean[control].calls[-1]))
    needed = calls_to_reach(mean[arm], goal)
    begin = f"{control} ends at {goal:.3f} after {spent:,.0f} calls"
    if not improved(mean[control]):
        end = f"{begin}, no better than its start ({start:.3f}): there is no gain that {arm} could reach with fewer."
    elif needed is None:
        most = float(mean[arm].values.max())
        end = f"{begin}. {arm} does not reach that within its {mean[arm].calls[-1]:,.0f} calls ({most:.3f} at most)."
    else:
        end = (
            f"{begin}. {arm} reaches that after {needed:,.0f} calls, {needed / spent:.0%} of {control}'s: there the "
            f"two means cross, which has no interval. {_at_the_ends(mean, curves, arm, control)}"
        )
    return (
        f"The claim of the paper is better reward for half the tool budget. Here {end} "
        f"{_by_seeds(curves[arm], curves[control], arm, control)}"
    )


def _at_the_ends(mean: Mapping[str, Curve], curves: Mapping[str, Sequence[Curve]], arm: str, control: str) -> str:
    """How much there is between where the two mean curves end, which says how firm a crossing is."""
    last = {name: float(mean[name].calls[-1]) for name in (arm, control)}
    gain = Paired.of(*([float(curve.at(last[name])) for curve in curves[name]] for name in (arm, control)))
    return (
        f"At the last of its {last[arm]:,.0f} calls {arm} is at {mean[arm].values[-1]:.3f}, {_told(gain)} against the "
        f"end of {control}."
    )


def _by_seeds(arms: Sequence[Curve], controls: Sequence[Curve], arm: str, control: str) -> str:
    """The same seed by seed."""
    pairs = [(own, other) for own, other in zip(arms, controls, strict=True) if improved(other)]
    shares = [share for own, other in pairs if (share := share_of_calls(own, other)) is not None]
    text = (
        f"By single seeds {control} improves in {len(pairs)} of {len(controls)}, and in {len(shares)} of these {arm} "
        "reaches its end"
    )
    if not shares:
        return f"{text}."
    low, high = interval(np.log(shares).tolist())
    said = f"{text}, with {math.exp(float(np.mean(np.log(shares)))):.0%} of its calls in the geometric mean"
    if len(shares) < 2:
        return f"{said} (one seed: nothing can be said about chance)."
    return f"{said} ({math.exp(low):.0%} to {math.exp(high):.0%}); seeds that do not reach it are not in that mean."


def _band(curves: Sequence[Curve]) -> Band:
    mean = mean_curve(curves, _POINTS)
    ends = [interval([float(curve.at(calls)) for curve in curves]) for calls in mean.calls]
    low, high = np.array(ends).T
    return Band(mean.calls, mean.values, low, high)


def made_by(command: str) -> str:
    """Command, date and machine, for the end of a page."""
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return f"Made by `{command}` on {today}; {hardware()}. The Parquet file holds every figure."


def _trouble(found: StudyResults) -> str:
    """What may have made policies look worse than they are."""
    whole = found.compared_rows
    whole = whole[whole.level == ALL]
    tasks, calls = int(whole.tasks.sum()), int(whole.evaluation_calls.sum())
    unfinished, failed = int(whole.unfinished.sum()), int(whole.calls_failed.sum())
    text = f"Of {tasks:,} held-out trajectories {unfinished:,} could not be finished (they are left out); of their "
    return f'{text}{calls:,} tool calls {failed:,} were not answered "ok".'


def _left_out(found: StudyResults) -> str:
    return f" Seeds without a finished run of every arm are left out: {found.left_out}." if found.left_out else ""


def hardware() -> str:
    """This machine in words: processor, cores, memory."""
    names = [line.partition(":")[2].strip() for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name")]
    processor = names[0] if names else platform.processor()
    gigabytes = psutil.virtual_memory().total / 1e9
    return f"{psutil.cpu_count()} cores of {processor}, {gigabytes:.0f} GB"


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _mean(mean: Mean) -> str:
    if mean.low == mean.high:  # one seed, or all alike
        return f"{mean.value:.3f}"
    return f"{mean.value:.3f} ({mean.low:.3f} to {mean.high:.3f})"


def _gain(gain: Paired | None) -> tuple[str, str]:
    if gain is None:
        return "", ""
    if np.isnan(gain.p):
        return _signed(gain.difference), "-"
    return f"{_signed(gain.difference)} ({_ends(gain.low, gain.high)})", f"{gain.p:.3f}"


def _ends(low: float, high: float) -> str:
    return f"{_signed(low)} to {_signed(high)}"


def _signed(value: float) -> str:
    return f"{value:+.3f}"
