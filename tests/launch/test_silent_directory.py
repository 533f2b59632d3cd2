"""A run directory that does not answer is reported on standard error while that lasts, and not afterwards."""

import os
import re
import time
from functools import partial
from pathlib import Path

import pytest

from arpo_megatron.jobs import choose_run, resolve
from arpo_megatron.launch import job
from arpo_megatron.launch.silent_directory import report_silence


def lines_of(capfd: pytest.CaptureFixture[str], count: int) -> list[str]:
    """Return the lines on standard error once they are `count` or more."""
    lines: list[str] = []
    while len(lines) < count:
        time.sleep(0.01)
        lines += capfd.readouterr().err.splitlines()
    return lines


def test_silent_directory_is_reported_at_intervals_until_it_answers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(fifo := tmp_path / "config.yaml")  # an open of it hangs, as on a file server that is gone
    with report_silence(tmp_path, fifo, interval_s=0.05):
        lines = lines_of(capfd, 3)
        fifo_end = os.open(fifo, os.O_RDWR)  # from now on every open returns at once
        time.sleep(0.3)
        while capfd.readouterr().err:  # on a loaded machine a late question may cost a line more
            time.sleep(0.3)
        os.close(fifo_end)
    text = rf"arpo: {tmp_path} has not answered for \d+ s: check its file system"
    assert all(re.fullmatch(text, line) for line in lines), lines


def test_job_reports_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = resolve.resolve("quickstart", overrides=[f"run_dir={tmp_path / 'run'}"])
    run = choose_run.fresh(config)
    run.config.unlink()
    os.mkfifo(run.config)  # an open of it hangs, as on a file server that is gone
    monkeypatch.setattr(job, "report_silence", partial(report_silence, interval_s=0.05))
    with job.hold_run(config, run):
        assert f"{run.path} has not answered" in lines_of(capfd, 1)[0]
