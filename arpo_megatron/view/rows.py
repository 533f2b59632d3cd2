"""The files of a run as a page needs them. Damaged parts are left out and counted: they must not hide the rest."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard

from arpo_megatron.config.yaml import read_yaml
from arpo_megatron.errors import UserError
from arpo_megatron.utils.json_lines import json_lines
from arpo_megatron.utils.regular_files import read_regular

Row = dict[str, Any]

_TEXT_METRICS = frozenset({"number_format"})
_LARGEST = 1e300
_LARGEST_WHOLE = 2**53
_LATEST_S = 1e11
"""A later moment, in seconds since the epoch, has no local time."""
_NO_OBJECT = "no JSON object"


@dataclass(frozen=True, slots=True)
class Damage:
    """A part of a file that is left out."""

    file: str
    """Its path in the run directory."""
    rows: int
    """How many of its rows; 0: the whole file."""
    reason: str
    """The fault of the first of them, or of the file."""

    def to_dict(self) -> Row:
        return asdict(self)

    def line(self) -> str:
        """Return the damage in one line."""
        if not self.rows:
            return f"{self.file} is left out: {self.reason}"
        return f"{self.file}: {self.rows} rows are left out; the first is {self.reason}"


@dataclass(frozen=True, slots=True)
class Content:
    """The rows of a file, or one for a file that holds one object."""

    rows: list[Row]
    damage: Damage | None = None


def read_metrics(path: Path) -> Content:
    """Read metrics.jsonl or sft_metrics.jsonl; a missing file is empty."""
    return _read_lines(path, _metrics_fault)


def read_events(path: Path) -> Content:
    """Read events.jsonl; a missing file is empty."""
    return _read_lines(path, event_fault)


def read_evaluation(path: Path) -> Content:
    """Read held_out/step_N.json."""
    return _read_object(path, _evaluation_fault, f"{path.parent.name}/{path.name}")


def read_result(path: Path) -> Content:
    """Read result.json; a missing file is empty."""
    return _read_object(path, lambda row: "" if _is_whole(row.get("step")) else "step is no whole number", path.name)


def read_inputs(path: Path) -> Content:
    """Read inputs.json; a missing file is empty."""
    return _read_object(
        path, lambda row: "" if isinstance(row.get("model", {}), dict) else "model is no object", path.name
    )


def read_config(path: Path) -> Content:
    """Read config.yaml as one row with dotted keys."""
    try:
        values = _flat(read_yaml(path))
        json.dumps(values, allow_nan=False)
    except (UserError, TypeError, ValueError, RecursionError) as error:
        reason = "not a config" if isinstance(error, RecursionError) else (str(error).splitlines() or [""])[0]
        return Content([{}], Damage(path.name, 0, reason))
    return Content([values])


def event_fault(event: Row) -> str:
    """Return what an event lacks to be shown; "" if nothing."""
    moment = event.get("time")
    if not (_is_number(moment) and 0 <= moment < _LATEST_S):
        return "time is no moment"
    match event.get("kind"):
        case "phase":
            texts, wholes = ["name"], []
        case "step":
            if fault := _metrics_fault({name: value for name, value in event.items() if name != "kind"}):
                return fault
            texts, wholes = [], ["step"]
        case "sft":
            texts, wholes = [], ["update", "updates"]
        case "evaluation":
            if not _is_number(event.get("success")):
                return "success is no number"
            texts, wholes = ["when"], []
        case "restart":
            texts, wholes = ["text", "service"], []
        case str():
            texts, wholes = ["text"], []
        case _:
            return "kind is no text"
    wrong = [f"{name} is no text" for name in texts if not isinstance(event.get(name), str)]
    wrong += [f"{name} is no whole number" for name in wholes if not _is_whole(event.get(name))]
    return next(iter(wrong), "")


def _metrics_fault(row: Row) -> str:
    if not _is_whole(row.get("step")):
        return "step is no whole number"
    for name, value in row.items():
        if not (value is None or _is_number(value) or (name in _TEXT_METRICS and isinstance(value, str))):
            return f"{name} is no finite number"
    return ""


def _evaluation_fault(row: Row) -> str:
    if not _is_whole(row.get("step")):
        return "step is no whole number"
    if not _is_number(row.get("success")):
        return "success is no finite number"
    for name in ("solved", "tool_calls"):
        values = row.get(name, {})
        if not isinstance(values, dict) or not all(map(_is_number, values.values())):
            return f"{name} is no object of numbers"
    return ""


def _is_number(value: object) -> TypeGuard[float]:
    """Whether it is a finite number that a float holds. True and False count."""
    return isinstance(value, int | float) and abs(value) <= _LARGEST


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and abs(value) <= _LARGEST_WHOLE


def _read_lines(path: Path, fault_of: Callable[[Row], str]) -> Content:
    try:
        data = read_regular(path)
    except OSError:
        return Content([])
    rows, faults = [], []
    for number, row in json_lines(data):
        if fault := _NO_OBJECT if row is None else fault_of(row):
            faults.append(f"line {number}: {fault}")
        elif row is not None:
            rows.append(row)
    return Content(rows, Damage(path.name, len(faults), faults[0]) if faults else None)


def _read_object(path: Path, fault_of: Callable[[Row], str], name: str) -> Content:
    try:
        content = json.loads(read_regular(path))
    except FileNotFoundError:
        return Content([])
    except (OSError, ValueError, RecursionError):
        content = None
    if fault := fault_of(content) if isinstance(content, dict) else _NO_OBJECT:
        return Content([], Damage(name, 0, fault))
    return Content([content])


def _flat(values: Row, prefix: str = "") -> Row:
    flat: Row = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
