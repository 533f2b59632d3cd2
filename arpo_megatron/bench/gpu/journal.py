"""Parts of a measurement, each run once: a file remembers what is done, a deadline ends the rest, errors stay apart."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """One figure or a few that belong together.

    Attributes:
        name: unique in its journal.
        prepare: makes everything that needs no GPU and returns the function that measures.
    """

    name: str
    prepare: Callable[[], Callable[[], Figures]]


def run_parts(
    item: str, parts: Sequence[Part], out: Path, *, minutes: float, dry: bool = False, fresh: bool = False
) -> Figures:
    """Run the parts that `out`/<item>.jsonl does not have yet, in order, and append each one's line to it.

    A part that fails is recorded with its error, hides no other, and is tried again the next time.

    Args:
        item: name of the measurement.
        parts: in order of value.
        out: directory, made where it is missing.
        minutes: no part is started later than this.
        dry: only prepare, and record nothing.
        fresh: forget what an earlier run has done.

    Returns:
        figures or error of every part that has been run, and the names of those that are left.
    """
    started = time.monotonic()
    file = out / f"{item}.jsonl"
    done = {} if fresh or dry else _read(file)
    if not dry:
        out.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(line) + "\n" for line in done.values()))
    for part in parts:
        if part.name in done or time.monotonic() - started > 60 * minutes:
            continue
        line = {"part": part.name, **_run(part, dry=dry)}
        print(json.dumps(line), file=sys.stderr, flush=True)
        done[part.name] = line
        if not dry:
            with file.open("a") as journal:
                journal.write(json.dumps(line) + "\n")
    return {
        "item": item,
        "dry": dry,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() and not dry else "cpu",
        "parts": {name: {key: line[key] for key in line if key != "part"} for name, line in done.items()},
        "left": [part.name for part in parts if part.name not in done],
        "failed": sorted(name for name, line in done.items() if "error" in line),
    }


def _run(part: Part, *, dry: bool) -> Figures:
    started = time.monotonic()
    try:
        measure = part.prepare()
        figures = {} if dry else measure()
    except Exception as error:
        reason = (str(error).strip().splitlines() or ["no message"])[0]
        figures = {"error": f"{type(error).__name__}: {reason}"[:400]}
    return {**figures, "seconds": round(time.monotonic() - started, 2)}


def _read(file: Path) -> dict[str, Figures]:
    """Finished parts by name; failed ones and a line that a kill cut short are forgotten."""
    found: dict[str, Figures] = {}
    for text in file.read_text().splitlines() if file.is_file() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if "error" not in line:
            found[line["part"]] = line
    return found


def timed(work: Callable[[], Any]) -> float:
    """Seconds that `work` takes on the device."""
    synchronize()
    started = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - started


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def reset_peak() -> None:
    """Begin a new measurement of memory."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib() -> float:
    """Largest memory held by tensors since `reset_peak`, in GiB; 0 on a CPU."""
    return round(torch.cuda.max_memory_allocated() / 2**30, 2) if torch.cuda.is_available() else 0.0


def quantiles(values: Any) -> Figures:
    """Median, 90 % and 99 % quantile and largest of absolute values."""
    absolute = torch.as_tensor(values).double().abs()
    found = torch.quantile(absolute[: 1 << 24], torch.tensor([0.5, 0.9, 0.99], dtype=torch.float64))
    p50, p90, p99 = (float(f"{value:.3e}") for value in found.tolist())
    return {"p50": p50, "p90": p90, "p99": p99, "max": float(f"{float(absolute.max()):.3e}"), "n": len(absolute)}
