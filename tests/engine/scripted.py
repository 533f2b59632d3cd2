"""A scripted engine.

It exists for the script alone: a random model cannot be made to call a tool at a given place. It speaks the engine's
HTTP interface, token ids in and out, and keeps a radix cache's account of what each request finds. `test_engine`
tests the real engine.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from arpo_megatron.engine.capacity import EngineCapacity
from arpo_megatron.engine.wire.endpoints import INCARNATION_HEADER

END = 0  # the scripted engine's end-of-sequence token


class CharacterCodec:
    """One token per character, so each tag is many tokens."""

    vocabulary_size = 0x110000

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    encode_plain = encode  # there are no special tokens

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


@dataclass
class ScriptedEngine:
    """Continues a text with `script(text)`; each answer ends with END unless a limit or stop string comes first."""

    script: Callable[[str], str]
    """Whole text so far -> everything that follows."""
    seeded: Callable[[str, int], str] | None = None
    """(Whole text so far, the request's sampling seed) -> everything that follows; replaces `script`."""
    delay_s: Callable[[str], float] = lambda _text: 0.0
    """Text so far -> seconds before the answer."""
    fail_first: int = 0
    """Number of requests that are answered with 503 at first."""
    cuts: int = 0
    """Number of streams that end early."""
    piece_s: float = 0.0
    """Seconds before each piece of a stream."""
    incarnation: str = "first"
    """Process that answers; "" for an engine without the header."""
    capacity: EngineCapacity | None = None
    """Sizes that it reports; None for an engine that reports none."""
    running: int = 0
    most_running: int = 0
    """Most requests at the same time."""
    fails: Callable[[dict[str, Any]], bool] = lambda _body: False
    """Whether a request is answered with 500."""
    aborts: bool = False
    """Whether answers end as aborted ones."""
    version: int = 7
    """Policy version in the answers."""
    look_s: float = 0.0
    """Seconds that a request for the version takes."""
    looks: int = 0
    """Number of such requests."""
    answered: int = 0
    """Number of answers of more than two tokens."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    _kept: set[tuple[int, ...]] = field(default_factory=set)

    @property
    def headers(self) -> dict[str, str]:
        return {INCARNATION_HEADER: self.incarnation} if self.incarnation else {}

    def _cached(self, ids: Sequence[int]) -> int:
        """Return the length of the longest prefix of an earlier request, at most all but the last token."""
        length = len(ids) - 1
        while length > 0 and tuple(ids[:length]) not in self._kept:
            length -= 1
        return max(length, 0)

    def _keep(self, ids: Sequence[int]) -> None:
        self._kept |= {tuple(ids[:length]) for length in range(1, len(ids) + 1)}

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._generate(request)
        finally:
            self.running -= 1

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        if self.fail_first > 0:
            self.fail_first -= 1
            return web.Response(status=503)
        if self.fails(body):
            return web.Response(status=500, headers=self.headers)
        ids, parameters = body["input_ids"], body["sampling_params"]
        text = "".join(map(chr, ids))
        cached = self._cached(ids)
        await asyncio.sleep(self.delay_s(text))
        rest = self.script(text) if self.seeded is None else self.seeded(text, parameters.get("sampling_seed", 0))
        output, reason = self._continue(rest, parameters["max_new_tokens"], parameters.get("stop", []))
        reason = {"type": "abort"} if self.aborts else reason
        self._keep(ids + output[:-1])  # the last sampled token was never fed to the model
        self.answered += len(output) > 2
        meta: dict[str, Any] = {
            "finish_reason": reason,
            "prompt_tokens": len(ids),
            "cached_tokens": cached,
            "weight_version": str(self.version),
            "output_token_logprobs": [[-0.5, token, None] for token in output],
            "entropy": [1.0 + token / 1000 for token in output],
        }
        if body.get("stream"):
            return await self._stream(request, output, meta, parameters.get("stream_interval", 2))
        return web.json_response({"output_ids": output, "meta_info": meta}, headers=self.headers)

    async def _stream(
        self, request: web.Request, output: list[int], meta: dict[str, Any], interval: int
    ) -> web.StreamResponse:
        """Send pieces with all tokens so far, as SGLang does; `cuts` of them end after the second one."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **self.headers})
        await response.prepare(request)
        for end in [*range(1, len(output), interval), len(output)]:
            last = end == len(output)
            now = meta | {"completion_tokens": end, "finish_reason": meta["finish_reason"] if last else None}
            now |= {name: meta[name][:end] for name in ("output_token_logprobs", "entropy")}
            await asyncio.sleep(self.piece_s)
            if last and end > interval + 1 and self.cuts:
                self.cuts -= 1
                break
            await response.write(f"data: {json.dumps({'output_ids': output[:end], 'meta_info': now})}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def server_info(self, _request: web.Request) -> web.Response:
        if self.capacity is None:
            return web.json_response({})
        return web.json_response(
            {"max_total_num_tokens": self.capacity.tokens, "max_running_requests": self.capacity.requests}
        )

    async def done(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def model_info(self, _request: web.Request) -> web.Response:
        self.looks += 1
        await asyncio.sleep(self.look_s)
        return web.json_response({"weight_version": str(self.version)}, headers=self.headers)

    @staticmethod
    def _continue(rest: str, limit: int, stops: Sequence[str]) -> tuple[list[int], dict[str, Any]]:
        output: list[int] = []
        for character in rest + chr(END):
            if len(output) == limit:
                return output, {"type": "length", "length": limit}
            output.append(ord(character))
            new = "".join(map(chr, output))
            if matched := next((stop for stop in stops if new.endswith(stop)), None):
                return output, {"type": "stop", "matched": matched}
        return output, {"type": "stop", "matched": END}
