"""The rollout process: one event loop for each call, one `TreeGrower` for each task (see `service`)."""

import asyncio
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer  # type: ignore[import-untyped]

from arpo_megatron.errors import UserError
from arpo_megatron.processes import watch_parent
from arpo_megatron.rollout.accounting import GrowCounts, common_prefix_length, grow_stats
from arpo_megatron.rollout.client import EngineClient, EngineRefusedError, EngineUnavailableError, Sampling
from arpo_megatron.rollout.grower import GrowContext, PromptTooLongError, TreeGrower
from arpo_megatron.rollout.policies import BranchPolicy, GrpoPolicy, make_policy
from arpo_megatron.rollout.service import Failure, GrowProgress, GrowReport, GrowRequest, GrowSettings, ServiceSettings
from arpo_megatron.tree import Int32Array, RolloutTree
from tools_sandbox.client import AsyncSandboxClient, SandboxError

_PROGRESS_INTERVAL_S = 0.25

TREE_FAILURES = (EngineUnavailableError, EngineRefusedError, SandboxError, PromptTooLongError)
"""What makes a tree a failed one. Anything else is a defect and ends the call with its traceback."""


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

    def decode(self, token_ids: Sequence[int]) -> str:
        """Ids -> text, special tokens kept."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text


class RolloutWorker:
    """Answers `GrowRequest`s. `send` is called with a `GrowProgress` now and then while a call runs."""

    def __init__(self, settings: ServiceSettings, send: Callable[[GrowProgress], None]) -> None:
        self._settings = settings
        self._send = send
        self._codec = TokenizerCodec(settings.tokenizer_path)

    def grow(self, request: GrowRequest) -> GrowReport:
        """Grow all trees of a request."""
        return asyncio.run(self._grow(request))

    async def _grow(self, request: GrowRequest) -> GrowReport:
        started = time.monotonic()
        settings, policy = self._settings, self._policy(request.settings)
        meter = _Meter(len(request.tasks), self._send)
        engine = EngineClient(
            settings.engine_url, request_timeout_s=settings.request_timeout_s, retry_for_s=settings.retry_for_s
        )
        async with engine, AsyncSandboxClient(settings.sandbox_url, settings.sandbox_token) as sandbox:
            context = GrowContext(
                engine=engine,
                sandbox=sandbox,
                codec=self._codec,
                policy=policy,
                sampling=Sampling(request.settings.temperature, request.settings.top_p),
                limits=request.settings.limits,
                step=request.step,
                version=request.version,
                on_tokens=meter.add_tokens,
            )
            prompts = [np.array(self._codec.encode(task.prompt_text), dtype=np.int32) for task in request.tasks]
            growers = [
                TreeGrower(task.id, prompt, context) for task, prompt in zip(request.tasks, prompts, strict=True)
            ]
            counts = GrowCounts()
            results: list[RolloutTree | Exception] = []
            try:
                counts.add(await _prefill_common(prompts, engine))
            except TREE_FAILURES as error:
                results = [error for _ in growers]
            else:
                results = await _grow_all(growers, meter)
        for grower in growers:
            counts.add(grower.counts)
        trees = [result for result in results if isinstance(result, RolloutTree)]
        failed = [
            (task.id, f"{type(result).__name__}: {result}")
            for task, result in zip(request.tasks, results, strict=True)
            if isinstance(result, Exception)
        ]
        seconds = time.monotonic() - started
        return GrowReport(trees, failed, grow_stats(trees, counts, policy, failed=len(failed), seconds=seconds))

    def _policy(self, settings: GrowSettings) -> BranchPolicy:
        if settings.branching is None:
            return GrpoPolicy(settings.samples)
        return make_policy(settings.branching, vocabulary_size=self._codec.vocabulary_size, seed=self._settings.seed)


class _Meter:
    """Counts what has been sampled and sends it, at most every quarter of a second and at the end of each tree."""

    def __init__(self, trees: int, send: Callable[[GrowProgress], None]) -> None:
        self._trees = trees
        self._send = send
        self._done = 0
        self._tokens = 0
        self._sent_at = time.monotonic()

    def add_tokens(self, tokens: int) -> None:
        self._tokens += tokens
        if time.monotonic() - self._sent_at >= _PROGRESS_INTERVAL_S:
            self._report()

    def add_tree(self) -> None:
        self._done += 1
        self._report()

    def _report(self) -> None:
        self._sent_at = time.monotonic()
        self._send(GrowProgress(self._done, self._trees, self._tokens))


async def _grow_all(growers: Sequence[TreeGrower], meter: _Meter) -> list[RolloutTree | Exception]:
    """A tree or the reason why there is none, for each grower. A defect in one ends all, and is raised."""

    async def grow_one(grower: TreeGrower) -> RolloutTree | Exception:
        try:
            return await grower.grow()
        except TREE_FAILURES as error:
            return error
        finally:
            meter.add_tree()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(grow_one(grower)) for grower in growers]
    return [task.result() for task in tasks]


async def _prefill_common(prompts: Sequence[Int32Array], engine: EngineClient) -> GrowCounts:
    """Put what all prompts begin with (a system prompt) into the engine's cache, before they all compute it at once."""
    shared = common_prefix_length(prompts)
    if not shared:
        return GrowCounts()
    prompt_tokens, cached_tokens = await engine.prefill(prompts[0][:shared])
    return GrowCounts(requests=1, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)


def main(arguments: Sequence[str]) -> None:
    """Answer requests until the other end is closed or its owner is gone."""
    descriptor, parent_pid = map(int, arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches the trainer too, which then ends this process
    watch_parent(parent_pid, lambda: os._exit(1))
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # a connection for each path that waits
    connection: Connection[Any, Any] = Connection(descriptor)
    try:
        worker = RolloutWorker(connection.recv(), connection.send)
        connection.send(None)  # ready
        while True:
            connection.send(worker.grow(connection.recv()))
    except (EOFError, ConnectionError):
        pass
    except Exception as error:
        connection.send(Failure(traceback.format_exc(), str(error) if isinstance(error, UserError) else None))
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
