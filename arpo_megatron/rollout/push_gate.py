"""The gate of an engine: from the beginning of a weight push to its commit nothing is generated.

A push that is interrupted leaves a mixture of weights behind, so the gate stays closed (HTTP 503) until a whole push
has arrived, whoever sends it. Three endpoints are added to SGLang's server:

    GET  /arpo/alive                                      -> 200 while scheduler and detokenizer do their work
    POST /arpo/begin_push  {"version": N, "timeout_s": s}  -> {"ranks": n, "incarnation": "..."}
    POST /arpo/commit_push {"version": N, "timeout_s": s}

`begin_push` answers when no generation is under way any more; they end by themselves, or the caller ends them. SGLang's
own endpoints that take weights are called in between. `commit_push` empties the caches, which hold keys and values of
the old weights, and sets the version that answers report.

A server that was restarted while the trainer had its memory is awake: being told to take it back, which would end
SGLang's scheduler, is nothing to it.

`alive` generates nothing, so it disturbs neither a push nor an engine without its memory: the scheduler is asked for
its state, and an empty batch takes the way of all answers through the detokenizer. (SGLang's /health asks by a
generation, and /server_info the scheduler alone: of a detokenizer that hangs it knows nothing.)
"""

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

ALIVE = "/arpo/alive"
_DETOKENIZER = "arpo_detokenizer_address"
"""Attribute of SGLang's tokenizer manager that is added to it."""
_ALIVE_TIMEOUT_S = 30.0
_GENERATING = ("/generate", "/v1/", "/invocations", "/encode", "/classify")
_RELEASE, _RESUME = "/release_memory_occupation", "/resume_memory_occupation"
_POLL_INTERVAL_S = 0.005


class PushGate:
    """ASGI middleware around SGLang's application."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._incarnation = uuid.uuid4().hex
        self._arriving: int | None = None
        self._running = 0
        self._memory_released = False
        self._frozen = False
        self._probe: DetokenizerProbe | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or hand it on."""
        if scope["type"] == "http" and scope["path"] == ALIVE:
            await self._answer(send, *await self._alive())
        elif scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
        elif scope["path"] == "/arpo/begin_push":
            await self._answer(send, *await self._begin(**await _json(receive)))
        elif scope["path"] == "/arpo/commit_push":
            await self._answer(send, *await self._commit(**await _json(receive)))
        elif scope["path"] == _RESUME and not self._memory_released:
            await self._answer(send, 200, {})
        elif not scope["path"].startswith(_GENERATING):
            if scope["path"] in (_RELEASE, _RESUME):
                self._memory_released = scope["path"] == _RELEASE
            await self._app(scope, receive, send)
        elif self._arriving is not None:
            await self._answer(send, 503, {"error": f"weights of version {self._arriving} are arriving"})
        else:
            self._running += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._running -= 1

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
        before, self._arriving = self._arriving, version
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._running:
            if asyncio.get_running_loop().time() > deadline:
                self._arriving = before  # nothing has been changed yet
                return 409, {"error": f"{self._running} generations were still running after {timeout_s:g} s"}
            await asyncio.sleep(_POLL_INTERVAL_S)
        if not self._frozen:
            # Emptying the caches collects garbage, and would walk through all that was imported: a second every time.
            await _manager().freeze_gc()
            self._frozen = True
        return 200, {"ranks": _manager().server_args.tp_size, "incarnation": self._incarnation}

    async def _commit(self, version: int, timeout_s: float) -> tuple[int, dict[str, Any]]:
        if self._arriving != version:
            return 409, {"error": f"weights of version {self._arriving} are arriving, not {version}"}
        manager = _manager()
        flushed = await manager.flush_cache(timeout_s=timeout_s)
        if not flushed.success:
            return 409, {"error": f"the caches could not be emptied: {flushed.message}"}
        manager.record_config_updates("arpo.push", weight_version=str(version))
        self._arriving = None
        return 200, {}

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
        from sglang.srt.managers.io_struct import BatchEmbeddingOutput, async_sock_send
        from sglang.srt.utils.network import get_zmq_socket

        # It hands embeddings on as they are; a batch of none changes nothing anywhere.
        self._empty = BatchEmbeddingOutput(
            rids=[],
            finished_reasons=[],
            embeddings=[],
            prompt_tokens=[],
            cached_tokens=[],
            placeholder_tokens_idx=None,
            placeholder_tokens_val=None,
        )
        address = getattr(manager, _DETOKENIZER)
        self._socket = get_zmq_socket(zmq.asyncio.Context.instance(), zmq.PUSH, address, False)
        self._send = async_sock_send
        self._came = asyncio.Event()
        handle = manager._handle_batch_output

        async def seen(received: Any) -> None:
            if isinstance(received, BatchEmbeddingOutput) and not received.rids:
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
    """Have the tokenizer manager remember where its detokenizer listens (applied by SGLang's `load_plugins`)."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def remember(original: Callable[[Any, Any], None], manager: Any, ports: Any) -> None:
        original(manager, ports)
        setattr(manager, _DETOKENIZER, ports.detokenizer_ipc_name)

    target = "sglang.srt.managers.tokenizer_manager.TokenizerManager.init_ipc_channels"
    HookRegistry.register(target, remember, HookType.AROUND)


def install() -> None:
    """Put the gate before the server of this process."""
    from sglang.srt.entrypoints.http_server import app

    app.add_middleware(PushGate)


def _manager() -> Any:
    from sglang.srt.entrypoints.http_server import get_global_state

    return get_global_state().tokenizer_manager


async def _json(receive: Receive) -> dict[str, Any]:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    data: dict[str, Any] = json.loads(body)
    return data
