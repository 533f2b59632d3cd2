"""Display of a running job on standard error: a live table in a terminal, plain lines elsewhere.

Standard output stays free for results that programs read.
"""

import io
import shlex
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Self

from rich.columns import Columns
from rich.console import Console, ConsoleRenderable, Group, RichCast
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from arpo_megatron.utils.json_lines import json_lines

Row = Mapping[str, Any]
Renderable = ConsoleRenderable | RichCast | str

STEP_PHASES = frozenset({"rollout", "lend", "logprobs", "ratios", "update", "push", "save"})
"""Phases within a step: shown live and as seconds in the step's row, but not as separate lines."""

_ROWS_SHOWN = 12


def _number(key: str, form: str) -> Callable[[Row], str]:
    return lambda row: "-" if row.get(key) is None else format(row[key], form)


def _step(row: Row) -> str:
    return f"{row['step']}/{row['steps']}" if "steps" in row else str(row["step"])


def _calls(row: Row) -> str:
    executed, inherited = row.get("tool_calls_executed"), row.get("tool_calls_inherited")
    return "-" if executed is None else f"{executed:.0f}+{inherited or 0:.0f}"


def _seconds(row: Row) -> str:
    phases = {key.removeprefix("seconds/"): value for key, value in row.items() if key.startswith("seconds/")}
    parts = [f"{name} {value:.1f}" for name, value in phases.items() if value >= 0.05]
    return " ".join(parts) or "-"


COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("step", _step),
    ("reward", _number("reward", ".3f")),
    ("success", _number("success", ".1%")),
    ("forks", _number("forks", ".0f")),
    ("calls+inherited", _calls),
    ("cached", _number("cached_prompt_share", ".0%")),
    ("log-prob gap", _number("logprob_gap", ".1e")),
    ("tokens/s", _number("tokens_per_s", ".0f")),
    ("trained tokens/s", _number("trainer/tokens_per_s", ".0f")),
    ("TFLOP/s", _number("trainer/tflops", ".3g")),
    ("MFU", _number("trainer/mfu", ".1%")),
    ("GB", _number("memory_peak_gb", ".1f")),
    ("seconds by phase", _seconds),
)
"""Title and content of each column; a row is what `MetricsLog.log` receives, and a missing value is shown as "-"."""

_SHORT = ("step", "reward", "success", "log-prob gap")
"""Columns of the one line per step that is printed without a terminal."""
_STEPS_FOR_ETA = 5


def step_seconds(row: Row) -> float:
    """Return the wall seconds of a step: the sum of its phases."""
    return float(sum(value for key, value in row.items() if key.startswith("seconds/") and value is not None))


def longest_step_s(metrics: Path) -> float:
    """Return the wall seconds of the longest step in a run's metrics.jsonl; 0 if it has none yet."""
    lines = json_lines(metrics.read_bytes()) if metrics.exists() else ()
    return max((step_seconds(row) for _, row in lines if row is not None), default=0.0)


def seconds_left(rows: Sequence[Row], steps: int) -> float | None:
    """Return the expected seconds until step `steps` ends, from the median of the last steps; None if unknown."""
    taken = [seconds for row in rows[-_STEPS_FOR_ETA:] if (seconds := step_seconds(row))]
    return (steps - int(rows[-1]["step"])) * median(taken) if taken else None


def duration(seconds: float) -> str:
    """Return seconds as "12.3 s" below a minute, "4:05 min" below an hour, "2:30 h" from there."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02d} min" if whole < 3600 else f"{whole // 3600}:{whole % 3600 // 60:02d} h"


def step_line(row: Row, left_s: float | None = None) -> str:
    """Return the short line of a finished step, with the expected seconds that are left if `left_s` is not None."""
    fields = [f"{title} {text}" for title, content in COLUMNS if title in _SHORT and (text := content(row)) != "-"]
    fields += [row["number_format"]] if "number_format" in row else []
    fields += [duration(seconds)] if (seconds := step_seconds(row)) else []
    return " | ".join(fields + ([f"{duration(left_s)} left"] if left_s else []))


class Progress:
    """Shows phases, steps and notes of a job. Use it as a context manager.

    Args:
        console: output; standard error by default.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._started = time.monotonic()
        self._rows: deque[Row] = deque(maxlen=_ROWS_SHOWN)
        self._spinner = Spinner("dots", Text(""))
        self._phase = ""
        self._live = Live(
            console=self.console, get_renderable=self._render, refresh_per_second=2, redirect_stdout=False
        )

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end_display()

    def end_display(self) -> None:
        """End the live display, so that a command can use the terminal; later lines are printed as they come."""
        self._spinner = Spinner("dots", Text(""))
        self._phase = ""
        if self._live.is_started:
            self._live.stop()

    def event(self, event: Mapping[str, Any]) -> None:
        """Show one event of `monitor.events`. Raises ValueError for an unknown kind."""
        fields = {key: value for key, value in event.items() if key not in ("time", "kind")}
        match event["kind"]:
            case "phase":
                self.phase(fields["name"])
            case "progress":
                self._set_status(f"{self._phase}: {fields['text']}")
            case "note" | "restart":
                self.note(fields["text"])
            case "step":
                self.step(fields)
            case "sft":
                self.sft(**fields)
            case "evaluation":
                self.evaluation(fields["when"], fields["success"])
            case "failed":
                pass  # the command prints it
            case other:
                raise ValueError(f"unknown event kind {other!r}")

    def phase(self, name: str) -> None:
        """Show the current phase of the job."""
        if name != self._phase and name not in STEP_PHASES and not self._live.is_started:
            self._line(name)
        self._phase = name
        self._set_status(name)

    def note(self, text: str) -> None:
        """Print a line that stays on the screen."""
        self._line(text)

    def show(self, renderable: Renderable) -> None:
        """Print anything that Rich can draw; it stays."""
        self._print(renderable)

    def step(self, row: Row) -> None:
        """Show the metrics of a finished step, with `steps` as the number of all steps."""
        self._rows.append(row)
        if not self._live.is_started:
            self._line(step_line(row, self._left_s()))

    def next_command(self, *words: object) -> None:
        """Print the command that usually follows the job, quoted for a shell."""
        self._print(Text(f"next: {shlex.join(map(str, words))}"), soft_wrap=True)

    def _left_s(self) -> float | None:
        rows = list(self._rows)  # a copy, because the display draws in another thread
        return seconds_left(rows, int(rows[-1]["steps"])) if rows and "steps" in rows[-1] else None

    def sft(self, *, update: int, updates: int, loss: float, seconds: float) -> None:
        """Show the progress of supervised training."""
        text = f"cold start: update {update}/{updates}, loss {loss:.3f}, {seconds:.0f} s"
        if self._live.is_started and update < updates:
            self._set_status(text)
        else:
            self._line(text)

    def evaluation(self, when: str, success: float) -> None:
        """Show held-out success, in [0, 1], "before" or "after" training, or after a step ("step_4")."""
        moment = f"{when} training" if when in ("before", "after") else f"after {when.replace('_', ' ')}"
        self._line(f"held-out success {moment}: {success:.1%}")

    def _line(self, text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        # No markup: paths and answers may hold square brackets. No wrapping: a line of a log is one line.
        self._print(Text(f"{minutes:3d}:{seconds:02d} {text}"), soft_wrap=True)

    def _print(self, renderable: Renderable, *, soft_wrap: bool = False) -> None:
        if self.console.is_terminal:
            self.console.print(renderable, soft_wrap=soft_wrap)
            return
        # The output may be a file on a full disk, which must not end the job. Rich would write failed text again with
        # every later line, so it renders into memory.
        text = io.StringIO()
        Console(file=text, force_terminal=False, width=self.console.width).print(renderable, soft_wrap=soft_wrap)
        with suppress(OSError):
            self.console.file.write(text.getvalue())
            self.console.file.flush()

    def _set_status(self, text: str) -> None:
        """Show a text next to the spinner."""
        self._spinner.update(text=Text(text))

    def _render(self) -> ConsoleRenderable:
        parts: list[ConsoleRenderable] = []
        if self._rows:
            table = Table(*(title for title, _ in COLUMNS), box=None, pad_edge=False, header_style="bold")
            for row in list(self._rows):  # a copy, because the display draws in another thread
                table.add_row(*(content(row) for _, content in COLUMNS))
            parts.append(table)
            if "steps" in (row := self._rows[-1]):
                bar = ProgressBar(total=row["steps"], completed=row["step"], width=40)
                left = self._left_s()
                parts.append(Columns([bar, Text(f"step {_step(row)}{f', {duration(left)} left' if left else ''}")]))
        if self._phase:
            parts.append(self._spinner)
        return Group(*parts)
