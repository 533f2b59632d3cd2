"""The rollout process: one event loop, in which the trees of a `TreePool` grow (see `service`)."""

import asyncio
import os
import resource
import signal
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer  # type: ignore[import-untyped]

from arpo_megatron.errors import UserError
from arpo_megatron.processes import watch_parent
from arpo_megatron.rollout.client import EngineClient
from arpo_megatron.rollout.policies import BranchPolicy, GrpoPolicy, make_policy
from arpo_megatron.rollout.pool import TreePool
from arpo_megatron.rollout.service import (
    CollectTrees,
    Failure,
    FinishTrees,
    GrowSettings,
    Pause,
    Resume,
    ServiceSettings,
    StaleEnginesError,
    StartTrees,
    StopTrees,
)
from arpo_megatron.rollout.tools import ToolClient


class TokenizerCodec:
    """The tokenizer.json of a Hugging Face directory as a `TextCodec`.

    Read without transformers, whose import (with torch) takes seconds and hundreds of megabytes that this process has
    no use for.
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
        """Text -> ids, nothing added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Text -> ids; what spells a special token in it becomes ordinary ones."""
        self._tokenizer.encode_special_tokens = True
        try:
            return self.encode(text)
        finally:
            self._tokenizer.encode_special_tokens = False

    def decode(self, token_ids: Sequence[int]) -> str:
        """Ids -> text, special tokens kept."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text


class RolloutWorker:
    """Answers the requests of a `RolloutHandle` from one event loop; trees grow on between them."""

    def __init__(self, settings: ServiceSettings, connection: "Connection[Any, Any]") -> None:
        self._settings = settings
        self._connection = connection
        self._codec = TokenizerCodec(settings.tokenizer_path)

    async def serve(self) -> None:
        """Until the other end is closed."""
        settings = self._settings
        engine = EngineClient(
            *settings.engine_urls,
            router=settings.router_url,
            request_timeout_s=settings.request_timeout_s,
            retry_for_s=settings.retry_for_s,
        )
        tools = ToolClient(settings.sandbox_url, settings.sandbox_token, retry_for_s=settings.retry_for_s)
        async with engine, tools:
            pool = TreePool(engine, tools, self._codec, settings.seed, self._connection.send, settings.routes)
            engine.on_stale = pool.note_stale
            try:
                while True:
                    request = await asyncio.to_thread(self._connection.recv)
                    try:
                        answer = await self._answer(pool, request)
                    except StaleEnginesError as stale:
                        answer = stale
                    self._connection.send(answer)
            finally:
                await pool.close()

    async def _answer(self, pool: TreePool, request: object) -> object:
        match request:
            case CollectTrees():
                return await pool.collect(request)
            case StartTrees():
                pool.start(request, self._policy(request.settings))
            case FinishTrees(group):
                await pool.finish(group)
            case StopTrees(group):
                await pool.stop(group)
            case Pause():
                await pool.pause()
            case Resume(version):
                pool.resume(version)
            case _:
                raise TypeError(f"not a request: {request!r}")
        return None

    def _policy(self, settings: GrowSettings) -> BranchPolicy:
        if settings.branching is None:
            return GrpoPolicy(settings.samples)
        return make_policy(settings.branching, vocabulary_size=self._codec.vocabulary_size, seed=self._settings.seed)


def main(arguments: Sequence[str]) -> None:
    """Answer requests until the other end is closed or its owner is gone."""
    descriptor, parent_pid = map(int, arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches the trainer too, which then ends this process
    watch_parent(parent_pid, lambda: os._exit(1))
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # a connection for each path that waits
    connection: Connection[Any, Any] = Connection(descriptor)
    try:
        worker = RolloutWorker(connection.recv(), connection)
        connection.send(None)  # ready
        asyncio.run(worker.serve())
    except (EOFError, ConnectionError):
        pass
    except Exception as error:
        connection.send(Failure(traceback.format_exc(), str(error) if isinstance(error, UserError) else None))
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
