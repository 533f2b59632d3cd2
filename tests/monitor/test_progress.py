"""The display: plain lines without a terminal, a live table in one, and nothing on standard output."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from rich.panel import Panel

from arpo_megatron.monitor.events import EventLog, EventReader
from arpo_megatron.monitor.progress import Progress
from tests.faults import small_disk

STEP = {
    "step": 3,
    "steps": 40,
    "reward": 0.6125,
    "success": 0.55,
    "forks": 31,
    "tool_calls_executed": 120,
    "tool_calls_inherited": 44,
    "cached_prompt_share": 0.63,
    "logprob_gap": 2.1e-5,
    "tokens_per_s": 812.4,
    "number_format": "fp8 blockwise (emulated)",
    "seconds/rollout": 3.12,
    "seconds/reward": 0.001,
    "seconds/update": 2.0,
}


def plain(width: int = 200) -> tuple[Progress, io.StringIO]:
    output = io.StringIO()
    return Progress(Console(file=output, force_terminal=False, width=width)), output


def test_progress_prints_plain_lines_without_a_terminal() -> None:
    progress, output = plain(width=40)
    with progress:
        progress.phase("prepare")
        progress.note("run directory runs/x [seed 1]")
        progress.sft(update=10, updates=300, loss=1.25, seconds=4.2)
        for name in ("rollout", "update", "rollout"):
            progress.phase(name)
        progress.step(STEP)
        progress.evaluation("after", 0.861)
    lines = [line.strip().split(" ", 1)[1] for line in output.getvalue().splitlines()]  # without the time
    assert lines == [
        "prepare",
        "run directory runs/x [seed 1]",
        "cold start: update 10/300, loss 1.250, 4 s",
        "step 3/40 | reward 0.613 | success 55.0% | log-prob gap 2.1e-05 | fp8 blockwise (emulated) | "
        "5.1 s | 3:09 min left",
        "held-out success after training: 86.1%",
    ]
    assert "\x1b" not in output.getvalue()


def test_progress_leaves_out_missing_metrics() -> None:
    progress, output = plain()
    with progress:
        progress.step({"step": 1, "reward": None, "logprob_gap": None})
    assert output.getvalue().endswith(" step 1\n")


def test_progress_shows_a_table_in_a_terminal() -> None:
    output = io.StringIO()
    with Progress(Console(file=output, force_terminal=True, width=160)) as progress:
        progress.phase("cold start")
        progress.sft(update=10, updates=300, loss=1.25, seconds=4.2)
        progress.phase("rollout")
        for number in range(1, 20):
            progress.step({**STEP, "step": number})
        progress.note("a note [with brackets]")
        progress.show(Panel("an answer"))
    text = output.getvalue()
    for part in (
        "log-prob gap",
        "step 19/40, 1:48 min left",
        "120+44",
        "rollout 3.1 update 2.0",
        "a note [with brackets]",
        "an answer",
    ):
        assert part in text


def test_progress_leaves_standard_output_free(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress() as progress:
        progress.phase("prepare")
        progress.step(STEP)
        progress.show("text")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "step 3/40" in captured.err


def test_progress_survives_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path, 2**15) as full:
        (tmp_path / "fill").write_bytes(bytes(2**15 - 2**12))
        with (tmp_path / "job.out").open("w", buffering=1) as output:
            progress = Progress(Console(file=output, force_terminal=False, width=200))
            for number in range(6):
                progress.note(f"{number}" * 1000)
            with pytest.raises(OSError, match=full):
                output.flush()
            (tmp_path / "fill").unlink()
            progress.note("room")
        lines = [line.split(" ")[-1] for line in (tmp_path / "job.out").read_text().splitlines()]
        assert lines == [*(f"{number}" * 1000 for number in range(6)), "room"]


def test_progress_shows_events_of_the_trainer(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    reader = EventReader(log.path)
    log.emit("phase", name="evaluate before", step=0)
    log.emit("note", text="resumed")
    log.emit("sft", update=300, updates=300, loss=0.5, seconds=60.0)
    log.emit("step", **STEP)
    log.emit("evaluation", when="before", success=0.5)
    progress, output = plain()
    with progress:
        for event in reader.new():
            progress.event(event)
        with pytest.raises(ValueError, match="unknown event kind 'other'"):
            progress.event({"kind": "other", "time": 0.0})
    text = output.getvalue()
    for part in (
        "evaluate before",
        "resumed",
        "update 300/300",
        "step 3/40",
        "held-out success before training: 50.0%",
    ):
        assert part in text


def test_ended_display_draws_nothing_over_a_prompt() -> None:
    screen = io.StringIO()
    with Progress(Console(file=screen, force_terminal=True)) as progress:
        progress.phase("start engine")
        progress.end_display()
        before = len(screen.getvalue())
        progress.note("engine is up again")
    assert "engine is up again" in screen.getvalue()[before:] and "start engine" not in screen.getvalue()[before:]
