"""The rollout process: one event loop in which the trees of a `TreePool` grow.

    python -m arpo_megatron.rollout.worker SOCKET PORT

It serves one connection of a trainer (`handle`) at a time at SOCKET, and answers health checks at PORT. A connection
begins with the trees to grow; they are stopped when it ends.
"""

import asyncio
import gc
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import lru_cache
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer

from arpo_megatron.algorithms.branching import BranchPolicy, GrpoPolicy, make_branch_policy
from arpo_megatron.engine.client import EngineClient
from arpo_megatron.engine.function_calls import CallParser
from arpo_megatron.engine.version import streams_entropies
from arpo_megatron.errors import UserError
from arpo_megatron.rollout.admission_gate import AdmissionGate
from arpo_megatron.rollout.connection import Outbox, hang_up
from arpo_megatron.rollout.garbage import collect_on_demand
from arpo_megatron.rollout.messages import (
    CollectTrees,
    Failure,
    FinishedTree,
    FinishTrees,
    Pause,
    RecordEntry,
    ReportPart,
    Restore,
    Resume,
    RolloutReport,
    RolloutSettings,
    ServiceSettings,
    StaleEnginesError,
    StartTrees,
    StopTrees,
)
from arpo_megatron.rollout.pool import TreePool
from arpo_megatron.rollout.tools import ToolClient
from arpo_megatron.tasks.environments.build import environment_maker
from arpo_megatron.tasks.environments.protocol import EnvironmentProtocol
from arpo_megatron.tasks.protocols.base import CallProtocol
from arpo_megatron.tasks.protocols.build import make_protocol
from arpo_megatron.tree import RolloutTree
from arpo_megatron.utils.processes import raise_file_limit


class TokenizerCodec:
    """The tokenizer.json of a Hugging Face directory as a `TextCodec`.

    It does without transformers, whose import (with torch) takes seconds and hundreds of megabytes.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"{path} is missing: save the model's fast tokenizer there (tokenizer.save_pretrained)")
        self._tokenizer = Tokenizer.from_file(str(path))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocabulary_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Encode text without adding special tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Encode text; the spelling of a special token in it becomes ordinary tokens."""
        self._tokenizer.encode_special_tokens = True
        try:
            return self.encode(text)
        finally:
            self._tokenizer.encode_special_tokens = False

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode ids, with special tokens kept."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text


class TrainerConnection:
    """One connection. Its trees grow until it ends, also between requests."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self._connection = connection
        self._outbox = Outbox(connection)
        self._requests: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self._request = 0  # id of the request that is being answered

    async def serve(self) -> None:
        """Serve requests until the other end is closed; that also ends a request in progress."""
        reading, answering = asyncio.create_task(self._read()), asyncio.create_task(self._serve())
        try:
            done, _ = await asyncio.wait((reading, answering), return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()
        except Exception as error:
            traceback.print_exc()
            self._send(Failure(traceback.format_exc(), str(error) if isinstance(error, UserError) else None))
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
            await asyncio.to_thread(self._outbox.close)
            hang_up(self._connection)
            await asyncio.gather(reading, return_exceptions=True)
            self._connection.close()

    async def _read(self) -> None:
        """Read requests, also while one is in progress, so that a closed connection is noticed at once."""
        with suppress(EOFError, OSError):
            while True:
                self._requests.put_nowait(await asyncio.to_thread(self._connection.recv))

    async def _serve(self) -> None:
        self._request, first = await self._requests.get()
        assert isinstance(first, Restore)
        settings = first.settings
        codec = TokenizerCodec(settings.tokenizer_path)

        @lru_cache
        def policy(trees: RolloutSettings) -> BranchPolicy:
            if trees.branching is None:
                return GrpoPolicy(trees.group_size)
            return make_branch_policy(trees.branching, vocabulary_size=codec.vocabulary_size, seed=settings.seed)

        engine = EngineClient(
            *settings.engine_urls,
            router=settings.router_url,
            token=settings.engine_token,
            request_timeout_s=settings.request_timeout_s,
            retry_for_s=settings.retry_for_s,
            keeps_kv=settings.keeps_kv,
            streams=streams_entropies(),
            by_age=settings.priority == "age",
        )
        tools = ToolClient(settings.sandbox_url, settings.sandbox_token, retry_for_s=settings.retry_for_s)
        parse = CallParser(*settings.engine_urls, token=settings.engine_token, retry_for_s=settings.retry_for_s)
        gate = AdmissionGate(engine, codec) if settings.admission == "kv" else nullcontext()
        async with engine, tools, parse, gate as admission:
            pool = TreePool(
                engine=engine,
                tools=tools,
                codec=codec,
                seed=settings.seed,
                policy=policy,
                send=self._send,
                record=self._record,
                expert_routes=settings.expert_routes,
                protocol=await _protocol(settings, tools, parse),
                admission=admission,
                make_environment=None
                if settings.environment is None
                else environment_maker(settings.environment, settings.environment_params),
                finished=self._finished,
            )
            engine.on_stale = pool.note_stale
            try:
                if first.paused:
                    engine.hold()
                await pool.start(first.start)
                self._send(None)
                await self._answer_requests(pool)
            finally:
                await pool.close()

    async def _answer_requests(self, pool: TreePool) -> None:
        collected = False  # since trees have grown
        while True:
            self._request, request = await self._requests.get()
            try:
                self._send(await _answer(pool, request))
            except StaleEnginesError as stale:
                self._send(stale)
            if pool.growing and not isinstance(request, Pause):
                collected = False
            elif not collected:
                await self._outbox.sent()  # the collection keeps the interpreter's lock: nothing is sent in it
                gc.collect()
                collected = True

    def _send(self, answer: object) -> None:
        if isinstance(answer, RolloutReport):
            for part in map(ReportPart, answer.failed):
                self._outbox.put((self._request, part))
            answer = replace(answer, trees=[], failed=[])  # the finished ones were sent at their end
        self._outbox.put((self._request, answer))

    def _finished(self, number: int, tree: RolloutTree) -> None:
        self._outbox.put(FinishedTree(number, tree))

    def _record(self, number: int, entry: bytes) -> None:
        self._outbox.put(RecordEntry(number, entry))


async def _protocol(settings: ServiceSettings, tools: ToolClient, parse: CallParser) -> CallProtocol:
    """Return the call protocol with the tools of the job, or that of its environment."""
    if settings.environment is not None:
        return EnvironmentProtocol(settings.tokenizer_path)
    return make_protocol(
        settings.protocol,
        await tools.select(settings.tools),
        parser=settings.tool_call_parser,
        model=settings.tokenizer_path,
        parse=parse,
    )


async def _answer(pool: TreePool, request: object) -> object:
    match request:
        case CollectTrees():
            return await pool.collect(request)
        case StartTrees():
            await pool.start(request)
        case FinishTrees(purpose):
            await pool.finish(purpose)
        case StopTrees(purpose):
            return await pool.stop(purpose)
        case Pause():
            await pool.pause()
        case Resume(version):
            pool.resume(version)
        case _:
            raise TypeError(f"not a request: {request!r}")
    return None


async def _alive(_request: web.Request) -> web.Response:
    return web.Response()


async def serve(path: Path, port: int) -> None:
    """Serve connections at the socket `path`, one after the other, until the process is killed."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = path.parent.stat()
    if owner.st_uid != os.getuid() or owner.st_mode & 0o077:  # messages are pickled, so only this user may send them
        raise PermissionError(f"{path.parent} must belong to this user alone")
    path.unlink(missing_ok=True)  # left by a killed process
    with Listener(str(path), "AF_UNIX") as listener:
        app = web.Application()
        app.router.add_get("/health", _alive)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        while True:
            await TrainerConnection(await asyncio.to_thread(listener.accept)).serve()


def main(arguments: Sequence[str]) -> None:
    """Run the rollout process until its launcher kills it."""
    path, port = arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the job, which then kills this process
    raise_file_limit()  # one connection for each waiting path
    collect_on_demand()
    asyncio.run(serve(Path(path), int(port)))


if __name__ == "__main__":
    main(sys.argv[1:])
