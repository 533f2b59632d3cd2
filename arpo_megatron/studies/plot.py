"""Curves with their intervals as an SVG, in colours that colour-blind readers can distinguish."""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from arpo_megatron.errors import UserError
from arpo_megatron.studies.curves import Estimate, Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
"""Okabe and Ito's palette (jfly.uni-koeln.de/color), with grey instead of its yellow, which is too light for lines."""
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (7, 2)))
"""Line styles, so that a black-and-white print is readable too."""


@dataclass(frozen=True, slots=True)
class Band:
    """A line with its interval, float64[n] each. With one seed both ends are the line."""

    x: Floats
    mean: Floats
    low: Floats
    high: Floats

    @classmethod
    def of(cls, x: Floats, estimates: Sequence[Estimate]) -> "Band":
        """Return the line of one estimate per x."""
        return cls(x, *(np.array([getattr(each, name) for each in estimates]) for name in ("value", "low", "high")))


@dataclass(frozen=True, slots=True)
class Panel:
    """A pair of axes with its lines by label."""

    lines: Mapping[str, Band]
    x: str
    """Label of the horizontal axis."""
    y: str
    """Label of the vertical axis."""


def check_can_draw() -> None:
    """Raise UserError if matplotlib is missing: before the first run rather than after the last."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("plots need matplotlib: run `make setup`, or pip install '.[study]' in the clone")


def draw(panels: Sequence[Panel], path: Path) -> None:
    """Write the panels side by side as an SVG."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "arpo", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(panels), figsize=(5.6 * len(panels), 4.2), squeeze=False, layout="tight")
    labels = list(dict.fromkeys(label for panel in panels for label in panel.lines))
    for panel, own_axes in zip(panels, axes[0], strict=True):
        _draw_panel(panel, own_axes, labels)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _draw_panel(panel: Panel, axes: "Axes", labels: Sequence[str]) -> None:
    for label, band in panel.lines.items():
        number = labels.index(label) % len(COLOURS)
        axes.fill_between(band.x, band.low, band.high, alpha=0.13, linewidth=0, color=COLOURS[number])
        axes.plot(band.x, band.mean, linestyle=DASHES[number], linewidth=1.7, color=COLOURS[number], label=label)
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    axes.margins(x=0)
    axes.grid(alpha=0.25, linewidth=0.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False)
