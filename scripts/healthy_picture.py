"""Draw docs/images/healthy.svg, metrics of a good run and of four that their config makes bad, and view-runs.png.

Usage: scripts/healthy_picture.py GOOD_RUN HOT_RUN ENGINE_RUN POOL_RUN LATE_RUN, those of docs/guides/healthy.md. The
second picture shows all of them on one page of `arpo view`; it needs Chromium, as scripts/screenshots.py does.
"""

import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from screenshots import IMAGES, WIDE, browser, served, take

NAMES = ("healthy", "learning rate 1e-2", "bfloat16, trees ahead", "KV pool of 256 tokens", "deadline of 1 s")
COLORS = ("#2a9d6f", "#c0392b", "#6a4fb0", "#d1802a", "#2f6fb3")
LAST_STEP = 12
HELD_OUT = "held_out_success"


@dataclass(frozen=True, slots=True)
class Panel:
    """One metric and the place of the bad run that shows it."""

    metric: str
    scale: str = "linear"
    bad: int = 1


PANELS = (
    Panel("reward"),
    Panel(HELD_OUT),
    Panel("entropy_mean"),
    Panel("kl_old", "log"),
    Panel("ratio_max", "log"),
    Panel("grad_norm"),
    Panel("tool_calls_executed"),
    Panel("forks"),
    Panel("groups_without_signal"),
    Panel("logprob_gap", "log", 2),
    Panel("staleness", bad=2),
    Panel("cached_prompt_share", bad=3),
    Panel("dropped/failed", bad=4),
)


def values(run: Path, metric: str) -> tuple[list[int], list[float]]:
    """Return the steps of a run that have the metric, and its values."""
    if metric == HELD_OUT:
        rows = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(run.glob("held_out/step_*.json"))]
        found = [(row["step"], row["success"]) for row in rows]
    else:
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        found = [(row["step"], row[metric]) for row in rows if row.get(metric) is not None]
    return [step for step, _ in found], [value for _, value in found]


def main() -> None:
    """Draw one panel per metric with the good run and a bad one."""
    runs = [Path(argument) for argument in sys.argv[1:]]
    if len(runs) != len(NAMES):
        sys.exit(__doc__)
    mpl.rcParams |= {"svg.hashsalt": "healthy", "svg.fonttype": "none", "font.size": 8}
    figure, grid = plt.subplots(3, 5, figsize=(11, 6), constrained_layout=True)
    axes = list(grid.flat)
    for axis, panel in zip(axes, PANELS, strict=False):
        marker = "o" if panel.metric == HELD_OUT else ""
        for place in (0, panel.bad):
            axis.plot(*values(runs[place], panel.metric), color=COLORS[place], marker=marker)
        axis.set(title=panel.metric, xlabel="step", yscale=panel.scale)
        axis.minorticks_off()
        if panel.metric != HELD_OUT:
            axis.set_xlim(0, LAST_STEP)
    for axis in axes[len(PANELS) :]:
        axis.axis("off")
    lines = [mpl.lines.Line2D([], [], color=color, label=name) for color, name in zip(COLORS, NAMES, strict=True)]
    axes[len(PANELS)].legend(handles=lines, loc="center left", frameon=False).set_in_layout(False)
    figure.savefig(IMAGES / "healthy.svg", metadata={"Date": None})
    with served(*map(str, runs)) as address:
        asyncio.run(overlay(f"{address}#/run/{runs[0].resolve().name}?x=step"))


async def overlay(address: str) -> None:
    """Take the picture of the curves of all runs."""
    async with browser() as page:
        await page.send("Emulation.setScrollbarsHidden", hidden=True)
        await page.size(*WIDE)
        await page.open(
            address, f"document.querySelector('.chart').querySelectorAll('path.line').length == {len(NAMES)}"
        )
        await page.value("document.querySelector('.chart').closest('section').scrollIntoView()")
        await take(page, IMAGES / "view-runs.png")


if __name__ == "__main__":
    main()
