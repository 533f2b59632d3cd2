"""Runs episodes of the `verifiers` package for a training job, in its own interpreter: `python worker.py CONFIG.toml`.

The job's interpreter never imports this file, and this file imports nothing of the job: their dependencies differ.
A verifiers environment calls an OpenAI-compatible endpoint for each turn of the model. The endpoint here hands the
request to the job and answers it with the turn that the job sends. Commands come as JSON lines on the standard input,
and results go to the standard output; each result has the number of its command.
"""

import asyncio
import json
import os
import secrets
import sys
import time
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

try:
    import verifiers.v1 as vf
    from aiohttp import web
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config
except ImportError as missing:
    if __name__ != "__main__":
        raise
    sys.exit(f"{sys.executable} cannot import verifiers 0.4 or later ({missing}): pip install 'verifiers>=0.4' there")

Json = dict[str, Any]
KEY_VARIABLE = "ARPO_VERIFIERS_KEY"


class EpisodeError(RuntimeError):
    """An episode cannot be trained on; the text has the reason."""


class Conversation:
    """One episode, seen as a conversation: the environment's messages, then the model's turn, and so on."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[tuple[Json, asyncio.Future[Json]]] = asyncio.Queue()
        self.episode: asyncio.Task[vf.Episode] | None = None
        self._known: list[Json] = []
        self._waiting: asyncio.Future[Json] | None = None

    async def answer(self, message: Json) -> Json:
        """Give the environment the model's turn; return what follows."""
        if self._waiting is None or self._waiting.done():
            raise EpisodeError("the environment does not wait for a turn of the model")
        self._waiting.set_result(message)
        self._known.append(message)
        return await self.next()

    async def next(self) -> Json:
        """Return the messages since the model's last turn, or the rewards of the finished episode."""
        assert self.episode is not None
        request = asyncio.ensure_future(self.requests.get())
        await asyncio.wait((request, self.episode), return_when=asyncio.FIRST_COMPLETED)
        if not request.done():
            request.cancel()
            return {"done": True, "rewards": _rewards(await self.episode)}
        body, self._waiting = request.result()
        messages = body["messages"]
        if [each["role"] for each in messages[: len(self._known)]] != [each["role"] for each in self._known]:
            raise EpisodeError("the environment began another conversation with the model, or rewrote this one")
        new, self._known = messages[len(self._known) :], list(messages)
        return {"done": False, "messages": new, "tools": body.get("tools") or []}


class Worker:
    """A `verifiers` environment and its open episodes, in the environment's own process."""

    def __init__(self, config: Path) -> None:
        self._env = load_environment(resolve_env_config(tomllib.loads(config.read_text())))
        self._stream = iter(self._env.taskset)
        self._tasks: list[vf.Task] = []
        self._conversations: dict[str, Conversation] = {}
        self._url = ""
        os.environ[KEY_VARIABLE] = self._key = secrets.token_hex(16)

    async def serve(self, commands: asyncio.StreamReader, results: TextIO) -> None:
        """Execute commands until their stream ends."""
        application = web.Application(client_max_size=1 << 28)
        application.router.add_post("/{episode}/v1/chat/completions", self._complete)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._url = "http://127.0.0.1:{1}".format(*runner.addresses[0])
        running = set[asyncio.Task[None]]()
        async with self._env.serving():
            while line := await commands.readline():
                task = asyncio.create_task(self._execute(json.loads(line), results))
                running.add(task)
                task.add_done_callback(running.discard)
            for episode in list(self._conversations):
                await self._do_close(episode)
        await runner.cleanup()

    async def _execute(self, command: Json, results: TextIO) -> None:
        try:
            result = await getattr(self, f"_do_{command['op']}")(**command["arguments"])
        except Exception as error:  # an environment is somebody's code: anything can go wrong in it
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"id": command["id"], **result}), file=results, flush=True)

    async def _do_count(self, limit: int) -> Json:
        self._read(limit)
        return {"count": min(limit, len(self._tasks))}

    async def _do_reset(self, episode: str, index: int) -> Json:
        self._read(index + 1)
        if index >= len(self._tasks):
            raise EpisodeError(f"the taskset has no task {index}; it has {len(self._tasks)}")
        self._conversations[episode] = conversation = Conversation()
        client = vf.EvalClientConfig(base_url=f"{self._url}/{episode}/v1", api_key_var=KEY_VARIABLE)
        run = self._env.run_episode(self._tasks[index], vf.ModelContext(model="policy", client=client))
        conversation.episode = asyncio.create_task(run)
        return await conversation.next()

    async def _do_step(self, episode: str, message: Json) -> Json:
        return await self._conversations[episode].answer(message)

    async def _do_close(self, episode: str) -> Json:
        if (conversation := self._conversations.pop(episode, None)) is not None and conversation.episode is not None:
            conversation.episode.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await conversation.episode
        return {}

    def _read(self, count: int) -> None:
        self._tasks.extend(islice(self._stream, max(0, count - len(self._tasks))))

    async def _complete(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {self._key}":
            return web.json_response({"error": {"message": "no permission"}}, status=401)
        conversation = self._conversations.get(request.match_info["episode"])
        if conversation is None:
            return web.json_response({"error": {"message": "the episode has ended"}}, status=400)
        body = await request.json()
        turn: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        conversation.requests.put_nowait((body, turn))
        message = await turn
        if body.get("stream"):
            return web.Response(text=_events(message), content_type="text/event-stream")
        return web.json_response(_completion("chat.completion", "message", message))


def _completion(kind: str, key: str, message: Json) -> Json:
    end = "tool_calls" if "tool_calls" in message else "stop"
    choice = {"index": 0, key: message, "finish_reason": end}
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    head = {"id": secrets.token_hex(8), "object": kind, "created": int(time.time()), "model": "policy"}
    return {**head, "choices": [choice], "usage": usage}


def _events(message: Json) -> str:
    """Return the turn as a stream with a single part."""
    calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls", ()))]
    delta = {**message, "tool_calls": calls} if calls else message
    chunk = _completion("chat.completion.chunk", "delta", delta)
    return f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"


def _rewards(episode: vf.Episode) -> Mapping[str, float]:
    """Return the weighted rewards of the episode's trained agent."""
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise EpisodeError(f"{errors[0].type}: {errors[0].message}" if errors else "the episode failed")
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if len(trained) != 1:
        raise EpisodeError(f"the environment trains {len(trained)} agents in an episode; only one is supported")
    rewards = trained[0].rewards
    if missing := [name for name, reward in rewards.items() if reward is None]:
        raise EpisodeError(f"reward {missing[0]!r} was not computed")
    return {name: reward.value for name, reward in rewards.items() if reward is not None}


async def _main(config: Path, results: TextIO) -> None:
    try:
        worker = Worker(config)
    except Exception as error:  # a package's code
        sys.exit(f"{config}: {type(error).__name__}: {error}")
    commands = asyncio.StreamReader(limit=1 << 28)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    await worker.serve(commands, results)


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as channel:
        os.dup2(2, 1)  # what a library prints must not get between the results
        asyncio.run(_main(Path(sys.argv[1]), channel))
