"""The OpenAI-compatible interface of `arpo serve`: chat completions with the tool loop inside, models, health, metrics.

`content` is what the model writes, its calls included. The extension field `tool_steps` has each call's name,
arguments, result, status and seconds; in a stream it comes as `delta.tool_steps`. With `logprobs`, each token also has
the extension field `entropy`, in nats. `warnings` names parameters without effect and a last call that was not run.
`/v1/continuations` samples from the middle of a trajectory.
"""

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import aiohttp
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from arpo_megatron.engine.client import EngineUnavailableError
from arpo_megatron.engine.request import EngineRefusedError, Sampling
from arpo_megatron.engine.wire.endpoints import bearer
from arpo_megatron.serving import WRONG_TOKEN
from arpo_megatron.serving.agent import Ended, SampledToken, ServedAgent, TextDelta, ToolStep
from arpo_megatron.serving.continuations import ContinuationRequest, continuations
from arpo_megatron.serving.requests import ChatRequest, check_plain, read_request
from arpo_megatron.tree import Finish
from arpo_megatron.utils.own_names import is_own_name, is_same_origin
from tools_sandbox.client import SandboxError

MAX_BODY_BYTES = 4 * 2**20
_REFUSED = (ValueError, EngineRefusedError)
"""The request cannot be answered."""
_UNAVAILABLE = (aiohttp.ClientError, SandboxError, EngineUnavailableError, TimeoutError)
"""A service cannot be reached."""
_HEALTH_S = 5.0
"""Time for the engine's health; a hung one does not answer."""
_NO_SEED = "seed has no effect: equal seeds give equal answers only on a GPU with engine.deterministic=true"
_NOT_RUN = {
    Finish.MALFORMED: "the last tool call was not run: the model wrote no valid call",
    Finish.CALL_LIMIT: "the last tool call was not run: the limit of calls is reached (rollout.max_tool_calls)",
}
"""Ends of an answer that its text alone does not explain."""
_CLIENT_LEFT = 499
"""Status of a response that is not sent (nginx's number)."""
_ANSWERS = "arpo_answers"
"""Key of a request's scope: the number of answers that it has in progress."""


@dataclass(slots=True)
class Served:
    """The agent of an interface, its settings, and its counters."""

    agent: ServedAgent
    model: str
    """Name in `/v1/models`."""
    sampling: Sampling
    """Default sampling, that of the run's evaluation."""
    token: str | None
    """Bearer token of requests; None: none is needed."""
    concurrency: int
    """Answers at a time; a further request gets 429."""
    plain: bool = False
    """Pass requests through to the engine instead of running the agent."""
    system: str | None = None
    """System prompt of conversations that have none."""
    weights: str = ""
    """Where the weights come from, for readers."""
    seeds: bool = False
    """Whether equal seeds give equal answers."""
    counts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("requests", "errors", "tool_calls"), 0))
    running: int = 0

    def sampling_of(self, request: ChatRequest | ContinuationRequest) -> Sampling:
        """Return the sampling of a request: its values, else the defaults."""
        own = self.sampling
        return Sampling(
            temperature=own.temperature if request.temperature is None else request.temperature,
            top_p=own.top_p if request.top_p is None else request.top_p,
            seed=request.seed,
            top_k=own.top_k,
            repetition_penalty=own.repetition_penalty,
        )

    def warnings_of(self, request: ChatRequest | ContinuationRequest) -> dict[str, list[str]]:
        """Return the extension field of an answer that names what it does not honour; {} if it honours everything."""
        return {} if request.seed is None or self.seeds else {"warnings": [_NO_SEED]}


def application(served: Served) -> Starlette:
    """Return the web application that answers OpenAI's routes for a served agent."""

    entry = {"id": served.model, "object": "model", "created": 0, "owned_by": "arpo", "weights": served.weights}

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [entry]})

    async def model(request: Request) -> Response:
        return _no_model(served, request.path_params["model"]) or JSONResponse(entry)

    async def health(_: Request) -> Response:
        return await _health(served.agent)

    async def metrics(_: Request) -> Response:
        rows = {**{f"{name}_total": value for name, value in served.counts.items()}, "running": served.running}
        return PlainTextResponse("".join(f"arpo_serve_{name} {value:g}\n" for name, value in rows.items()))

    async def generate(request: Request) -> Response:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                return _error(413, f"the request has more than {MAX_BODY_BYTES} bytes")
        chat = request.url.path.endswith("/chat/completions")
        try:
            wanted = None if served.plain and chat else read_request(body, chat=chat)
            if wanted is None:
                check_plain(served.agent, body)
        except ValueError as error:
            return _error(400, str(error))
        answers = wanted.n if isinstance(wanted, ContinuationRequest) else 1
        model_of = wanted.model if isinstance(wanted, ChatRequest) else None
        if (refusal := _no_model(served, model_of) or _without_room(served, answers)) is not None:
            return refusal
        served.running += answers
        request.scope[_ANSWERS] = answers
        served.counts["requests"] += 1
        match wanted:
            case ChatRequest():
                answer = _answer(served, wanted)
            case ContinuationRequest():
                answer = _continue(served, wanted)
            case None:
                answer = _pass_through(served, body)
        return await _until_client_leaves(request, answer)

    routes = [
        Route("/v1/chat/completions", generate, methods=["POST"]),
        Route("/v1/continuations", generate, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{model:path}", model),
        Route("/health", health),
        Route("/metrics", metrics),
    ]
    return Starlette(routes=routes, middleware=[Middleware(_Guard, served=served)])


@dataclass(frozen=True, slots=True)
class _Guard:
    """Refuses requests without the token, except those for the health; without one, those of web sites.

    Answers of a request are in progress until its response has ended or its client has left.
    """

    app: ASGIApp
    served: Served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer: ASGIApp = self.app
        if scope["type"] == "http" and scope["path"] != "/health":
            headers = Headers(scope=scope)
            if self.served.token is None:
                host = headers.get("host", "")
                if not (is_own_name(host) and is_same_origin(headers.get("origin"), host)):
                    answer = _error(403, "without a token, requests of web sites are refused: start it with --token")
            elif not hmac.compare_digest(
                headers.get("authorization", "").removeprefix("Bearer ").encode(), self.served.token.encode()
            ):
                answer = _error(401, WRONG_TOKEN)
        try:
            await answer(scope, receive, send)
        finally:
            self.served.running -= scope.get(_ANSWERS, 0)


async def _until_client_leaves(request: Request, answer: Coroutine[Any, Any, Response]) -> Response:
    """Return an answer, or cancel it if the client leaves before. A streamed one is ended by Starlette."""
    answering, leaving = asyncio.create_task(answer), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        return answering.result() if answering.done() else Response(status_code=_CLIENT_LEFT)
    finally:
        answering.cancel()
        leaving.cancel()
        await asyncio.wait((answering, leaving))


async def _health(agent: ServedAgent) -> Response:
    try:
        url = f"{agent.engine_url}/health"
        async with agent.session.get(url, timeout=aiohttp.ClientTimeout(total=_HEALTH_S)) as answer:
            status = answer.status
    except (TimeoutError, aiohttp.ClientError):
        status = 503
    return JSONResponse({"status": "ok" if status == 200 else "engine down"}, 200 if status == 200 else 503)


def _no_model(served: Served, wanted: str | None) -> Response | None:
    """Return the refusal of a request for another model; None if it names the served one, or none."""
    if wanted in (None, served.model):
        return None
    return _error(404, f"no model {wanted!r} is served here; there is {served.model}", "model_not_found")


def _without_room(served: Served, answers: int) -> Response | None:
    """Return the refusal of a request for more answers than may run at a time; None if there is room."""
    if answers > served.concurrency:
        return _error(400, f"n: {answers} is more than --concurrency {served.concurrency}")
    if served.running + answers > served.concurrency:
        return _error(429, f"{served.running} of {served.concurrency} answers are in progress; try again")
    return None


async def _answer(served: Served, wanted: ChatRequest) -> Response:
    messages = [message.model_dump() for message in wanted.messages]
    if served.system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": served.system})
    identity = f"chatcmpl-{uuid.uuid4().hex}"
    most = wanted.max_completion_tokens or wanted.max_tokens
    events = served.agent.answer(messages, served.sampling_of(wanted), most, identity, logprobs=wanted.logprobs)
    head = {"id": identity, "created": int(time.time()), "model": served.model}
    warnings = served.warnings_of(wanted)
    if wanted.stream:
        parts = _stream(served, events, head, wanted.logprobs, warnings)
        return StreamingResponse(parts, media_type="text/event-stream")
    text, steps = "", []
    tokens: list[SampledToken] = []
    async with _failing(served) as failed:
        async for event in events:
            match event:
                case TextDelta():
                    text += event.text
                    tokens += event.tokens
                case ToolStep():
                    served.counts["tool_calls"] += 1
                    steps.append({**event.to_dict(), "offset": len(text)})
                case Ended():
                    ended = event
    if failed:
        return failed[0]
    message = {"role": "assistant", "content": text, "tool_steps": steps}
    logprobs = _logprobs(served, tokens) if wanted.logprobs else None
    choice = {"index": 0, "message": message, "finish_reason": ended.reason, "logprobs": logprobs}
    answer = {**head, "object": "chat.completion", "choices": [choice], "usage": _usage(ended)}
    noted = [*warnings.get("warnings", ()), *([_NOT_RUN[ended.finish]] if ended.finish in _NOT_RUN else [])]
    return JSONResponse(answer | ({"warnings": noted} if noted else {}))


async def _continue(served: Served, wanted: ContinuationRequest) -> Response:
    found: list[dict[str, Any]] = []
    async with _failing(served) as failed:
        agent, own = served.agent, served.sampling_of(wanted)
        sampling = Sampling(own.temperature, own.top_p, own.seed)  # as in training, which has no other settings
        found = await continuations(replace(agent, limits=agent.training_limits or agent.limits), sampling, wanted)
    if failed:
        return failed[0]
    text = served.agent.codec.decode(wanted.token_ids)
    answer = {"model": served.model, "weights": served.weights, "text": text, "continuations": found}
    return JSONResponse(answer | served.warnings_of(wanted))


@asynccontextmanager
async def _failing(served: Served) -> AsyncIterator[list[Response]]:
    """Let a failure inside the block end it and add the response for it to the list."""
    failed: list[Response] = []
    try:
        yield failed
    except* _REFUSED as errors:
        failed.append(_error(400, _first_text(errors)))
    except* _UNAVAILABLE as errors:
        failed.append(_error(503, _first_text(errors)))
    served.counts["errors"] += len(failed)


def _first_text(errors: BaseExceptionGroup[BaseException]) -> str:
    first: BaseException = errors
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return _text(first)


def _text(error: BaseException) -> str:
    """Return the reason of a failure for a caller, without the engine's address."""
    if isinstance(error, aiohttp.ClientConnectionError):
        return "the engine cannot be reached: it is starting again, or has failed (see /health)"
    return str(error) or type(error).__name__


def _logprobs(served: Served, tokens: Sequence[SampledToken]) -> dict[str, Any]:
    """Return OpenAI's `logprobs` of a choice, with each token's entropy."""
    texts = [served.agent.codec.decode([token.id]) for token in tokens]
    rows: list[dict[str, Any]] = [
        {"token": text, "logprob": token.logprob, "bytes": None, "top_logprobs": [], "entropy": token.entropy}
        for text, token in zip(texts, tokens, strict=True)
    ]
    return {"content": rows}


async def _stream(
    served: Served,
    events: AsyncIterator[Any],
    head: Mapping[str, Any],
    logprobs: bool,
    warnings: Mapping[str, list[str]],
) -> AsyncIterator[str]:
    def chunk(
        delta: Mapping[str, Any],
        reason: str | None = None,
        tokens: Sequence[SampledToken] = (),
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        if logprobs and tokens:
            choice["logprobs"] = _logprobs(served, tokens)
        body = {**head, "object": "chat.completion.chunk", "choices": [choice], **more}
        return f"data: {json.dumps(body)}\n\n"

    written = 0

    try:
        yield chunk({"role": "assistant", "content": ""}, more=warnings)
        async for event in events:
            match event:
                case TextDelta():
                    written += len(event.text)
                    yield chunk({"content": event.text}, tokens=event.tokens)
                case ToolStep():
                    served.counts["tool_calls"] += 1
                    yield chunk({"tool_steps": [{**event.to_dict(), "offset": written}]})
                case Ended():
                    noted = {"warnings": [_NOT_RUN[event.finish]]} if event.finish in _NOT_RUN else {}
                    yield chunk({}, event.reason, more={"usage": _usage(event), **noted})
    except (*_REFUSED, *_UNAVAILABLE) as error:
        served.counts["errors"] += 1
        yield _error_event(error)
    yield "data: [DONE]\n\n"


def _error_event(error: BaseException) -> str:
    """Return the event that ends a stream with an error; OpenAI's client raises it."""
    return f"data: {json.dumps({'error': {'message': _text(error)}})}\n\n"


async def _pass_through(served: Served, body: bytes) -> Response:
    """Send the request to the engine as it is, and its answer back as it arrives."""
    agent = served.agent
    headers = {**bearer(agent.engine_token), "Content-Type": "application/json"}
    try:
        answer = await agent.session.post(f"{agent.engine_url}/v1/chat/completions", data=body, headers=headers)
    except (TimeoutError, aiohttp.ClientError) as error:
        served.counts["errors"] += 1
        return _error(503, _text(error))

    async def content() -> AsyncIterator[bytes]:
        async with answer:
            try:
                async for part in answer.content.iter_any():
                    yield part
            except (TimeoutError, aiohttp.ClientError) as error:  # the engine has ended in the middle
                served.counts["errors"] += 1
                if answer.content_type == "text/event-stream":
                    yield _error_event(error).encode()

    return StreamingResponse(content(), answer.status, media_type=answer.content_type)


def _usage(ended: Ended) -> dict[str, int]:
    total = ended.prompt_tokens + ended.completion_tokens
    return {
        "prompt_tokens": ended.prompt_tokens,
        "completion_tokens": ended.completion_tokens,
        "total_tokens": total,
    }


def _error(status: int, message: str, code: str | None = None) -> JSONResponse:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return JSONResponse({"error": {"message": message, "type": kind, "code": code or status}}, status)
