"""Tables in the shape of the paper's, with the published rows beside: Markdown, LaTeX and HTML of the same cells."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from tabulate import tabulate

from arpo_megatron.errors import UserError
from arpo_megatron.evaluation.benchmarks import BENCHMARKS, HELD_OUT, SUITES
from arpo_megatron.evaluation.journal import TRANSIENT
from arpo_megatron.evaluation.published import ROWS

SUMMARY = "summary.json"
"""What `EvalResult` is read from."""
_NONE = "-"
_MARKED_ABOVE = 0.01
"""Share of missing attempts above which a figure is marked."""
_MARK = "*"
_MARK_NOTE = (
    f"{_MARK} more than {_MARKED_ABOVE:.0%} of these attempts are missing (engine, tools, unjudged) and count as wrong"
)
FORMATS: Mapping[str, str] = {"md": "github", "tex": "latex_booktabs", "html": "html"}
"""Ending of a report's file -> tabulate's name of the format."""


@dataclass(frozen=True, slots=True)
class EvalResult:
    """An evaluation as it is reported (`summary.json`).

    Attributes:
        model: what was evaluated.
        method: how its row is called in the tables.
        benchmarks: name -> `summary.Figures` as a dict.
        notes: what a reader must know, one line each.
    """

    model: str
    method: str
    benchmarks: Mapping[str, Mapping[str, Any]]
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """A caption, column names and rows of text."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def read_summary(directory: Path) -> EvalResult:
    """The result of a finished evaluation. Raises UserError where there is none."""
    try:
        found = json.loads((directory / SUMMARY).read_text(encoding="utf-8"))
        return EvalResult(found["model"], found["method"], found["benchmarks"], found["notes"])
    except (OSError, ValueError, KeyError):
        raise UserError(f"{directory} holds no finished evaluation ({SUMMARY}): run `arpo eval` first") from None


def tables_of(measured: Sequence[EvalResult]) -> list[Table]:
    """One table a suite that any of these has part in, then what each measured row cost and where it failed."""
    names = {name for each in measured for name in each.benchmarks}
    suites = [suite for suite, columns in SUITES.items() if names & set(columns)]
    if len(suites) == 2 and names <= set(SUITES["deepsearch"]):
        suites.remove("reasoning")  # WebWalker is in both
    elif len(suites) == 2 and names <= set(SUITES["reasoning"]):
        suites.remove("deepsearch")
    return [_suite_table(suite, measured) for suite in suites] + [_details(each) for each in measured]


def write_reports(directory: Path, measured: Sequence[EvalResult]) -> list[Path]:
    """Write report.md, report.tex and report.html; returns their paths."""
    tables = tables_of(measured)
    notes = [note for each in measured for note in each.notes]
    if any(_mark(figures) for each in measured for figures in each.benchmarks.values()):
        notes.insert(0, _MARK_NOTE)
    texts = {"md": _markdown(tables, notes), "tex": _latex(tables, notes), "html": _html(tables, notes)}
    paths = []
    for ending, text in texts.items():
        path = directory / f"report.{ending}"
        path.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths


def _suite_table(suite: str, measured: Sequence[EvalResult]) -> Table:
    columns = SUITES[suite]
    rows = [
        [row.model, row.method, f"published ({row.source})", f"pass@{row.k}"]
        + [f"{row.values[name]:.1f}" if name in row.values else _NONE for name in columns]
        + [_NONE if row.average is None else f"{row.average:.1f}"]
        for row in ROWS
        if row.suite == suite
    ]
    for each in measured:
        found = [each.benchmarks[name] for name in columns if name in each.benchmarks]
        if not found:
            continue
        for k in sorted({1, *(row["k"] for row in found)}):
            values = [_cell(each.benchmarks.get(name), k) for name in columns]
            rows.append([each.model, each.method, "measured", f"pass@{k}", *values, _average(each, columns, k)])
    titles = [BENCHMARKS[name].title for name in columns]
    caption = f"{suite}: per cent, measured rows with 95 % bootstrap intervals over questions"
    return Table(caption, ["model", "method", "where from", "metric", *titles, "avg."], rows)


def _cell(figures: Mapping[str, Any] | None, k: int) -> str:
    if figures is None or k not in (1, figures["k"]):
        return _NONE
    name = "accuracy" if k == 1 else "pass_at_k"
    low, high = figures[f"{name}_interval"]
    return f"{100 * figures[name]:.1f} [{100 * low:.1f}, {100 * high:.1f}]{_mark(figures)}"


def _mark(*rows: Mapping[str, Any]) -> str:
    """What stands behind a figure of these where so many of the attempts are missing that it says little."""

    def missing(figures: Mapping[str, Any]) -> float:
        outcomes = figures["outcomes"]
        return float(sum(outcomes.get(kind.value, 0) for kind in TRANSIENT) / max(1, sum(outcomes.values())))

    return _MARK if any(missing(figures) > _MARKED_ABOVE for figures in rows) else ""


def _average(each: EvalResult, columns: Sequence[str], k: int) -> str:
    """Of the whole suite only: an average over fewer benchmarks would stand beside what it is not comparable with."""
    found = [each.benchmarks[name] for name in columns if name in each.benchmarks]
    if len(found) < len(columns) or any(k not in (1, figures["k"]) for figures in found):
        return _NONE
    mean = sum(figures["accuracy" if k == 1 else "pass_at_k"] for figures in found) / len(found)
    return f"{100 * mean:.1f}{_mark(*found)}"


def _details(each: EvalResult) -> Table:
    rows = []
    for name, figures in each.benchmarks.items():
        shown = ", ".join(f"{kind} {count}" for kind, count in sorted(figures["outcomes"].items()))
        held, others = figures["in_training_data"], figures["accuracy_of_others"]
        without = "" if others is None or not held else f" (without: {100 * others:.1f})"
        rows.append(
            [
                HELD_OUT if name == HELD_OUT else BENCHMARKS[name].title,
                figures["metric"],
                f"{figures['tasks']} x {figures['attempts']}",
                _cell(figures, 1),
                _NONE if figures["k"] == 1 else f"{_cell(figures, figures['k'])} (k = {figures['k']})",
                f"{100 * figures['format_ok']:.1f}",
                f"{figures['tool_calls_a_question']:.2f}",
                f"{figures['model_tokens_a_question']:.0f} + {figures['tool_tokens_a_question']:.0f}",
                shown,
                _NONE if held is None else f"{held}{without}",
            ]
        )
    columns = ["benchmark", "scored by", "questions x attempts", "pass@1", "pass@k", "format kept", "calls"]
    columns += ["tokens: model + tools", "attempts by outcome", "questions in training data"]
    return Table(f"{each.model}, {each.method}: calls and tokens are means of one attempt", columns, rows)


def _text(table: Table, ending: str) -> str:
    return str(tabulate(table.rows, headers=table.columns, tablefmt=FORMATS[ending], disable_numparse=True))


def _markdown(tables: Sequence[Table], notes: Sequence[str]) -> str:
    parts = [f"**{table.caption}**\n\n{_text(table, 'md')}\n" for table in tables]
    return "\n".join(["# Evaluation\n", *parts, *(f"- {note}" for note in notes)]).rstrip() + "\n"


def _latex(tables: Sequence[Table], notes: Sequence[str]) -> str:
    parts = ["% needs \\usepackage{booktabs}"]
    parts += [f"% {table.caption}\n{_text(table, 'tex')}\n" for table in tables]
    return "\n".join([*parts, *(f"% {note}" for note in notes)]).rstrip() + "\n"


_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Evaluation</title>
<style>body{font-family:sans-serif;margin:2em}table{border-collapse:collapse;margin-bottom:2em}
th,td{border-bottom:1px solid #ccc;padding:.3em .7em;text-align:left}caption{text-align:left;font-weight:bold}</style>
</head><body><h1>Evaluation</h1>
"""


def _html(tables: Sequence[Table], notes: Sequence[str]) -> str:
    parts = []
    for table in tables:
        text = _text(table, "html").replace("<table>", f"<table>\n<caption>{escape(table.caption)}</caption>", 1)
        parts.append(text)
    items = "".join(f"<li>{escape(note)}</li>\n" for note in notes)
    return _HEAD + "\n".join(parts) + f"\n<ul>\n{items}</ul>\n</body></html>\n"
