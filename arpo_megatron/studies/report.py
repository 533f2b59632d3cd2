"""Report of a study: a Markdown page with table and findings, all evaluations as Parquet, and the plot.

Every sentence of the page is computed from the results.
"""

import datetime
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil

from arpo_megatron.errors import UserError
from arpo_megatron.studies.curves import Curve, Estimate, common_budget, compare_at, mean_curve
from arpo_megatron.studies.designs import BASE_ARM, Design
from arpo_megatron.studies.plot import Band, Panel, draw
from arpo_megatron.studies.results import ALL
from arpo_megatron.utils.text import markdown

if TYPE_CHECKING:
    import pandas as pd

METRICS = ("reward", "success")
_POINTS = 40  # of a plotted curve


@dataclass(frozen=True, slots=True)
class StudyResults:
    """Evaluations of a study, for the seeds that every arm has finished."""

    design: Design
    rows: "pd.DataFrame"
    """Rows of `results.collect`, all seeds."""
    seeds: Sequence[int]
    """Seeds that are compared: every arm's run is finished."""
    command: str
    left_out: Sequence[int]
    """Seeds of the study that are not compared."""

    @classmethod
    def select(cls, design: Design, rows: "pd.DataFrame", command: str, planned: Sequence[int]) -> "StudyResults":
        """Select the seeds of `planned` with a finished run of every arm.

        Raises:
            UserError: there is no such seed.
        """
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
        """Rows of the seeds that are compared."""
        return self.rows[self.rows.seed.isin(self.seeds)]

    def curves(self, metric: str, level: str = ALL) -> dict[str, list[Curve]]:
        """Return each arm's curves, one per seed.

        At step 0 all arms of a seed have the same weights, so their curves start from the mean of what they measured.
        """
        rows = self.compared_rows
        rows = rows[rows.level == level].copy()
        start = rows.step == 0
        rows.loc[start, metric] = rows[start].groupby("seed")[metric].transform("mean")
        found: dict[str, list[Curve]] = {}
        for arm in self.design.arms:
            own = rows[rows.arm == arm].dropna(subset=[metric]).sort_values("step")
            found[arm] = [
                Curve(group.tool_calls_executed.to_numpy(np.float64), group[metric].to_numpy(np.float64))
                for _, group in own.groupby("seed")
            ]
        return found

    def calls_per_step(self) -> dict[str, float]:
        """Return the mean executed calls of a training step, by arm."""
        whole = self.compared_rows
        whole = whole[whole.level == ALL]
        last = whole.loc[whole.groupby(["arm", "seed"]).step.idxmax()]
        return {str(arm): float((g.tool_calls_executed / g.step).mean()) for arm, g in last.groupby("arm")}


def write_report(results: StudyResults, directory: Path) -> list[Path]:
    """Write README.md, curves.svg and results.parquet, and return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    page, plot, parquet = (directory / name for name in ("README.md", "curves.svg", "results.parquet"))
    results.rows.to_parquet(parquet, index=False)
    panels = [
        Panel(
            {arm: _band(curves) for arm, curves in results.curves(metric).items()},
            "executed tool calls in training",
            f"held-out {metric}",
        )
        for metric in METRICS
    ]
    draw(panels, plot)
    page.write_text(render(results), encoding="utf-8")
    return [page, plot, parquet]


def render(results: StudyResults) -> str:
    """Return the page of a study in Markdown: findings, curves and tables."""
    design, budget = results.design, common_budget(results.curves("reward"))
    seeds = f"{len(results.seeds)} seed{'s' if len(results.seeds) > 1 else ''}"
    sections = [
        f"# {design.name}",
        design.about,
        *_findings(results, budget),
        f"![Held-out reward and success over executed tool calls, mean and 95 % interval over {seeds}](curves.svg)",
        f"At {budget:,.0f} executed calls, which every run has made; mean over {seeds} with Student's 95 % interval. "
        f'"Gain" is the mean difference from {design.control} in the same seed with its interval, and p is that of a '
        "paired t-test, not corrected for the number of arms.",
        _metric_table(results, budget),
        "Success by level at the end of each run:",
        _level_table(results),
        f"{_failures(results)} {made_by(results.command)} The Parquet file holds every evaluation.{_left_out(results)}",
    ]
    return "\n\n".join(sections) + "\n"


def _findings(results: StudyResults, budget: float) -> list[str]:
    """Return the paragraphs: the start, each arm against the control, further pairs, and the paper's claim."""
    design, curves = results.design, results.curves("reward")
    start = float(np.mean([curve.values[0] for group in curves.values() for curve in group]))
    findings = [f"All arms of a seed start from the same cold start, whose mean held-out reward is {start:.3f}."]
    control = curves.get(design.control)
    if control is not None:
        lines = [
            f"- {arm} is at {np.mean([curve.at(budget) for curve in group]):.3f}, "
            f"{_test(compare_at(group, control, budget))}"
            for arm, group in curves.items()
            if arm != design.control
        ]
        if lines:
            findings += [f"After {budget:,.0f} calls, compared with {design.control}:", "\n".join(lines)]
    findings += [
        f"{one} less {other}, at the same calls: {_test(compare_at(curves[one], curves[other], budget))}."
        for one, other in design.pairs
        if one in curves and other in curves
    ]
    if BASE_ARM in curves and control is not None and design.control != BASE_ARM:
        findings.append(
            f"The paper claims better reward for half the tool budget. {BASE_ARM} after {budget / 2:,.0f} calls less "
            f"{design.control} after {budget:,.0f}: {_test(compare_at(curves[BASE_ARM], control, budget / 2, budget))}."
        )
    return findings


def _metric_table(results: StudyResults, budget: float) -> str:
    by_metric = {metric: results.curves(metric) for metric in METRICS}
    calls, control = results.calls_per_step(), results.design.control
    rows = []
    for arm in results.design.arms:
        row = [arm, f"{calls[arm]:.1f}"]
        for curves in by_metric.values():
            row.append(_mean([float(curve.at(budget)) for curve in curves[arm]]))
            compared = arm != control and control in curves
            row += _gain(compare_at(curves[arm], curves[control], budget)) if compared else ["", ""]
        rows.append(row)
    return markdown(["arm", "calls per step", "reward", "gain", "p", "success", "gain", "p"], rows)


def _level_table(results: StudyResults) -> str:
    levels = sorted(set(results.compared_rows.level) - {ALL})
    curves = {level: results.curves("success", level) for level in levels}
    rows = [
        [arm, *(_mean([float(curve.values[-1]) for curve in curves[level][arm]]) for level in levels)]
        for arm in results.design.arms
    ]
    return markdown(["arm", *levels], rows)


def _test(test: Estimate) -> str:
    """Describe a difference, its interval, and whether the interval excludes 0."""
    if test.seeds < 2:
        return f"{test.value:+.3f} (one seed, no interval)"
    verdict = "significant" if test.significant else "not significant"
    return f"{test.value:+.3f} ({test.low:+.3f} to {test.high:+.3f}, {verdict} with {test.seeds} seeds)"


def _band(curves: Sequence[Curve]) -> Band:
    mean = mean_curve(curves, _POINTS)
    found = [Estimate.over_seeds([float(curve.at(calls)) for curve in curves]) for calls in mean.calls]
    return Band.of(mean.calls, found)


def made_by(command: str) -> str:
    """Return a sentence with command, date and machine."""
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return f"Made by `{command}` on {today}; {_hardware()}."


def _failures(results: StudyResults) -> str:
    """Count the failures that may make policies look worse than they are."""
    whole = results.compared_rows
    whole = whole[whole.level == ALL]
    tasks, calls = int(whole.tasks.sum()), int(whole.evaluation_calls.sum())
    unfinished, failed = int(whole.unfinished.sum()), int(whole.calls_failed.sum())
    return (
        f"{unfinished:,} of {tasks:,} held-out trajectories could not be finished and are left out; {failed:,} of "
        f'{calls:,} tool calls were not answered "ok".'
    )


def _left_out(results: StudyResults) -> str:
    return f" Seeds without a finished run of every arm are left out: {results.left_out}." if results.left_out else ""


def _hardware() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.processor()
    gigabytes = psutil.virtual_memory().total / 1e9
    return f"{psutil.cpu_count()} cores of {processor}, {gigabytes:.0f} GB"


def _mean(values: Sequence[float]) -> str:
    mean = Estimate.over_seeds(values)
    if mean.low == mean.high:  # one seed, or equal values
        return f"{mean.value:.3f}"
    return f"{mean.value:.3f} ({mean.low:.3f} to {mean.high:.3f})"


def _gain(test: Estimate) -> list[str]:
    if test.seeds < 2:
        return [f"{test.value:+.3f}", "-"]
    return [f"{test.value:+.3f} ({test.low:+.3f} to {test.high:+.3f})", f"{test.p:.3f}"]
