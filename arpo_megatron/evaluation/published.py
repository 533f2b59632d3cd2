"""Results published by the authors, in per cent, for the tables of `arpo eval`.

They were measured with another search engine, another judge and other seeds. Averages and deep-search values were found
in two independent places or in the authors' own abstract. Cells of table 1 come from later papers that repeat them:
mathematics from RAPO (arXiv 2603.03078, table 1), multi-hop questions from APPO (arXiv 2606.12384). All ten are known
for ARPO on Qwen2.5-7B; their mean is the published average. Cells without a source are left out: the README of the
released code has no tables, and the paper's own tables could not be read.
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
_TABLE_1_CELLS = f"{_TABLE_1}, repeated in 2603.03078"
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
    "Llama3.1-8B": {
        "no tools": 28.8,
        "TIR prompting": 36.3,
        "GRPO": 51.1,
        "REINFORCE++": 51.1,
        "DAPO": 50.4,
        "ARPO": 55.3,
    },
    "Qwen2.5-7B": {
        "no tools": 32.0,
        "TIR prompting": 31.0,
        "GRPO": 56.5,
        "REINFORCE++": 54.9,
        "DAPO": 54.8,
        "ARPO": 58.3,
    },
}

_MATHEMATICS = ("aime24", "aime25", "math500", "gsm8k", "math")
_CELLS: Mapping[tuple[str, str], tuple[float, ...]] = {
    ("Qwen2.5-3B", "GRPO"): (20.0, 13.3, 72.0, 86.0, 81.0),
    ("Qwen2.5-3B", "DAPO"): (20.0, 16.7, 71.2, 85.0, 81.2),
    ("Qwen2.5-3B", "ARPO"): (23.3, 20.0, 71.4, 85.0, 82.5),
    ("Llama3.1-8B", "GRPO"): (13.3, 13.3, 62.4, 87.4, 79.2),
    ("Llama3.1-8B", "DAPO"): (16.7, 13.3, 61.2, 87.4, 76.4),
    ("Llama3.1-8B", "ARPO"): (23.3, 16.7, 64.6, 88.0, 80.2),
    ("Qwen2.5-7B", "GRPO"): (23.3, 26.7, 78.0, 92.8, 87.8),
    ("Qwen2.5-7B", "DAPO"): (20.0, 23.3, 80.4, 91.0, 88.8),
    ("Qwen2.5-7B", "ARPO"): (30.0, 30.0, 78.8, 92.2, 88.8),
}
"""Cells of table 1, in the order of `_MATHEMATICS`."""
_QUESTIONS = {"webwalker": 26.0, "hotpotqa": 58.8, "2wiki": 76.1, "musique": 31.1, "bamboogle": 71.5}
"""The other cells of ARPO on Qwen2.5-7B."""


def _reasoning(model: str, method: str, average: float) -> PublishedRow:
    cells = dict(zip(_MATHEMATICS, _CELLS.get((model, method), ()), strict=False))
    if (model, method) == ("Qwen2.5-7B", "ARPO"):
        cells |= _QUESTIONS
    return PublishedRow(model, method, "reasoning", 1, _TABLE_1_CELLS if cells else _TABLE_1, cells, average)


def _deep(model: str, method: str, k: int, source: str, values: Mapping[str, float]) -> PublishedRow:
    return PublishedRow(model, method, "deepsearch", k, source, values)


ROWS: tuple[PublishedRow, ...] = (
    *(
        _reasoning(model, method, average)
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
