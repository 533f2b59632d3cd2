"""Draw docs/images/healthy.svg: each main metric in a good run and in one that its config makes bad.

Usage: scripts/healthy_picture.py GOOD_RUN HOT_RUN COLD_RUN ENGINE_RUN, the runs of docs/guides/healthy.md in its order.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

TARGET = Path(__file__).resolve().parents[1] / "docs" / "images" / "healthy.svg"
NAMES = ("healthy", "learning rate 30 times too high", "temperature 0.2", "bfloat16, a small KV pool, slow engines")
COLORS = ("#2a9d6f", "#c0392b", "#2f6fb7", "#8a5fb0")
HELD_OUT = "held_out_success"


@dataclass(frozen=True, slots=True)
class Panel:
    """One metric and the bad run that shows it, by its place in `NAMES`."""

    metric: str
    bad: int
    scale: str = "linear"


PANELS = (
    Panel("reward", 1),
    Panel(HELD_OUT, 1),
    Panel("entropy_mean", 1),
    Panel("kl_old", 1, "log"),
    Panel("ratio_max", 1, "log"),
    Panel("grad_norm", 1, "log"),
    Panel("tool_calls_executed", 1),
    Panel("forks", 2),
    Panel("groups_without_signal", 2),
    Panel("logprob_gap", 3, "log"),
    Panel("staleness", 3),
    Panel("dropped/stale", 3),
    Panel("cached_prompt_share", 3),
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
        for place in (0, panel.bad):
            marker = "o" if panel.metric == HELD_OUT else ""
            axis.plot(*values(runs[place], panel.metric), color=COLORS[place], marker=marker, markersize=3)
        axis.set(title=panel.metric, xlabel="step", yscale=panel.scale, xlim=(0, 28))
    for axis in axes[len(PANELS) :]:
        axis.axis("off")
    lines = [mpl.lines.Line2D([], [], color=color, label=name) for color, name in zip(COLORS, NAMES, strict=True)]
    axes[len(PANELS)].legend(handles=lines, loc="center left", frameon=False)
    figure.savefig(TARGET, metadata={"Date": None})


if __name__ == "__main__":
    main()
