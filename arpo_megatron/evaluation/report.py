"""Tables in the form of the paper's, as Markdown, with the published rows next to the measured ones."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arpo_megatron.errors import UserError
from arpo_megatron.evaluation.benchmarks import BENCHMARKS, HELD_OUT, SUITES
from arpo_megatron.evaluation.journal import TRANSIENT
from arpo_megatron.evaluation.published import ROWS
from arpo_megatron.utils.text import markdown

SUMMARY = "summary.json"
"""File with an `EvalResult`."""
_NONE = "-"
_MAX_MISSING = 0.01
"""Share of missing attempts above which a value is marked."""
_MARK = "*"
_MARK_NOTE = (
    f"{_MARK} more than {_MAX_MISSING:.0%} of these attempts are missing (engine, tools, unjudged) and count as wrong"
)


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Result of a finished evaluation, as `summary.json` holds it."""

    model: str
    method: str
    """Method in the tables."""
    benchmarks: Mapping[str, Mapping[str, Any]]
    """`EvalSummary` as a dictionary, by benchmark."""
    notes: Sequence[str] = ()


def read_summary(directory: Path) -> EvalResult:
    """Read the result of a finished evaluation.

    Raises:
        UserError: the directory contains none.
    """
    try:
        found = json.loads((directory / SUMMARY).read_text(encoding="utf-8"))
        return EvalResult(found["model"], found["method"], found["benchmarks"], found["notes"])
    except (OSError, ValueError, KeyError):
        raise UserError(f"{directory} contains no finished evaluation ({SUMMARY}): run `arpo eval` first") from None


def write_report(directory: Path, results: Sequence[EvalResult]) -> Path:
    """Write report.md and return its path: a table per suite, then costs and failures of each result."""
    names = {name for each in results for name in each.benchmarks}
    suites = [suite for suite, columns in SUITES.items() if names & set(columns)]
    if len(suites) == 2 and names <= set(SUITES["deepsearch"]):
        suites.remove("reasoning")  # WebWalker belongs to both
    elif len(suites) == 2 and names <= set(SUITES["reasoning"]):
        suites.remove("deepsearch")
    notes = [note for each in results for note in each.notes]
    if any(_mark(row) for each in results for row in each.benchmarks.values()):
        notes.insert(0, _MARK_NOTE)
    tables = [_suite_table(suite, results) for suite in suites] + [_details(each) for each in results]
    text = "\n".join(["# Evaluation\n", *tables, *(f"- {note}" for note in notes)]).rstrip() + "\n"
    path = directory / "report.md"
    path.write_text(text, encoding="utf-8")
    return path


def _suite_table(suite: str, results: Sequence[EvalResult]) -> str:
    columns = SUITES[suite]
    rows = [
        [row.model, row.method, f"published ({row.source})", f"pass@{row.k}"]
        + [f"{row.values[name]:.1f}" if name in row.values else _NONE for name in columns]
        + [_NONE if row.average is None else f"{row.average:.1f}"]
        for row in ROWS
        if row.suite == suite
    ]
    for each in results:
        for k in sorted({k for name in columns if name in each.benchmarks for k in (1, each.benchmarks[name]["k"])}):
            values = [_cell(each.benchmarks.get(name), k) for name in columns]
            rows.append([each.model, each.method, "measured", f"pass@{k}", *values, _average(each, columns, k)])
    titles = [BENCHMARKS[name].title for name in columns]
    caption = f"{suite}: per cent, measured rows with 95 % bootstrap intervals over questions"
    return _table(caption, ["model", "method", "source", "metric", *titles, "avg."], rows)


def _cell(row: Mapping[str, Any] | None, k: int) -> str:
    if row is None or k not in (1, row["k"]):
        return _NONE
    name = "accuracy" if k == 1 else "pass_at_k"
    low, high = row[f"{name}_interval"]
    return f"{100 * row[name]:.1f} [{100 * low:.1f}, {100 * high:.1f}]{_mark(row)}"


def _mark(*rows: Mapping[str, Any]) -> str:
    """Return the mark of a value with too many missing attempts, or nothing."""

    def missing(row: Mapping[str, Any]) -> float:
        outcomes = row["outcomes"]
        return float(sum(outcomes.get(kind.value, 0) for kind in TRANSIENT) / max(1, sum(outcomes.values())))

    return _MARK if any(missing(row) > _MAX_MISSING for row in rows) else ""


def _average(each: EvalResult, columns: Sequence[str], k: int) -> str:
    """Return the mean over a complete suite; a mean over fewer benchmarks would not be comparable."""
    rows = [each.benchmarks[name] for name in columns if name in each.benchmarks]
    if len(rows) < len(columns) or any(k not in (1, row["k"]) for row in rows):
        return _NONE
    mean = sum(row["accuracy" if k == 1 else "pass_at_k"] for row in rows) / len(rows)
    return f"{100 * mean:.1f}{_mark(*rows)}"


def _details(each: EvalResult) -> str:
    rows = []
    for name, row in each.benchmarks.items():
        outcomes = ", ".join(f"{kind} {count}" for kind, count in sorted(row["outcomes"].items()))
        found, others = row["in_training_data"], row["accuracy_of_others"]
        without = "" if others is None or not found else f" (without: {100 * others:.1f})"
        rows.append(
            [
                HELD_OUT if name == HELD_OUT else BENCHMARKS[name].title,
                row["metric"],
                f"{row['tasks']} x {row['attempts']}",
                _cell(row, 1),
                _NONE if row["k"] == 1 else f"{_cell(row, row['k'])} (k = {row['k']})",
                f"{100 * row['format_ok']:.1f}",
                f"{row['tool_calls_per_attempt']:.2f}",
                f"{row['model_tokens_per_attempt']:.0f} + {row['tool_tokens_per_attempt']:.0f}",
                outcomes,
                _NONE if found is None else f"{found}{without}",
            ]
        )
    columns = ["benchmark", "scored by", "questions x attempts", "pass@1", "pass@k", "format kept", "calls"]
    columns += ["tokens: model + tools", "attempts by outcome", "questions in training data"]
    return _table(f"{each.model}, {each.method}: calls and tokens are means per attempt", columns, rows)


def _table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f"**{caption}**\n\n{markdown(columns, rows)}\n"
