"""A job posts its news to the address in a variable, and an address that fails delays nothing."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arpo_megatron.errors import StoppedError, UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.hangs import HangError
from arpo_megatron.launch.services import Job
from arpo_megatron.launch.supervisor import Supervisor
from arpo_megatron.launch.webhook import news_of
from arpo_megatron.monitor.events import EventLog
from arpo_megatron.utils.processes import ProcessDiedError
from arpo_megatron.utils.signals import Interrupted
from tests.webhook import receiver

VARIABLE = "ARPO_TEST_WEBHOOK"


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    with receiver() as (address, received):
        monkeypatch.setenv(VARIABLE, address)
        yield received


def make_job(path: Path) -> Job:
    config = resolve.resolve("quickstart")
    run = RunDirectory(path)
    return Job(
        replace(config, monitor=replace(config.monitor, webhook_variable=VARIABLE)), run, Supervisor(path / "logs")
    )


@pytest.mark.parametrize(
    ("end", "event"),
    [
        (None, "finished"),
        (StoppedError(), "stopped"),
        (Interrupted(), "stopped"),
        (HangError("no trainer rank has made progress for 9 s"), "stalled"),
        (ProcessDiedError("trainer ended with exit code 1\nits log"), "failed"),
        (UserError("a full disk"), "failed"),
    ],
)
def test_end_of_a_job_is_posted_once(
    posted: list[dict[str, Any]], tmp_path: Path, end: BaseException | None, event: str
) -> None:
    job = make_job(tmp_path / "run")
    try:
        with news_of(job):
            if end is not None:
                raise end
    except BaseException as error:
        assert error is end
    (body,) = posted
    assert (body["event"], body["run"], body["run_dir"]) == (event, "run", str(tmp_path / "run"))
    assert body["text"].startswith("run, step 0: ") and "\n" not in body["text"]


def test_first_step_with_a_skipped_update_is_posted(posted: list[dict[str, Any]], tmp_path: Path) -> None:
    job = make_job(tmp_path)
    events = EventLog(job.run.events)
    with news_of(job):
        for step, skipped in enumerate([0, 0, 2, 1], 1):
            events.emit("step", step=step, updates_skipped=skipped, steps=4)
        job.show_events()
    assert sorted((each["event"], each["step"]) for each in posted) == [("diverged", 3), ("finished", 4)]


def test_address_that_refuses_is_a_note_without_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "http://127.0.0.1:9/secret")
    job = make_job(tmp_path)
    with news_of(job):
        pass
    assert "could not be sent to the webhook: ConnectError" in job.run.events.read_text()
    assert "secret" not in job.run.events.read_text()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "is not set"),
        ("hooks.example/x", "is not an http address"),
        ("https://", "is not an http address"),
        ("http://hooks.example:port", "is not an http address"),
    ],
)
def test_missing_address_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None, reason: str
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(UserError, match=reason), news_of(make_job(tmp_path)):
        pass
