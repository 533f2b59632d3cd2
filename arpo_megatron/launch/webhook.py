"""News of a job by HTTP: one POST when it ends, fails, stalls, stops or diverges (`monitor.webhook_variable`)."""

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from arpo_megatron.config import MonitorConfig
from arpo_megatron.errors import StoppedError, UserError
from arpo_megatron.launch.hangs import HangError
from arpo_megatron.launch.services import Job
from arpo_megatron.monitor.events import EventLog
from arpo_megatron.utils.signals import Interrupted

_TIMEOUT_S = 10.0


def webhook_url(monitor: MonitorConfig) -> str | None:
    """Return the address for a job's news; None if the config names none.

    Raises:
        UserError: the variable is not set, or holds no address.
    """
    if (name := monitor.webhook_variable) is None:
        return None
    url = os.environ.get(name, "")
    if not _is_http(url):
        raise UserError(
            f"monitor.webhook_variable={name}: {name} is {'not an http address' if url else 'not set'}: export "
            f"{name}=https://... (on a cluster, name it among the profile's secrets)"
        )
    return url


def _is_http(url: str) -> bool:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return parsed.scheme in ("http", "https") and bool(parsed.host)


@contextmanager
def news_of(job: Job) -> Iterator[None]:
    """Inside the block, send the news of a job. Raises UserError as `webhook_url` does."""
    url = webhook_url(job.config.monitor)
    if url is None:
        yield
        return
    news = _News(url, job)
    job.on_event = news.follow
    try:
        yield
    except (StoppedError, Interrupted):
        news.send("stopped", "was asked to stop")
        raise
    except HangError as error:
        news.send("stalled", str(error))
        raise
    except Exception as error:
        news.send("failed", str(error))
        raise
    else:
        news.send("finished", "has finished")
    finally:
        news.wait()


@dataclass(slots=True)
class _News:
    """Sends news from threads, so that a slow receiver delays no job."""

    url: str
    job: Job
    step: int = 0
    """Steps that have finished."""
    diverged: bool = False
    """It has been reported."""
    sending: list[threading.Thread] = field(default_factory=list)

    def follow(self, event: Mapping[str, Any]) -> None:
        """Note a step. Report the first one in which an update was skipped, because its loss was not finite."""
        if event["kind"] != "step":
            return
        self.step = int(event["step"])
        if event.get("updates_skipped") and not self.diverged:
            self.diverged = True
            self.send("diverged", f"skipped {event['updates_skipped']} update(s) that were not finite")

    def send(self, event: str, text: str) -> None:
        """Send one piece of news. The field `text` is what Slack and Mattermost show."""
        run = self.job.run.path
        body = {
            "event": event,
            "text": f"{run.name}, step {self.step}: {text.splitlines()[0] if text else event}",
            "run": run.name,
            "run_dir": str(run),
            "step": self.step,
            "time": time.time(),
        }
        thread = threading.Thread(target=self._post, args=(body,), daemon=True)
        thread.start()
        self.sending.append(thread)

    def wait(self) -> None:
        """Wait until everything is sent, or has failed."""
        for thread in self.sending:
            thread.join(_TIMEOUT_S + 1.0)

    def _post(self, body: dict[str, Any]) -> None:
        try:
            httpx.post(self.url, json=body, timeout=_TIMEOUT_S).raise_for_status()
        except httpx.HTTPError as error:  # the address is a secret, so it is not in the message
            status = f" {error.response.status_code}" if isinstance(error, httpx.HTTPStatusError) else ""
            text = f"news could not be sent to the webhook: {type(error).__name__}{status}"
            EventLog(self.job.run.events).emit("note", text=text)
