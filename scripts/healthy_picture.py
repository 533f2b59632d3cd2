"""Draw docs/images/healthy.svg, metrics of a good run and of one that its config makes bad (docs/guides/healthy.md).

Usage: scripts/healthy_picture.py GOOD_RUN BAD_RUN
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

TARGET = Path(__file__).resolve().parents[1] / "docs" / "images" / "healthy.svg"
NAMES = ("healthy", "learning rate 1e-2")
COLORS = ("#2a9d6f", "#c0392b")
LAST_STEP = 12
HELD_OUT = "held_out_success"


@dataclass(frozen=True, slots=True)
class Panel:
    """One metric."""

    metric: str
    scale: str = "linear"


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
    """Draw one panel per metric with both runs."""
    runs = [Path(argument) for argument in sys.argv[1:]]
    if len(runs) != len(NAMES):
        sys.exit(__doc__)
    mpl.rcParams |= {"svg.hashsalt": "healthy", "svg.fonttype": "none", "font.size": 8}
    figure, grid = plt.subplots(2, 5, figsize=(11, 4), constrained_layout=True)
    axes = list(grid.flat)
    for axis, panel in zip(axes, PANELS, strict=False):
        marker = "o" if panel.metric == HELD_OUT else ""
        for run, color in zip(runs, COLORS, strict=True):
            axis.plot(*values(run, panel.metric), color=color, marker=marker)
        axis.set(title=panel.metric, xlabel="step", yscale=panel.scale)
        axis.minorticks_off()
        if panel.metric != HELD_OUT:
            axis.set_xlim(0, LAST_STEP)
    for axis in axes[len(PANELS) :]:
        axis.axis("off")
    lines = [mpl.lines.Line2D([], [], color=color, label=name) for color, name in zip(COLORS, NAMES, strict=True)]
    axes[len(PANELS)].legend(handles=lines, loc="center left", frameon=False).set_in_layout(False)
    figure.savefig(TARGET, metadata={"Date": None})


if __name__ == "__main__":
    main()
