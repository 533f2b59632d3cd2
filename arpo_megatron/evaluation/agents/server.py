"""Any server that speaks OpenAI's chat format: SGLang, vLLM, a provider.

The server exchanges text, so trajectories grow as text: up to the closing tag of a tool call, then the tool's answer,
then the next request. A trained model reads the result inside its own turn, which needs the `continue_final_message` of
SGLang and vLLM. A prompted model gets the result as a user message, which every server accepts.
"""

import asyncio
import math
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
import openai

from arpo_megatron.algorithms.branching import path_seed
from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.evaluation.agents.base import Deliver, PendingQuestion
from arpo_megatron.evaluation.journal import Outcome
from arpo_megatron.evaluation.prompts import Tools
from arpo_megatron.evaluation.response import AgentResponse, NoResponse, Response
from arpo_megatron.rollout.limits import NO_CALLS, RolloutLimits
from arpo_megatron.rollout.tools import ToolClient
from arpo_megatron.tasks.base import Message
from arpo_megatron.tasks.protocols.base import Malformed, ToolCall
from arpo_megatron.tasks.protocols.tools import DEFAULT_TOOLS, ToolDefinition
from arpo_megatron.tasks.tags import calls
from arpo_megatron.tree import Finish
from arpo_megatron.utils import chat_client
from arpo_megatron.utils.signals import run_in_loop
from arpo_megatron.utils.text import whole_characters
from tools_sandbox.client import SandboxError

KEY_VARIABLE = "OPENAI_API_KEY"
"""Environment variable with the server's key."""
_BACKOFF_S = 8.0
"""Longest pause between two attempts of the openai client."""
_SILENT_S = 10.0
"""Time of the first request after which a line is logged."""
_EXTENSIONS = ("top_k", "repetition_penalty", "continue_final_message", "add_generation_prompt")
"""Parameters of SGLang and vLLM that OpenAI's format lacks."""
_CHARACTERS_PER_TOKEN = 4
"""Assumed length of a token in tool results, because the server's tokenizer is unknown."""

Log = Callable[[str], None]
T = TypeVar("T")


@dataclass(slots=True)
class _Trajectory:
    """Texts, turns and counts of an attempt in progress."""

    text: str = ""
    model_text: str = ""
    turns: list[Message] = field(default_factory=list)
    tool_calls: int = 0
    tool_errors: int = 0
    model_tokens: int = 0
    prompt_tokens: int = 0
    length: int = 0  # tokens after the prompt

    def response(self, finish: Finish, began: float) -> AgentResponse:
        return AgentResponse(
            self.text,
            self.model_text,
            finish,
            self.tool_calls,
            self.tool_errors,
            self.model_tokens,
            max(0, self.length - self.model_tokens),
            time.monotonic() - began,
        )


@dataclass(frozen=True, slots=True)
class ServerAgent:
    """Answers with the model of a server."""

    url: str
    """Address of the server; `/v1` is added if it has no path."""
    model: str
    """Name of the model on the server."""
    config: JobConfig
    """Sampling (`evaluation`), limits (`rollout`), timeouts and concurrency (`engine`), and seed."""
    tools: Tools
    sandbox_url: str | None
    """Address of the tool service; None without tools."""
    sandbox_token: str | None = None
    log: Log = lambda _text: None
    """Receives a line if the server does not answer at once."""

    def answer(self, pending: Sequence[PendingQuestion], deliver: Deliver) -> None:
        """Grow a trajectory for each attempt.

        Raises:
            UserError: the server cannot be reached, or rejects the kind of request that is needed.
        """
        run_in_loop(self._answer_all(pending, deliver))

    async def _answer_all(self, pending: Sequence[PendingQuestion], deliver: Deliver) -> None:
        slots = asyncio.Semaphore(self.config.engine.max_running_requests)
        retry_for_s = self.config.engine.retry_for_s
        async with connected(self.url, self.config) as client:
            sandbox = None
            if self.sandbox_url is not None:
                sandbox = ToolClient(self.sandbox_url, self.sandbox_token, retry_for_s=retry_for_s)
            try:
                await self._probe(client)
                tags = DEFAULT_TOOLS if sandbox is None else await sandbox.select(self.config.rollout.tools)

                async def one(each: PendingQuestion, number: int) -> None:
                    async with slots:
                        response = await self._attempt(client, sandbox, tags, each, number)
                    deliver(each, {number: response})

                async with asyncio.TaskGroup() as group:
                    for each in pending:
                        for number in each.attempts:
                            group.create_task(one(each, number))
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
            finally:
                if sandbox is not None:
                    await sandbox.__aexit__(None, None, None)

    async def _probe(self, client: openai.AsyncOpenAI) -> None:
        """Request one token with all parameters, so that an unsupported one fails once and at the start.

        The server's context may still be too short for later requests, which then count as refused.
        """
        question: Message = {"role": "user", "content": "1+1="}

        async def ask(client: openai.AsyncOpenAI) -> None:
            await self._complete(client, [question], 1, seed=0)
            if self.tools is Tools.TRAINED:  # the model's turn continues after a tool result
                await self._complete(client, [question, {"role": "assistant", "content": "<think>"}], 1, seed=0)

        try:
            await first_answer(ask, client, self.url, self.config, self.log)
        except chat_client.UnreadableReplyError as error:
            raise UserError(f"{self.url} does not speak OpenAI's chat format: the first reply is {error}") from None
        except openai.APIStatusError as error:
            reason, trouble = _text(error), chat_client.classify_status(error.status_code)
            if trouble is chat_client.Trouble.SERVER:
                raise UserError(f"{self.url} is up but does not answer: {reason}") from None
            if trouble is chat_client.Trouble.ACCESS:
                raise self._no_access(error) from None
            hint = ""
            if any(name in reason for name in _EXTENSIONS):
                hint = (
                    "; for a server without these extensions use evaluation.top_k=0 "
                    "evaluation.repetition_penalty=1.0 and --tools prompt or none"
                )
            raise UserError(f"{self.url} does not accept the requests for {self.model}: {reason}{hint}") from None
        except openai.APIError as error:
            raise UserError(f"{self.url} does not answer: {_text(error)}") from None

    async def _attempt(
        self,
        client: openai.AsyncOpenAI,
        sandbox: ToolClient | None,
        tags: Sequence[ToolDefinition],
        pending: PendingQuestion,
        number: int,
    ) -> Response:
        try:
            return await self._respond(client, sandbox, tags, pending, number)
        except SandboxError as error:
            return NoResponse(Outcome.TOOLS, str(error))
        except openai.APIStatusError as error:
            trouble = chat_client.classify_status(error.status_code)
            if trouble is chat_client.Trouble.ACCESS:
                raise self._no_access(error) from None
            return NoResponse(
                Outcome.ENGINE if trouble is chat_client.Trouble.SERVER else Outcome.REFUSED, _text(error)
            )
        except (openai.APIError, chat_client.UnreadableReplyError) as error:
            return NoResponse(Outcome.ENGINE, _text(error))

    def _no_access(self, error: openai.APIStatusError) -> UserError:
        """Return the error for a rejected key or an unknown model, which may also appear during an evaluation."""
        return UserError(
            f"{self.url} answers {error.status_code} for {self.model!r} ({_text(error)}): check the address, --model "
            f"and the key in ${KEY_VARIABLE}; the same command then makes the remaining attempts"
        )

    async def _respond(
        self,
        client: openai.AsyncOpenAI,
        sandbox: ToolClient | None,
        tags: Sequence[ToolDefinition],
        pending: PendingQuestion,
        number: int,
    ) -> AgentResponse:
        """Alternate between model and tool until the trajectory ends."""
        trajectory, began, limits = _Trajectory(), time.monotonic(), RolloutLimits.evaluation(self.config)
        history = NO_CALLS
        while (left := limits.max_response_tokens - trajectory.length) > 0:
            seed = path_seed(self.config.seed, 0, pending.task.id, (number, trajectory.tool_calls))
            turns = [*pending.task.messages, *trajectory.turns]
            most = min(left, limits.max_turn_tokens or left)
            answer = await self._complete(client, turns, most, seed=seed, stop=[tool.stop for tool in tags])
            if answer.prompt_tokens is not None and answer.completion_tokens is not None:
                trajectory.prompt_tokens = trajectory.prompt_tokens or answer.prompt_tokens
                trajectory.model_tokens += answer.completion_tokens
                trajectory.length = answer.prompt_tokens + answer.completion_tokens - trajectory.prompt_tokens
            text, stop = answer.text, None
            if sandbox is not None:  # without tools a tag is plain text
                text, stop = split_call(answer.text, answer.finish_reason == "stop", tags)
            trajectory.text += text
            trajectory.model_text += text
            if stop is None or sandbox is None:
                return trajectory.response(Finish.LENGTH if answer.finish_reason == "length" else Finish.END, began)
            call = calls.parse_call(text, stop, tags)
            if isinstance(call, Malformed):
                return trajectory.response(Finish.MALFORMED, began)
            admitted = limits.admit(call, history, limits.max_response_tokens - trajectory.length)
            if admitted is None:
                return trajectory.response(Finish.CALL_LIMIT, began)
            allowed, history = admitted
            trajectory.tool_calls += 1
            if not isinstance(allowed, ToolCall):
                status, result = allowed.status, allowed.result
            else:
                called = await sandbox.call(
                    allowed.tool,
                    dict(allowed.arguments),
                    trajectory_id=f"{pending.task.id}/{number}",
                    timeout_s=limits.tool_timeout_s,
                )
                status, result = called.status, called.text
            trajectory.tool_errors += status != "ok"
            shown = whole_characters(result[: _CHARACTERS_PER_TOKEN * limits.max_tool_tokens])
            self._append(trajectory, text, calls.RESULT_FRAME.text(shown))
        return trajectory.response(Finish.LENGTH, began)

    def _append(self, trajectory: _Trajectory, text: str, result: str) -> None:
        """Append a tool result after the model's `text`."""
        trajectory.text += result
        if self.tools is Tools.TRAINED:
            trajectory.turns = [{"role": "assistant", "content": trajectory.text}]
        else:
            trajectory.turns += [{"role": "assistant", "content": text}, {"role": "user", "content": result.strip()}]

    async def _complete(
        self,
        client: openai.AsyncOpenAI,
        messages: Sequence[Message],
        max_tokens: int,
        *,
        seed: int,
        stop: Sequence[str] = calls.STOP_STRINGS,
    ) -> chat_client.Completion:
        """Send one request, without parameters at their default, because not every server supports them."""
        sampling = self.config.evaluation
        extra: dict[str, Any] = {}
        if sampling.top_k:
            extra["top_k"] = sampling.top_k
        if sampling.penalty != 1.0:
            extra["repetition_penalty"] = sampling.penalty
        if messages[-1]["role"] == "assistant":
            extra |= {"continue_final_message": True, "add_generation_prompt": False}
        return await chat_client.complete(
            client,
            model=self.model,
            messages=list(messages),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=max_tokens,
            stop=list(stop) if self.sandbox_url is not None else openai.omit,
            seed=seed,
            extra_body=extra or None,
        )


def connected(url: str, config: JobConfig) -> openai.AsyncOpenAI:
    """Return a client of the server, an async context manager."""
    return chat_client.open_client(
        chat_client.with_version(url),
        key=os.environ.get(KEY_VARIABLE),
        deadline_s=config.engine.request_timeout_s,
        retries=math.ceil(config.engine.retry_for_s / _BACKOFF_S),
    )


async def first_answer(
    ask: Callable[[openai.AsyncOpenAI], Awaitable[T]],
    client: openai.AsyncOpenAI,
    url: str,
    config: JobConfig,
    log: Log,
) -> T:
    """Return the answer to the first request to a server.

    Later requests are retried silently, because a server may be down for a while. For the first one a refused
    connection is an error, since the address is probably wrong, and a slow answer is logged.

    Args:
        ask: sends the request.
        client: client of the server with its retries.
        url: address as the user wrote it.
        config: timeouts (`engine`).
        log: receives the line about a slow answer.

    Raises:
        UserError: the connection is refused.
        openai.APIError: there is no answer after all retries.
    """
    try:
        async with asyncio.timeout(_SILENT_S):
            return await ask(client.with_options(max_retries=0))
    except TimeoutError:
        why = f"nothing in {_SILENT_S:g} s"
    except openai.APIConnectionError as error:
        if isinstance(error.__cause__, httpx.ConnectError):
            raise UserError(f"cannot connect to {url} ({error.__cause__}): is the server up?") from None
        why = _text(error)
    except openai.APIStatusError as error:
        if chat_client.classify_status(error.status_code) is not chat_client.Trouble.SERVER:
            raise
        why = _text(error)
    engine = config.engine
    log(
        f"no answer from {url} yet ({why}): retrying for about engine.retry_for_s={engine.retry_for_s:g} s; a reply "
        f"may take engine.request_timeout_s={engine.request_timeout_s:g} s"
    )
    return await ask(client)


def served_model(url: str, config: JobConfig, log: Log = lambda _text: None) -> str:
    """Return the name of the server's only model.

    Raises:
        UserError: the server has another number of models, or does not list them.
    """

    async def names() -> list[str]:
        async with connected(url, config) as client:
            return await first_answer(chat_client.model_names, client, url, config, log)

    try:
        found = run_in_loop(names())
    except (openai.APIError, chat_client.UnreadableReplyError) as error:
        raise UserError(f"{url} does not list its models ({_text(error)}); name one with --model NAME") from None
    if len(found) != 1:
        raise UserError(f"{url} has {len(found)} models ({', '.join(found[:5])}); choose one with --model NAME")
    return found[0]


def split_call(text: str, stopped: bool, tools: Sequence[ToolDefinition]) -> tuple[str, str | None]:
    """Return the text up to the end of its tool call, and the closing tag; the whole text and None without a call.

    Servers cut the stop string off. It is restored if the model stopped inside an open call and outside its thoughts.

    Args:
        text: text of the reply.
        stopped: whether the model stopped by itself or at a stop string.
        tools: the tools that the model may call.
    """
    if (stop := calls.find_stop(text, [tool.stop for tool in tools])) is not None:
        return text[: text.find(stop) + len(stop)], stop
    opening = calls.opening_tag(tools).search(text, text.rfind("</think>") + 1)
    if not stopped or opening is None:
        return text, None
    stop = f"</{opening[1]}>"
    return text + stop, stop


def _text(error: Exception) -> str:
    return whole_characters(" ".join(str(error).split())[:300])
