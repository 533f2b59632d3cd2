"""The push gate: between the beginning of a weight push and its commit, an engine generates nothing.

An interrupted push leaves a mixture of weights, so the gate stays closed (HTTP 503) until a whole push has arrived,
from any trainer. An engine that has lent its memory to the trainer also stays closed until a push, because the memory
comes back without weights. An FP8 engine starts closed: its weights come with the first push. Three endpoints are added
to SGLang's server:

    GET  /health/arpo                                      -> 200 while scheduler and detokenizer work
    POST /arpo/begin_push  {"version": N, "timeout_s": s}  -> {"ranks": n, "incarnation": "..."}
    POST /arpo/commit_push {"version": N, "loads": n, "timeout_s": s}

`begin_push` answers when no generation is running; the caller may abort them. Between the two, and only there, SGLang's
own endpoints take weights: otherwise a server that was restarted during a push would mix the rest of the push with the
weights it was started with. Each request of a push has the push's id in a header. Weights and commits with another id
than that of the newest `begin_push` are refused, because two trainers may push to one engine, even the same version.
`commit_push` gives the number of calls with weights in the push. Unless the same number, at least one, has succeeded
here, the gate stays closed. The commit empties the caches, whose keys and values come from the old weights, and sets
the version that answers report. With `ARPO_KEEP_KV` only the first commit of a process empties them:
a restarted engine may have been asked before anyone saw that its weights are old. /flush_cache then only answers
whether a generation is running.

SGLang generates at many paths, and newer versions may have more. So the gate lists the paths that pass when it is
closed and waits for all other requests. SGLang's /health generates, too: /health/arpo answers in its place while the
gate is closed.

The memory comes back in two parts: that of the weights before the push, and the rest after it. A server that was
restarted while the trainer had its memory is awake. It ignores the request to take the memory back, which would end
SGLang's scheduler.

/health/arpo generates nothing, so it disturbs neither a push nor an engine without its memory. It asks the scheduler
for its state, and sends an empty batch through the detokenizer. (SGLang's /health uses a generation; its /server_info
does not notice a detokenizer that hangs.)

On a cluster other users can reach the servers of a job, so requests need a token: SGLang's own middleware answers 401
without it, except at /health* and /metrics. The token is in the environment and not in the arguments, because all users
of a machine can read those and SGLang logs them.
"""

import asyncio
import copy
import json
import os
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from arpo_megatron.engine.wire.endpoints import (
    AWAIT_PUSH_VARIABLE,
    BEGIN_PUSH_PATH,
    COMMIT_PUSH_PATH,
    ENGINE_TOKEN_VARIABLE,
    HEALTH_PATH,
    INCARNATION_HEADER,
    KEEP_KV_VARIABLE,
    KV_CACHE,
    PUSH_HEADER,
    WEIGHTS,
)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_DETOKENIZER = "arpo_detokenizer_address"
"""Attribute that is added to SGLang's tokenizer manager."""
_HEALTH_TIMEOUT_S = 30.0
_LOADING = {
    *("/update_weights_from_distributed", "/update_weights_from_tensor", "/update_weights_from_disk"),
    "/update_weights_from_ipc",
}
_PASSING = {
    *("/weights_checker", "/flush_cache", "/abort_request"),
    *("/metrics", "/metrics/", "/model_info", "/get_model_info", "/server_info", "/get_server_info"),
    *("/weight_version", "/get_weight_version", "/v1/models", "/v1/loads", "/get_load"),
}
"""Paths that generate nothing and pass a closed gate."""
_RELEASE, _RESUME = "/release_memory_occupation", "/resume_memory_occupation"
_MEMORY = frozenset({WEIGHTS, *KV_CACHE})
"""All parts of the memory that an engine lends."""
_RELEASE_TIMEOUT_S = 30.0
"""Wait for running generations before the memory is released, which would otherwise end SGLang's scheduler."""
_POLL_INTERVAL_S = 0.005


@dataclass(slots=True)
class _Push:
    """A push between its begin and its commit."""

    version: int
    """Version of its weights."""
    id: bytes
    """Drawn by its trainer; empty if it gives none."""
    loads: int = 0
    """Number of successful requests that brought weights."""


class PushGate:
    """ASGI middleware that passes requests to SGLang while the gate is open, and refuses most while it is closed."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._incarnation = uuid.uuid4().hex
        self._closed = "the engine waits for its first weights" if os.environ.get(AWAIT_PUSH_VARIABLE) else None
        """Why the gate is closed; None while it is open."""
        self._keeps_kv = bool(os.environ.get(KEEP_KV_VARIABLE))
        self._push: _Push | None = None
        self._pushed = False
        """Whether a whole push has arrived."""
        self._running = 0
        self._lent: frozenset[str] = frozenset()
        """Parts of the memory that the trainer has."""
        self._frozen = False
        self._probe: DetokenizerProbe | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it to SGLang."""
        await self._serve(scope, receive, _with_header(send, INCARNATION_HEADER, self._incarnation))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path == "/flush_cache" and self._keeps_kv:
            await self._answer(send, 409 if self._running else 200, {})
        elif scope["type"] == "lifespan" or path in _PASSING:
            await self._app(scope, receive, send)
        elif path == HEALTH_PATH or (path == "/health" and self._closed):
            await self._answer(send, *await self._health())
        elif path == BEGIN_PUSH_PATH:
            await self._answer(send, *await self._begin(_push_id(scope), **await _json(receive)))
        elif path == COMMIT_PUSH_PATH:
            await self._answer(send, *await self._commit(_push_id(scope), **await _json(receive)))
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
            await self._answer(send, 409, {"error": "weights have arrived, but no push has begun"})
            return
        if push.id != _push_id(scope):
            await self._answer(send, 409, {"error": "weights have arrived, but another push has begun meanwhile"})
            return

        def loaded() -> None:
            push.loads += 1

        await self._app(scope, receive, _on_success(send, loaded))

    async def _release(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._lent == _MEMORY:
            await self._answer(send, 200, {})
            return
        previous, self._closed = self._closed, "the engine's memory is lent to the trainer"
        if not await self._drained(_RELEASE_TIMEOUT_S):
            self._closed = previous
            await self._answer(send, 409, {"error": self._still_running(_RELEASE_TIMEOUT_S)})
            return
        self._push = None

        def lent() -> None:
            self._lent = _MEMORY

        # An interrupted push may have taken back a part of it.
        await self._app(scope, _with_body({"tags": sorted(_MEMORY - self._lent)}), _on_success(send, lent))

    async def _resume(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = frozenset((await _json(receive)).get("tags") or _MEMORY) & self._lent
        if not asked:
            await self._answer(send, 200, {})
            return

        def taken() -> None:
            self._lent -= asked
            if self._push is None:
                self._closed = "the engine's memory is back and holds no weights yet"

        await self._app(scope, _with_body({"tags": sorted(asked)}), _on_success(send, taken))

    async def _health(self) -> tuple[int, dict[str, Any]]:
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                await _manager().get_internal_state()
                if self._probe is None:
                    self._probe = DetokenizerProbe(_manager())
                await self._probe.run()
        except TimeoutError:
            return 503, {"error": f"no answer from scheduler and detokenizer for {_HEALTH_TIMEOUT_S:g} s"}
        return 200, {}

    async def _begin(self, push_id: bytes, version: int, timeout_s: float) -> tuple[int, dict[str, Any]]:
        if WEIGHTS in self._lent:
            return 409, {"error": f"weights of version {version} cannot be stored: {self._closed}"}
        previous, push = (self._closed, self._push), _Push(version, push_id)
        self._closed, self._push = f"weights of version {version} are arriving", push
        if not await self._drained(timeout_s):
            if self._push is push:  # no other push has begun meanwhile, and no weights have arrived
                self._closed, self._push = previous
            return 409, {"error": self._still_running(timeout_s)}
        if not self._frozen:
            # Emptying the caches collects garbage, which traverses all imported modules (1 s) unless they are frozen.
            await _manager().freeze_gc()
            self._frozen = True
        return 200, {"ranks": _manager().server_args.tp_size, "incarnation": self._incarnation}

    async def _commit(self, push_id: bytes, version: int, loads: int, timeout_s: float) -> tuple[int, dict[str, Any]]:
        push = self._push
        if push is None or (push.version, push.id) != (version, push_id):
            arriving = "no push has begun" if push is None else f"weights of version {push.version} are arriving"
            other = push is not None and push.id != push_id
            return 409, {"error": f"{arriving}, {'from another push' if other else f'not {version}'}"}
        if loads != push.loads or not loads:
            return 409, {"error": f"{push.loads} of the {loads} parts of version {version} have arrived"}
        if self._lent:
            return 409, {"error": f"version {version} cannot be served: the trainer has the memory of the KV cache"}
        manager = _manager()
        if not (self._keeps_kv and self._pushed):
            flushed = await manager.flush_cache(timeout_s=timeout_s)
            if not flushed.success:
                return 409, {"error": f"the caches could not be emptied: {flushed.message}"}
        if self._push is not push:
            return 409, {"error": f"another push has begun meanwhile: {self._closed}"}
        _set_version(manager, version)
        self._closed, self._push, self._pushed = None, None, True
        return 200, {}

    async def _drained(self, timeout_s: float) -> bool:
        """Wait until nothing is generated; return False at the deadline."""
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
    """Sends empty batches to the detokenizer, as the scheduler sends results, and waits for their return."""

    def __init__(self, manager: Any) -> None:
        import zmq
        import zmq.asyncio
        from sglang.srt.managers import io_struct
        from sglang.srt.utils.network import get_zmq_socket

        # The detokenizer passes embeddings through, and an empty batch has no effect anywhere.
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
        self._returned = asyncio.Event()
        handle = manager._handle_batch_output

        async def handle_or_note(received: Any) -> None:
            if isinstance(received, batch) and not received.rids:
                self._returned.set()
            else:
                await handle(received)

        manager._handle_batch_output = handle_or_note

    async def run(self) -> None:
        """Send a batch and wait until it has come back."""
        self._returned.clear()
        await self._send(self._socket, self._empty)
        await self._returned.wait()


def register_hooks() -> None:
    """Register hooks in the server's process; SGLang's `load_plugins` applies them.

    The tokenizer manager keeps the address of its detokenizer, and the server's request to itself gets the token.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def remember(original: Callable[[Any, Any], None], manager: Any, ports: Any) -> None:
        original(manager, ports)
        setattr(manager, _DETOKENIZER, ports.detokenizer_ipc_name)

    target = "sglang.srt.managers.tokenizer_manager.TokenizerManager.init_ipc_channels"
    HookRegistry.register(target, remember, HookType.AROUND)

    def authorized(original: Callable[[Any], None], arguments: Any) -> None:
        with_token = copy.copy(arguments)  # the server's own arguments stay without the token
        object.__setattr__(with_token, "api_key", os.environ.get(ENGINE_TOKEN_VARIABLE) or None)  # they are read-only
        original(with_token)

    # The only request that a server sends to itself after its start.
    target = "sglang.srt.entrypoints.http_server._freeze_gc_after_server_warmup"
    HookRegistry.register(target, authorized, HookType.AROUND)


def install(token: str | None) -> None:
    """Add the gate to the server of this process, and the check of the token, if there is one, in front of it."""
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.utils.auth import add_api_key_middleware

    app.add_middleware(PushGate)
    if token:
        add_api_key_middleware(app, api_key=token, admin_api_key=None)


def _manager() -> Any:
    from sglang.srt.entrypoints.http_server import get_global_state

    return get_global_state().tokenizer_manager


def _set_version(manager: Any, version: int) -> None:
    """Set what answers report as `meta_info["weight_version"]`."""
    if hasattr(manager, "record_config_updates"):
        manager.record_config_updates("arpo.push", weight_version=str(version))
    else:  # sglang 0.5.12 reports the version in the server's arguments
        manager.server_args.weight_version = str(version)


async def _send_pickled(socket: Any, message: Any) -> None:
    """Send as sglang 0.5.12 does; later versions have `async_sock_send`."""
    await socket.send_pyobj(message)


def _push_id(scope: Scope) -> bytes:
    """Return the id of the push that a request belongs to; empty if it names none."""
    return next((value for name, value in scope["headers"] if name == PUSH_HEADER.lower().encode()), b"")


def _on_success(send: Send, done: Callable[[], None]) -> Send:
    """Wrap `send` so that `done` is called before an HTTP 200 answer is sent."""

    async def watching_send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start" and message["status"] == 200:
            done()
        await send(message)

    return watching_send


def _with_header(send: Send, name: str, value: str) -> Send:
    """Wrap `send` so that HTTP answers have a header more."""
    header = (name.lower().encode(), value.encode())

    async def labelling_send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), header]}
        await send(message)

    return labelling_send


def _with_body(data: dict[str, Any]) -> Receive:
    """Return a `receive` that gives this body in place of the request's own."""

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": json.dumps(data).encode(), "more_body": False}

    return receive


async def _json(receive: Receive) -> dict[str, Any]:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    data: dict[str, Any] = json.loads(body)
    return data
