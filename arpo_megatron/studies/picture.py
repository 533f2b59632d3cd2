"""Curves with their intervals as an SVG, in colours that colour-blind people tell apart, labelled where they end."""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from arpo_megatron.errors import UserError
from arpo_megatron.studies.statistics import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
"""Okabe and Ito's palette (jfly.uni-koeln.de/color), without its yellow, which is too light for lines, and a grey."""
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (7, 2)))
"""Beside the colour, so that a black and white print can be read too."""
_LINE = 0.05  # height of a label, as a share of the axis


@dataclass(frozen=True, slots=True)
class Band:
    """A line with its interval: float64[n] each; the interval's ends are the line where there is one seed."""

    x: Floats
    mean: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes: its lines by their labels, and what the axes show."""

    lines: Mapping[str, Band]
    x: str
    y: str


def check_can_draw() -> None:
    """Raises UserError where matplotlib is not installed: to be known before the first run, not after the last."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("pictures need matplotlib: run `make setup`, or pip install '.[study]' in the clone")


def draw(panels: Sequence[Panel], path: Path) -> None:
    """Write the panels side by side as SVG."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "arpo", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(panels), figsize=(5.6 * len(panels), 4.2), squeeze=False, layout="tight")
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    for panel, place in zip(panels, axes[0], strict=True):
        _panel(panel, place, names)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _panel(panel: Panel, axes: "Axes", names: Sequence[str]) -> None:
    for name, band in panel.lines.items():
        number = names.index(name) % len(COLOURS)
        style: dict[str, Any] = {"color": COLOURS[number]}
        axes.fill_between(band.x, band.low, band.high, alpha=0.13, linewidth=0, **style)
        axes.plot(band.x, band.mean, linestyle=DASHES[number], linewidth=1.7, **style)
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    axes.margins(x=0)
    axes.grid(alpha=0.25, linewidth=0.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    low, high = axes.get_ylim()
    ends = {name: (float(band.mean[-1]) - low) / (high - low) for name, band in panel.lines.items()}
    for name, height in apart(ends, _LINE).items():
        colour = COLOURS[names.index(name) % len(COLOURS)]
        axes.annotate(
            name, (1.0, height), xycoords="axes fraction", xytext=(5, 0), textcoords="offset points", color=colour,
            va="center",
        )  # fmt: skip


def apart(heights: Mapping[str, float], least: float) -> dict[str, float]:
    """The heights moved so that any two differ by `least`, in the same order, around the same middle."""
    order = sorted(heights, key=lambda name: heights[name])
    placed = np.array([heights[name] for name in order])
    for _ in range(200):
        gaps = np.diff(placed)
        short = np.clip(least - gaps, 0, None) / 2
        if not short.any():
            break
        placed[:-1] -= short
        placed[1:] += short
    return {name: float(height) for name, height in zip(order, placed, strict=True)}
