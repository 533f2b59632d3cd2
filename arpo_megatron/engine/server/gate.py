"""The gate of an engine: from the beginning of a weight push to its commit nothing is generated.

A push that is interrupted leaves a mixture of weights behind, so the gate stays closed (HTTP 503) until a whole push
has arrived, whoever sends it. So does an engine whose memory was lent: what it gets back holds no weights. Three
endpoints are added to SGLang's server:

    GET  /health/arpo                                     -> 200 while scheduler and detokenizer do their work
    POST /arpo/begin_push  {"version": N, "timeout_s": s}  -> {"ranks": n, "incarnation": "..."}
    POST /arpo/commit_push {"version": N, "loads": n, "timeout_s": s}

SGLang generates at many paths, under several methods, and a new version may have more. So what passes a closed gate is
listed, not what does not; whatever else is under way is waited for. SGLang's /health generates too: while the gate is
closed /health/arpo answers in its place, and /health_generate is refused.

Others reach a job's servers too, on a cluster from other machines, so with a token a server knows its callers: SGLang's
own middleware answers 401 to whoever does not bear it, at every path but /health* and /metrics. The environment hands
the token over: a server's arguments are seen by all users of its machine, and SGLang writes them into its log.

`begin_push` answers when no generation is under way any more; they end by themselves, or the caller ends them. SGLang's
own endpoints that take weights are called in between, and only there: a server that was restarted in the middle of a
push would mix what is left of it with the weights it was started with. `commit_push` says how many of these calls the
push had. Unless as many succeeded here, and at least one, the gate stays closed. It empties the caches, which hold
keys and values of the old weights, and sets the version that answers report.

A server that was restarted while the trainer had its memory is awake: being told to take it back, which would end
SGLang's scheduler, is nothing to it.

`alive` generates nothing, so it disturbs neither a push nor an engine without its memory: the scheduler is asked for
its state, and an empty batch takes the way of all answers through the detokenizer. (SGLang's /health asks by a
generation, and /server_info the scheduler alone: of a detokenizer that hangs it knows nothing.)
"""

import asyncio
import copy
import json
import os
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

ENGINE_TOKEN = "ARPO_ENGINE_TOKEN"  # noqa: S105  (its name)
"""Environment variable of servers, their router and the trainer: the token that requests bear."""
ALIVE = "/health/arpo"
"""SGLang lets probes below /health pass without a token."""
_DETOKENIZER = "arpo_detokenizer_address"
"""Attribute of SGLang's tokenizer manager that is added to it."""
_ALIVE_TIMEOUT_S = 30.0
_LOADING = {
    *("/update_weights_from_distributed", "/update_weights_from_tensor", "/update_weights_from_disk"),
    "/update_weights_from_ipc",
}
_PASSING = {
    *("/init_weights_update_group", "/destroy_weights_update_group", "/weights_checker", "/flush_cache"),
    *("/abort_request", "/metrics", "/metrics/", "/model_info", "/get_model_info", "/server_info", "/get_server_info"),
    *("/weight_version", "/get_weight_version", "/v1/models", "/v1/loads", "/get_load"),
}
"""They generate nothing, and pass a closed gate."""
_RELEASE, _RESUME = "/release_memory_occupation", "/resume_memory_occupation"
_RELEASE_TIMEOUT_S = 30.0
"""So long generations are waited for before the memory goes; SGLang's scheduler would end."""
_POLL_INTERVAL_S = 0.005


@dataclass(slots=True)
class _Push:
    """A push that has begun.

    Attributes:
        version: of its weights.
        loads: requests that brought weights and were answered with success.
    """

    version: int
    loads: int = 0


class PushGate:
    """ASGI middleware around SGLang's application."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._incarnation = uuid.uuid4().hex
        self._closed: str | None = None
        """Why nothing is generated, while nothing is."""
        self._push: _Push | None = None
        self._running = 0
        self._memory_lent = False
        self._frozen = False
        self._probe: DetokenizerProbe | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or hand it on."""
        path = scope.get("path", "")
        if scope["type"] == "lifespan" or path in _PASSING:
            await self._app(scope, receive, send)
        elif path == ALIVE or (path == "/health" and self._closed):
            await self._answer(send, *await self._alive())
        elif path == "/arpo/begin_push":
            await self._answer(send, *await self._begin(**await _json(receive)))
        elif path == "/arpo/commit_push":
            await self._answer(send, *await self._commit(**await _json(receive)))
        elif path in _LOADING:
            await self._load(scope, receive, send)
        elif path == _RELEASE:
            await self._release(scope, receive, send)
        elif path == _RESUME:
            await self._resume(scope, receive, send)
        elif self._closed is None:
            self._running += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._running -= 1
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1013})
        else:
            await self._answer(send, 503, {"error": self._closed})

    async def _load(self, scope: Scope, receive: Receive, send: Send) -> None:
        push = self._push
        if push is None:
            await self._answer(send, 409, {"error": "weights arrive, but no push has begun"})
            return

        def loaded() -> None:
            push.loads += 1

        await self._app(scope, receive, _on_success(send, loaded))

    async def _release(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._memory_lent:
            await self._answer(send, 200, {})
            return
        before, self._closed = self._closed, "the engine's memory is lent to the trainer"
        if not await self._drained(_RELEASE_TIMEOUT_S):
            self._closed = before
            await self._answer(send, 409, {"error": self._still_running(_RELEASE_TIMEOUT_S)})
            return
        self._push = None

        def lent() -> None:
            self._memory_lent = True

        await self._app(scope, receive, _on_success(send, lent))

    async def _resume(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._memory_lent:
            await self._answer(send, 200, {})
            return

        def taken() -> None:
            self._memory_lent = False
            self._closed = "the engine's memory is back, and holds no weights yet"

        await self._app(scope, receive, _on_success(send, taken))

    async def _alive(self) -> tuple[int, dict[str, Any]]:
        try:
            async with asyncio.timeout(_ALIVE_TIMEOUT_S):
                await _manager().get_internal_state()
                if self._probe is None:
                    self._probe = DetokenizerProbe(_manager())
                await self._probe.answers()
        except TimeoutError:
            return 503, {"error": f"no answer from scheduler and detokenizer for {_ALIVE_TIMEOUT_S:g} s"}
        return 200, {}

    async def _begin(self, version: int, timeout_s: float) -> tuple[int, dict[str, Any]]:
        if self._memory_lent:
            return 409, {"error": f"weights of version {version} have no place: {self._closed}"}
        before, push = (self._closed, self._push), _Push(version)
        self._closed, self._push = f"weights of version {version} are arriving", push
        if not await self._drained(timeout_s):
            if self._push is push:  # no other has begun meanwhile, and nothing has been changed yet
                self._closed, self._push = before
            return 409, {"error": self._still_running(timeout_s)}
        if not self._frozen:
            # Emptying the caches collects garbage, and would walk through all that was imported: a second every time.
            await _manager().freeze_gc()
            self._frozen = True
        return 200, {"ranks": _manager().server_args.tp_size, "incarnation": self._incarnation}

    async def _commit(self, version: int, loads: int, timeout_s: float) -> tuple[int, dict[str, Any]]:
        push = self._push
        if push is None or push.version != version:
            arriving = "no push has begun" if push is None else f"weights of version {push.version} are arriving"
            return 409, {"error": f"{arriving}, not {version}"}
        if loads != push.loads or not loads:
            return 409, {"error": f"of the {loads} parts of version {version} {push.loads} have arrived"}
        manager = _manager()
        flushed = await manager.flush_cache(timeout_s=timeout_s)
        if not flushed.success:
            return 409, {"error": f"the caches could not be emptied: {flushed.message}"}
        if self._push is not push:
            return 409, {"error": f"another push has begun meanwhile: {self._closed}"}
        _set_version(manager, version)
        self._closed = self._push = None
        return 200, {}

    async def _drained(self, timeout_s: float) -> bool:
        """Whether nothing is generated any more, at the latest at the deadline."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._running and asyncio.get_running_loop().time() <= deadline:
            await asyncio.sleep(_POLL_INTERVAL_S)
        return not self._running

    def _still_running(self, timeout_s: float) -> str:
        return f"{self._running} generations were still running after {timeout_s:g} s"

    @staticmethod
    async def _answer(send: Send, status: int, body: dict[str, Any]) -> None:
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})


class DetokenizerProbe:
    """Sends empty batches to the detokenizer, as the scheduler sends its results, and sees them come back."""

    def __init__(self, manager: Any) -> None:
        import zmq
        import zmq.asyncio
        from sglang.srt.managers import io_struct
        from sglang.srt.utils.network import get_zmq_socket

        # It hands embeddings on as they are; a batch of none changes nothing anywhere.
        batch = io_struct.BatchEmbeddingOutput
        self._empty = batch(
            rids=[],
            finished_reasons=[],
            embeddings=[],
            prompt_tokens=[],
            cached_tokens=[],
            placeholder_tokens_idx=None,
            placeholder_tokens_val=None,
            retraction_counts=[],
        )
        address = getattr(manager, _DETOKENIZER)
        self._socket = get_zmq_socket(zmq.asyncio.Context.instance(), zmq.PUSH, address, False)
        self._send = getattr(io_struct, "async_sock_send", _send_pickled)
        self._came = asyncio.Event()
        handle = manager._handle_batch_output

        async def seen(received: Any) -> None:
            if isinstance(received, batch) and not received.rids:
                self._came.set()
            else:
                await handle(received)

        manager._handle_batch_output = seen

    async def answers(self) -> None:
        """Returns when a batch has come back."""
        self._came.clear()
        await self._send(self._socket, self._empty)
        await self._came.wait()


def register() -> None:
    """Have the tokenizer manager remember where its detokenizer listens, and the server know its own token.

    Applied by SGLang's `load_plugins`.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def remember(original: Callable[[Any, Any], None], manager: Any, ports: Any) -> None:
        original(manager, ports)
        setattr(manager, _DETOKENIZER, ports.detokenizer_ipc_name)

    target = "sglang.srt.managers.tokenizer_manager.TokenizerManager.init_ipc_channels"
    HookRegistry.register(target, remember, HookType.AROUND)

    def authorized(original: Callable[[Any], None], arguments: Any) -> None:
        known = copy.copy(arguments)  # its own are in the log already, and stay without the token
        object.__setattr__(known, "api_key", os.environ.get(ENGINE_TOKEN) or None)  # they are read-only by now
        original(known)

    # The one request that a server makes of itself when it is up.
    target = "sglang.srt.entrypoints.http_server._freeze_gc_after_server_warmup"
    HookRegistry.register(target, authorized, HookType.AROUND)


def install(token: str | None) -> None:
    """Put the gate before the server of this process, and before both whoever asks for the token, if there is one."""
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.utils.auth import add_api_key_middleware

    app.add_middleware(PushGate)
    if token:
        add_api_key_middleware(app, api_key=token, admin_api_key=None)


def bearer(token: str | None) -> dict[str, str]:
    """Headers of a request to a server with this token."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def _manager() -> Any:
    from sglang.srt.entrypoints.http_server import get_global_state

    return get_global_state().tokenizer_manager


def _set_version(manager: Any, version: int) -> None:
    """What answers report from now on as `meta_info["weight_version"]`."""
    if hasattr(manager, "record_config_updates"):
        manager.record_config_updates("arpo.push", weight_version=str(version))
    else:  # sglang 0.5.12 reads it from the server's arguments
        manager.server_args.weight_version = str(version)


async def _send_pickled(socket: Any, message: Any) -> None:
    """As the processes of sglang 0.5.12 speak to each other; later ones have a function for it."""
    await socket.send_pyobj(message)


def _on_success(send: Send, done: Callable[[], None]) -> Send:
    """`send`, which calls `done` before an answer of HTTP 200 begins to leave."""

    async def watched(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start" and message["status"] == 200:
            done()
        await send(message)

    return watched


async def _json(receive: Receive) -> dict[str, Any]:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    data: dict[str, Any] = json.loads(body)
    return data
