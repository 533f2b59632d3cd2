"""Results published by the authors, in per cent, for the tables of `arpo eval`.

They were measured with another search engine, another judge and other seeds. Each value was found in two independent
places or in the authors' own abstract. Of table 1 only the averages are listed, because its cells were not available.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """Scores of one model and method on a suite, as the authors report them."""

    model: str
    """Base model."""
    method: str
    """Training method or prompt."""
    suite: str
    k: int
    """k of pass@k."""
    source: str
    values: Mapping[str, float]
    """Per cent by benchmark."""
    average: float | None = None
    """Per cent, mean over the suite."""


_TABLE_1 = "arXiv 2507.19849, table 1"
_TABLE_2 = "arXiv 2507.19849, table 2"
_FIGURE_6 = "arXiv 2507.19849, figure 6"
_AEPO = "arXiv 2510.14545, abstract"

_AVERAGES: Mapping[str, Mapping[str, float]] = {
    "Qwen2.5-3B": {
        "no tools": 26.1,
        "TIR prompting": 25.1,
        "GRPO": 50.4,
        "REINFORCE++": 49.7,
        "DAPO": 50.6,
        "ARPO": 52.8,
    },
    "Llama3.1-8B": {"GRPO": 51.1, "REINFORCE++": 51.1, "DAPO": 50.4, "ARPO": 55.3},
    "Qwen2.5-7B": {
        "no tools": 32.0,
        "TIR prompting": 31.0,
        "GRPO": 56.5,
        "REINFORCE++": 54.9,
        "DAPO": 54.8,
        "ARPO": 58.3,
    },
}


def _deep(model: str, method: str, k: int, source: str, values: Mapping[str, float]) -> PublishedRow:
    return PublishedRow(model, method, "deepsearch", k, source, values)


ROWS: tuple[PublishedRow, ...] = (
    *(
        PublishedRow(model, method, "reasoning", 1, _TABLE_1, {}, average)
        for model, averages in _AVERAGES.items()
        for method, average in averages.items()
    ),
    # The HLE cells of Qwen3-8B are left out: two sources disagree.
    _deep("Qwen3-8B", "GRPO", 1, _TABLE_2, {"gaia": 32.0, "webwalker": 29.0, "xbench": 20.0}),
    _deep("Qwen3-8B", "ARPO", 1, _TABLE_2, {"gaia": 38.8, "webwalker": 30.5, "xbench": 25.0}),
    _deep("Qwen3-14B", "GRPO", 1, _TABLE_2, {"gaia": 36.9, "hle": 8.6, "webwalker": 30.0, "xbench": 27.0}),
    _deep("Qwen3-14B", "ARPO", 1, _TABLE_2, {"gaia": 43.7, "hle": 10.0, "webwalker": 36.0, "xbench": 32.0}),
    _deep("Qwen3-14B", "AEPO", 1, _AEPO, {"gaia": 47.6, "hle": 11.2, "webwalker": 43.0}),
    _deep("Qwen3-14B", "ARPO", 5, _FIGURE_6, {"gaia": 61.2, "hle": 24.0, "xbench": 59.0}),
    _deep("Qwen3-14B", "AEPO", 5, _AEPO, {"gaia": 65.0, "hle": 26.0, "webwalker": 70.0}),
)
