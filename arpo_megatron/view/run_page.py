"""The data of a run's page: state, curves, restarts, held-out tasks and advice, as JSON values."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from arpo_megatron.errors import UserError
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.health import read_health
from arpo_megatron.monitor.progress import STEP_PHASES, seconds_left, step_line
from arpo_megatron.monitor.tree_store import step_file
from arpo_megatron.monitor.tree_view import printable
from arpo_megatron.view.advice import advice
from arpo_megatron.view.rows import (
    Content,
    Damage,
    Row,
    event_fault,
    read_config,
    read_evaluation,
    read_events,
    read_inputs,
    read_metrics,
    read_result,
)
from arpo_megatron.view.runs import FileCache, is_training
from arpo_megatron.view.tree_page import held_out_steps, step_trees, train_steps, whole_trees

_EVENTS_SHOWN = 200
_CHANGES_SHOWN = 500
_SILENT_S = 120.0
"""A run on another machine, whose lock cannot be seen, counts as running if its last event is younger."""


@dataclass(frozen=True, slots=True)
class _Files:
    """Content of the files that the page reads from a run directory."""

    config: Row
    """Values by dotted key."""
    events: list[Row]
    metrics: list[Row]
    held_out: list[Row]
    """One per evaluation, ascending by step."""
    sft: list[Row]
    inputs: Row
    result: Row
    """Empty without the file, as `inputs`."""
    damage: list[Damage]


def run_page(run: RunDirectory, cache: FileCache, now: float) -> dict[str, Any]:
    """Return everything that the page of a run shows, except its trees and its services.

    Args:
        run: the run.
        cache: keeps unchanged files.
        now: the time in seconds since the epoch.
    """
    files = _read(run, cache)
    steps = _steps(files.config)
    step = int(files.metrics[-1]["step"]) if files.metrics else 0
    state = _state(run, files, steps, now)
    trees = train_steps(run)
    newest, damage = _newest_trees(run, trees, cache)
    return {
        "path": str(run.path),
        "recipe": files.config.get("name"),
        "method": files.config.get("algorithm.name"),
        "model": _model(files),
        "seed": files.config.get("seed"),
        "code": _code(files.events),
        "state": state,
        "step": step,
        "steps": steps,
        "eta_s": seconds_left(files.metrics, steps) if state == "running" and files.metrics else None,
        "phase": _phase(files.events) if state == "running" else None,
        "began": files.events[0]["time"] if files.events else None,
        "last_event": _last_event(files.events),
        "metrics": columns(files.metrics),
        "sft": columns(files.sft),
        "evaluations": [_evaluation(row) for row in files.held_out],
        "held_out_changes": _changes(files.held_out),
        "restarts": _restarts(files.events),
        "events": [_shown(event) for event in files.events if _is_shown(event)][-_EVENTS_SHOWN:],
        "advice": [each.to_dict() for each in advice(files.metrics, files.held_out, newest, files.config)],
        "damaged": [each.to_dict() for each in [*files.damage, *damage]],
        "config": files.config,
        "tree_steps": trees,
        "held_out_tree_steps": held_out_steps(run),
    }


def services(run: RunDirectory) -> list[Row]:
    """Return the health of the job's services; [] if none run."""
    try:
        processes = read_health(run)
    except (UserError, KeyError, TypeError, ValueError):  # the directory may come from someone else
        return []
    return [{**asdict(process), "seconds": time.time() - process.since} for process in processes]


def columns(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Turn rows of metrics into one list per metric, with None for a value that a row lacks."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _read(run: RunDirectory, cache: FileCache) -> _Files:
    damage: list[Damage] = []

    def rows(path: Path, read: Callable[[Path], Content]) -> list[Row]:
        content: Content = cache.get(path, read)
        damage.extend([] if content.damage is None else [content.damage])
        return content.rows

    return _Files(
        config=rows(run.config, read_config)[0],
        events=_of_job(rows(run.events, read_events)),
        metrics=rows(run.path / "metrics.jsonl", read_metrics),
        held_out=[row for path in sorted(run.held_out.glob("step_*.json")) for row in rows(path, read_evaluation)],
        sft=rows(run.path / "sft_metrics.jsonl", read_metrics),
        inputs=next(iter(rows(run.inputs, read_inputs)), {}),
        result=next(iter(rows(run.result, read_result)), {}),
        damage=damage,
    )


def _newest_trees(run: RunDirectory, steps: Sequence[int], cache: FileCache) -> tuple[list[Row], list[Damage]]:
    """Return summaries of the whole trees of the newest step, and what is damaged in its file."""
    if not steps:
        return [], []
    file = step_file(run, steps[-1])
    name = f"{file.parent.name}/{file.name}"
    try:
        rows = step_trees(run, str(steps[-1]), cache)
    except UserError as error:
        return [], [Damage(name, 0, str(error))]
    faults = [f"row {row['number']}: {row['damaged']}" for row in rows if "damaged" in row]
    return whole_trees(rows), [Damage(name, len(faults), faults[0])] if faults else []


def _steps(config: Row) -> int:
    steps = config.get("train.steps")
    return steps if isinstance(steps, int) else 0


def _state(run: RunDirectory, files: _Files, steps: int, now: float) -> str:
    """Return "finished", "running", "failed" or "stopped"."""
    events = files.events
    if files.result.get("step", -1) >= steps:
        return "finished"
    if is_training(run):
        return "running"
    if events and events[-1]["kind"] in ("failed", "user_error"):
        return "failed"
    return "running" if events and now - events[-1]["time"] < _SILENT_S else "stopped"


def _model(files: _Files) -> str:
    config, spec = files.config, files.inputs.get("model", {})
    named = config.get("model.hub_id") or config.get("model.path") or "made for the run"
    sizes = [f"{spec[key]} {label}" for key, label in (("layers", "layers"), ("hidden", "wide")) if key in spec]
    return ", ".join([str(named), *sizes])


def _phase(events: Sequence[Row]) -> str | None:
    return next((event["name"] for event in reversed(events) if event["kind"] == "phase"), None)


def _code(events: Sequence[Row]) -> str | None:
    """Return the code of the newest start on this machine, as `launch.job.open_job` notes it."""
    return next((str(event["code"]) for event in reversed(events) if "code" in event), None)


def event_line(event: Row) -> str | None:
    """Return an event as one line with its local time; None for a damaged or a short-lived one."""
    if event_fault(event) or event["kind"] == "progress" or event.get("name") in STEP_PHASES:
        return None
    text = step_line(event) if event["kind"] == "step" else _text(event)
    return f"{time.strftime('%H:%M:%S', time.localtime(event['time']))} {printable(text)}"


def _is_shown(event: Row) -> bool:
    return event["kind"] not in ("progress", "step", "sft") and event.get("name") not in STEP_PHASES


def _shown(event: Row) -> Row:
    return {"time": event["time"], "kind": event["kind"], "text": _text(event)}


def _last_event(events: Sequence[Row]) -> Row | None:
    return _shown(events[-1]) if events else None


def _text(event: Row) -> str:
    match event["kind"]:
        case "phase":
            return str(event.get("name"))
        case "step":
            return f"step {event.get('step')} is done"
        case "sft":
            return f"cold start: update {event.get('update')} of {event.get('updates')}"
        case "evaluation":
            return f"held-out success {event.get('when')}: {float(event.get('success') or 0):.1%}"
        case _:
            return str(event.get("text", ""))


def _of_job(events: Sequence[Row]) -> list[Row]:
    """Return the events without restarts after the export, which are those of services of `arpo serve` or `eval`."""
    found, exported = [], False
    for event in events:
        if event["kind"] == "phase":
            exported = event["name"] == "export"
        if not (exported and event["kind"] == "restart"):
            found.append(event)
    return found


def _restarts(events: Sequence[Row]) -> list[Row]:
    """Return restarts of services and of the job, each with the steps finished before it."""
    found, step = [], 0
    for event in events:
        if event["kind"] == "step":
            step = int(event["step"])
        died = event["kind"] == "restart" and event.get("state") == "down"
        if died or event.get("resumed"):
            service = str(event["service"]) if died else "job"
            found.append({"time": event["time"], "step": step, "service": service, "text": _text(event)})
    return found


def _evaluation(row: Row) -> Row:
    solved = row.get("solved", {})
    return {
        "step": row["step"],
        "success": row["success"],
        "solved": sum(map(bool, solved.values())),
        "tasks": len(solved),
        "tool_calls": row.get("tool_calls", {}),
    }


def _changes(held_out: Sequence[Row]) -> Row | None:
    """Return the tasks that the last evaluation solved and the first did not, and the reverse."""
    if len(held_out) < 2:
        return None
    first, last = held_out[0], held_out[-1]
    before, after = first.get("solved", {}), last.get("solved", {})
    gained = [task for task in after if after[task] and not before.get(task, False)]
    lost = [task for task in after if before.get(task, False) and not after[task]]
    return {
        "first_step": first["step"],
        "last_step": last["step"],
        "gained": gained[:_CHANGES_SHOWN],
        "lost": lost[:_CHANGES_SHOWN],
        "gained_count": len(gained),
        "lost_count": len(lost),
    }
