"""A model as a judge, behind any server that speaks the OpenAI chat protocol.

Replies are kept in an SQLite file, so that a resumed or repeated run asks nothing twice. A server that fails is asked
again; when it stays away, training waits for it or goes on by the rules of the reward (`reward.judge.when_down`), and
both are told and counted. No verdict ever becomes a 0 by itself.
"""

import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from arpo_megatron.config import JudgeConfig
from arpo_megatron.errors import UserError
from arpo_megatron.rewards.prompts import Question
from arpo_megatron.rewards.replies import Replies

if TYPE_CHECKING:
    from openai import OpenAI

COUNTERS = ("asked", "cached", "repeated", "unreadable", "fallbacks", "waited_s")
"""Questions sent to the server; answered from the cache; sent again because it failed; answered without a verdict;
left to the rules because it was down; seconds that questions waited for it, added up."""

_DOWN_S = 30.0  # with `fallback`: how long a server that failed is left alone
_WAIT_S, _LONGEST_WAIT_S = 1.0, 30.0
_TELL_EVERY_S = 60.0


class _DownError(Exception):
    """The server does not answer, also after the retries."""


class Judge:
    """Asks for verdicts. May be used from several threads.

    Args:
        config: the server, the model, and what to do without it.
        cache: SQLite file of replies; None: none is kept.
        tell: takes a line for the user, now and then while the server is away.
        check: is called while waiting; raises to end it.
    """

    def __init__(
        self,
        config: JudgeConfig,
        cache: Path | None = None,
        *,
        tell: Callable[[str], None] = lambda _text: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        if config.url is None:
            raise UserError("a judge is wanted: give reward.judge.url=http://HOST:PORT/v1 and reward.judge.model=NAME")
        if not config.model:
            raise UserError("reward.judge.model is missing: name the model that reward.judge.url serves")
        self._config = config
        self._replies = Replies(cache)
        self._tell, self._check = tell, check
        self._lock = threading.Lock()  # of what follows
        self._counts: Counter[str] = Counter()
        self._down_until = self._told_at = 0.0
        self._client: OpenAI | None = None
        self._closed = threading.Event()
        self._threads = ThreadPoolExecutor(config.concurrency, thread_name_prefix="judge")

    def ask(self, questions: Sequence[Question]) -> list[str | None]:
        """A verdict for each question, in this order; None where there is none (counted): the caller has rules then.

        Raises:
            UserError: the server refuses the key, or knows no such model or address.
        """
        different = list(dict.fromkeys(questions))
        found = dict(zip(different, self._threads.map(self._verdict, different), strict=True))
        return [found[question] for question in questions]

    def take_counts(self) -> dict[str, float]:
        """The `COUNTERS` since the last call."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return {name: counts[name] for name in COUNTERS}

    def close(self) -> None:
        """Ask nothing any more; who waits for the server gets no verdict."""
        self._closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._replies.close()

    def _verdict(self, question: Question) -> str | None:
        key = self._replies.key(self._config.model, question.system, question.user)
        reply = self._replies.get(key)
        if reply is not None:
            self._count("cached")
            return read_verdict(reply, question)
        reply = self._asked_until_answered(question)
        if reply is None:
            return None
        verdict = read_verdict(reply, question)
        if verdict is None:
            self._count("unreadable")
        else:
            self._replies.put(key, reply)
        return verdict

    def _asked_until_answered(self, question: Question) -> str | None:
        fallback, pause_s = self._config.when_down == "fallback", _WAIT_S
        while True:
            if fallback and time.monotonic() < self._down_until:
                self._count("fallbacks")
                return None
            try:
                return self._reply(question)
            except _DownError as error:
                self._say(str(error), fallback)
                if fallback:
                    self._down_until = time.monotonic() + _DOWN_S
                    continue
            self._sleep(pause_s)
            if self._closed.is_set():
                return None
            pause_s = min(2 * pause_s, _LONGEST_WAIT_S)

    def _reply(self, question: Question) -> str:
        import openai

        self._count("asked")
        try:
            answer = self._opened().chat.completions.with_raw_response.create(
                model=self._config.model,
                messages=[
                    {"role": "system", "content": question.system},
                    {"role": "user", "content": question.user},
                ],
                temperature=0.0,
                max_tokens=self._config.max_tokens,
            )
            self._count("repeated", answer.retries_taken)
            choices = answer.parse().choices
        except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
            raise UserError(
                f"the judge at {self._config.url} answers {error.status_code} for {self._config.model!r}: check "
                "reward.judge.url, reward.judge.model and the key in $" + self._config.api_key_env
            ) from None
        except (openai.BadRequestError, openai.UnprocessableEntityError):
            return ""  # this question is beyond it (too long, say): no verdict, and the server is up
        except openai.OpenAIError as error:
            self._count("repeated", self._config.retries)
            raise _DownError(f"{type(error).__name__}: {error}") from None
        return (choices[0].message.content or "") if choices else ""

    def _opened(self) -> "OpenAI":
        from openai import OpenAI

        with self._lock:
            if self._client is None:
                self._client = OpenAI(
                    base_url=self._config.url,
                    api_key=os.environ.get(self._config.api_key_env) or "none",
                    timeout=self._config.timeout_s,
                    max_retries=self._config.retries,
                )
            return self._client

    def _sleep(self, seconds: float) -> None:
        """Wait for the server, by short steps: a run that is to end ends."""
        begun = time.monotonic()
        while (left := begun + seconds - time.monotonic()) > 0 and not self._closed.wait(min(left, 0.5)):
            self._check()
        self._count("waited_s", time.monotonic() - begun)

    def _say(self, what: str, fallback: bool) -> None:
        with self._lock:
            now = time.monotonic()
            if self._told_at and now - self._told_at < _TELL_EVERY_S:
                return
            self._told_at = now
        course = "answers are scored by rule for now" if fallback else "training waits for it"
        self._tell(f"the judge at {self._config.url} is down ({what}): {course}")

    def _count(self, name: str, amount: float = 1) -> None:
        with self._lock:
            self._counts[name] += amount  # type: ignore[assignment]  # seconds are counted too


def read_verdict(reply: str, question: Question) -> str | None:
    """The verdict of a reply: the word behind the question's code; None where there is none or there are several."""
    words = re.findall(rf"VERDICT\W+{question.code}\W+([A-Z]+)", reply)
    return words[0] if len(set(words)) == 1 and words[0] in question.verdicts else None
