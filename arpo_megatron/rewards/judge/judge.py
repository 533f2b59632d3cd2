"""A model as a judge, behind any server with the OpenAI chat protocol.

Replies are kept in an SQLite file, so a resumed or repeated run asks nothing twice. A failing server is asked again.
While it is down, callers wait or fall back to the rules of the reward (`reward.judge.when_down`); both are logged and
counted. A missing verdict never becomes a 0.

All requests run in one thread with an event loop, where they can be cancelled at any moment so that the process can
end.
"""

import asyncio
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, wait
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from arpo_megatron.config import JudgeConfig
from arpo_megatron.errors import UserError
from arpo_megatron.rewards.judge.cache import Replies
from arpo_megatron.rewards.judge.prompts import CORRECT, INCORRECT, JudgeQuestion
from arpo_megatron.utils.heartbeat import beat

if TYPE_CHECKING:
    from openai import AsyncOpenAI

COUNTERS = ("asked", "cached", "repeated", "unreadable", "fallbacks", "waited_s")
"""Questions sent to the server; answered from the cache; sent again after a failure; answered without a verdict; left
to the rules because the server was down; seconds that questions waited for it, summed."""

_DOWN_S = 30.0  # with `fallback`: pause before a server that failed is asked again
_WAIT_S, _LONGEST_WAIT_S = 1.0, 30.0
_REPEAT_S = 0.5  # pause before the first repetition of an unreadable reply; doubles, as in the openai client
_LOG_EVERY_S = 60.0
_CHECK_EVERY_S = 0.5
_CLOSE_S = 2.0


class _DownError(Exception):
    """The server does not answer, also after the retries."""


class Judge:
    """Asks for verdicts. May be used from several threads.

    Args:
        config: the server, the model, and what to do while it is down.
        cache: SQLite file of replies; None: replies are not kept.
        waiting: names what waits for a server that is down, for the log line; None: a server that is down is an error.
        log: receives a line for the user, now and then while the server is down.
        check: called regularly by threads that wait for a verdict; raises to stop the wait.
    """

    def __init__(
        self,
        config: JudgeConfig,
        cache: Path | None = None,
        *,
        waiting: str | None = "training",
        log: Callable[[str], None] = lambda _text: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        if config.url is None:
            raise UserError(
                "the reward needs a judge: give reward.judge.url=http://HOST:PORT/v1 and reward.judge.model=NAME"
            )
        if not config.model:
            raise UserError("reward.judge.model is missing: name the model that reward.judge.url serves")
        self._config = config
        self._replies = Replies(cache)
        self._waiting, self._log, self._check = waiting, log, check
        # Guarded by the lock.
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        # Used by the loop's thread only.
        self._client: AsyncOpenAI | None = None
        self._slots = asyncio.Semaphore(config.concurrency)
        self._question_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._down_until = self._logged_at = 0.0

    def ask(self, questions: Sequence[JudgeQuestion]) -> list[str | None]:
        """Return a verdict for each question, in this order; None (counted) if there is none and the caller's rules
        decide.

        Raises:
            UserError: the server refuses the key or does not know the model or address; or it is down and `waiting` is
                None.
        """
        unique = list(dict.fromkeys(questions))
        answers = self._submit(unique)
        if answers is None:
            return [None] * len(questions)
        try:
            while not wait([answers], _CHECK_EVERY_S).done:
                self._check()
        except BaseException:
            answers.cancel()
            raise
        try:
            verdicts = dict(zip(unique, answers.result(), strict=True))
        except CancelledError:  # by `close`
            return [None] * len(questions)
        return [verdicts[question] for question in questions]

    def take_counts(self) -> dict[str, float]:
        """Return the `COUNTERS` since the last call."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return {name: counts[name] for name in COUNTERS}

    def close(self) -> None:
        """Cancel requests in flight and refuse new ones; waiting callers get no verdict."""
        with self._lock:
            loop, self._loop, self._closed = self._loop, None, True
        if loop is not None and self._thread is not None:
            asyncio.run_coroutine_threadsafe(self._end(), loop)
            self._thread.join(_CLOSE_S)
        self._replies.close()

    def _submit(self, questions: Sequence[JudgeQuestion]) -> "Future[list[str | None]] | None":
        """Hand the questions to the loop, which the first call starts; None once the judge is closed."""
        with self._lock:
            if self._closed:
                return None
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                # A daemon, so that a process that ends without `close` does not wait for the server.
                self._thread = threading.Thread(target=_run, args=(self._loop,), name="judge", daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(self._verdicts(questions), self._loop)

    async def _verdicts(self, questions: Sequence[JudgeQuestion]) -> list[str | None]:
        try:
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(self._verdict(question)) for question in questions]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in asked]

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._client is not None:
            await self._client.close()
        asyncio.get_running_loop().stop()

    async def _verdict(self, question: JudgeQuestion) -> str | None:
        key = self._replies.key(self._config.model, question.system, question.user)
        # Callers with the same question wait for the reply to the first of them.
        async with self._question_locks.setdefault(key, asyncio.Lock()):
            reply = self._replies.get(key)
            if reply is not None:
                self._count("cached")
                return read_verdict(reply, question)
            async with self._slots:
                reply = await self._ask_until_answered(question)
            if reply is None:
                return None
            verdict = read_verdict(reply, question)
            if verdict is None:
                self._count("unreadable")
            else:
                self._replies.put(key, reply)
            return verdict

    async def _ask_until_answered(self, question: JudgeQuestion) -> str | None:
        fallback, pause_s = self._config.when_down == "fallback", _WAIT_S
        while True:
            if fallback and time.monotonic() < self._down_until:
                self._count("fallbacks")
                return None
            try:
                return await self._reply(question)
            except _DownError as error:
                if fallback:
                    self._log_down(f"{error}", "answers are scored by rule for now")
                    self._down_until = time.monotonic() + _DOWN_S
                    continue
                if self._waiting is None:
                    raise UserError(
                        f"the judge at {self._config.url} does not answer ({error}): check reward.judge.url and that "
                        "its server is running"
                    ) from None
                self._log_down(f"{error}", f"{self._waiting} waits for it")
                beat()  # this is not a hang
            await self._sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_WAIT_S)

    async def _reply(self, question: JudgeQuestion) -> str:
        """Return the server's reply; an unreadable reply is repeated as often as a failure."""
        from arpo_megatron.utils.chat_client import UnreadableReplyError

        self._count("asked")
        for number in range(self._config.retries):
            try:
                return await self._reply_once(question)
            except UnreadableReplyError:
                self._count("repeated")
                await asyncio.sleep(min(_REPEAT_S * 2**number, _LONGEST_WAIT_S))
        try:
            return await self._reply_once(question)
        except UnreadableReplyError as error:
            raise _DownError(str(error)) from None

    async def _reply_once(self, question: JudgeQuestion) -> str:
        import openai

        from arpo_megatron.utils import chat_client

        try:
            found = await chat_client.complete(
                self._connect(),
                model=self._config.model,
                messages=[
                    *([{"role": "system", "content": question.system}] if question.system else []),
                    {"role": "user", "content": question.user},
                ],
                temperature=0.0,
                max_tokens=self._config.max_tokens,
            )
        except openai.OpenAIError as error:
            trouble = chat_client.Trouble.SERVER
            if isinstance(error, openai.APIStatusError):
                trouble = chat_client.classify_status(error.status_code)
                if trouble is chat_client.Trouble.ACCESS:
                    raise UserError(
                        f"the judge at {self._config.url} answers {error.status_code} for {self._config.model!r}: "
                        "check reward.judge.url, reward.judge.model and the key in $" + self._config.api_key_env
                    ) from None
            if trouble is chat_client.Trouble.REQUEST:
                return ""  # the server is up but refuses this question (too long, for example): no verdict
            self._count("repeated", self._config.retries)
            raise _DownError(f"{type(error).__name__}: {error}") from None
        self._count("repeated", found.repeated)
        return found.text

    def _connect(self) -> "AsyncOpenAI":
        from arpo_megatron.utils.chat_client import open_client

        if self._client is None:
            assert self._config.url is not None
            key = os.environ.get(self._config.api_key_env)
            self._client = open_client(
                self._config.url, key=key, deadline_s=self._config.timeout_s, retries=self._config.retries
            )
        return self._client

    async def _sleep(self, seconds: float) -> None:
        begun = time.monotonic()
        try:
            await asyncio.sleep(seconds)
        finally:
            self._count("waited_s", time.monotonic() - begun)

    def _log_down(self, reason: str, consequence: str) -> None:
        now = time.monotonic()
        if not self._logged_at or now - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = now
            self._log(f"the judge at {self._config.url} is down ({reason}): {consequence}")

    def _count(self, name: str, amount: float = 1) -> None:
        with self._lock:
            self._counts[name] += amount  # type: ignore[assignment]  # seconds are counted too


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def read_verdict(reply: str, question: JudgeQuestion) -> str | None:
    """Return the verdict of a reply, the word after the question's code; None if there is none or several differ."""
    if not question.code:
        text = reply.lower()
        negative = any(words in text for words in ("incorrect", "wrong", "not correct"))
        return None if not text.strip() else CORRECT if "correct" in text and not negative else INCORRECT
    words = re.findall(rf"VERDICT\W+{question.code}\W+([A-Z]+)", reply)
    return words[0] if len(set(words)) == 1 and words[0] in question.verdicts else None
