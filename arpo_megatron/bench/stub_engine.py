"""An engine that answers over HTTP without a model, and fails on purpose: `python -m arpo_megatron.bench.stub_engine`.

It stands in for engines that one machine cannot have: thousands of requests at the same time, and each kind of failure
in a given share of them. It prints its port, serves until it is killed, and counts (GET /counts).
"""

import asyncio
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from arpo_megatron.engine.server.entropy import META_KEY
from arpo_megatron.utils.processes import raise_file_limit

FAILURES = ("http_500", "http_503", "reset", "cut", "garbage", "abort", "hang")
"""Kinds of failures: two statuses; the connection closes before the answer, or after its first tokens; the answer is
not JSON; the engine aborts the request; no answer comes."""


_LOGPROB, _ENTROPY = -1.2534027099609375, 1.5028748512268066
"""Log-prob and entropy of each token in nats, with the digits that a client has to parse."""


@dataclass(frozen=True, slots=True)
class StubSettings:
    """Answers, sizes and failures of the stub engine."""

    call: int
    """Token of a whole tool call, the last one of each answer."""
    segment: int = 24
    """Tokens of an answer."""
    answer_s: float = 0.2
    """Seconds before an answer, and between its two parts."""
    tokens: int = 2**40
    """Size of the KV pool that it reports."""
    requests: int = 1024
    """Most running requests; others wait in the order of their arrival."""
    failure_share: float = 0.0
    """Share of the requests with each kind of failure. The repeat of a request does not fail."""
    seed: int = 0


class StubEngine:
    """Answers one connection after another; see `StubSettings`."""

    def __init__(self, settings: StubSettings) -> None:
        self._settings = settings
        self._draw = random.Random(settings.seed)
        self._slots = asyncio.Semaphore(settings.requests)
        self._info = orjson.dumps(
            {"max_total_num_tokens": settings.tokens, "max_running_requests": settings.requests, "weight_version": "0"}
        )
        self._failed: set[bytes] = set()
        self.counts: Counter[str] = Counter()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
                path = head[0].split(b" ")[1]
                length = next((int(line[15:]) for line in head if line[:15].lower() == b"content-length:"), 0)
                body = await reader.readexactly(length)
                if path == b"/counts":
                    self._reply(writer, orjson.dumps(self.counts))
                elif path != b"/generate":
                    self._reply(writer, self._info)
                elif not await self._generate(reader, writer, body):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    async def _generate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, content: bytes) -> bool:
        """Answer a generation; return whether the connection stays open."""
        settings, body = self._settings, orjson.loads(content)
        number = int(self._draw.random() / settings.failure_share) if settings.failure_share else len(FAILURES)
        fails = FAILURES[number] if number < len(FAILURES) and content not in self._failed else ""
        self.counts["requests"] += 1
        self.counts["bytes"] += len(content)
        if fails:
            self._failed.add(content)
            self.counts[fails] += 1
        if fails not in ("", "cut", "abort"):
            await asyncio.sleep(3600.0 if fails == "hang" else settings.answer_s)
            return self._fail(writer, fails)
        if body.get("stream"):
            writer.write(_HEAD % (200, b"transfer-encoding: chunked\r\ncontent-type: text/event-stream"))
        async with self._slots:
            if reader.at_eof():  # the client has given it up
                return False
            return await self._run(writer, body, fails)

    def _fail(self, writer: asyncio.StreamWriter, fails: str) -> bool:
        if fails.startswith("http"):
            self._reply(writer, b"{}", status=int(fails[5:]))
        elif fails == "garbage":
            self._reply(writer, b'{"output_ids": [1, 2')
        return fails not in ("reset", "hang")

    async def _run(self, writer: asyncio.StreamWriter, body: dict[str, Any], fails: str) -> bool:
        """Answer a request that runs; the head of a streamed answer has been sent."""
        settings, parameters = self._settings, body["sampling_params"]
        count = min(parameters["max_new_tokens"], settings.segment)
        if count:
            await asyncio.sleep(settings.answer_s)
        answer = self._answer(body, count, aborted=fails == "abort")
        if not body.get("stream"):
            self._reply(writer, orjson.dumps(answer))
            return fails != "cut"
        first = parameters["stream_interval"] + 1
        if first < count or fails == "cut":
            part = self._answer(body, min(first, count), aborted=False)
            part["meta_info"]["finish_reason"] = None
            writer.write(_event(part))
            await asyncio.sleep(settings.answer_s)
        if fails == "cut":
            return False
        writer.write(_event(answer) + b"0\r\n\r\n")
        return True

    def _answer(self, body: dict[str, Any], count: int, *, aborted: bool) -> dict[str, Any]:
        settings, prompt = self._settings, len(body["input_ids"])
        called = count == settings.segment
        ids = [20] * count
        if called:
            ids[-1] = settings.call
        reason: dict[str, Any] = {"type": "stop", "matched": "</python>"} if called else {"type": "length"}
        meta = {
            "prompt_tokens": prompt,
            "cached_tokens": prompt - 1 if count else 0,
            "output_token_logprobs": [[_LOGPROB, 20, None]] * count,
            META_KEY: [_ENTROPY] * count,
            "finish_reason": {"type": "abort", "message": "on purpose"} if aborted else reason,
        }
        if aborted:
            ids, meta["output_token_logprobs"], meta[META_KEY] = [], [], []
        return {"text": "", "output_ids": ids, "meta_info": meta}

    @staticmethod
    def _reply(writer: asyncio.StreamWriter, body: bytes, status: int = 200) -> None:
        writer.write(_HEAD % (status, b"content-type: application/json\r\ncontent-length: %d" % len(body)) + body)


_HEAD = b"HTTP/1.1 %d X\r\nx-arpo-incarnation: stub\r\n%s\r\n\r\n"


def _event(answer: dict[str, Any]) -> bytes:
    data = b"data: " + orjson.dumps(answer) + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


async def _main(settings: StubSettings) -> None:
    server = await asyncio.start_server(StubEngine(settings).serve, "127.0.0.1", 0, limit=2**22, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def launch_stub(settings: StubSettings) -> Iterator[str]:
    """Run a stub engine in a process of its own; yield its URL."""
    command = [sys.executable, "-m", __name__, json.dumps(asdict(settings))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


if __name__ == "__main__":
    raise_file_limit()
    asyncio.run(_main(StubSettings(**json.loads(sys.argv[1]))))
