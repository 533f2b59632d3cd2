"""Any server that speaks OpenAI's chat format: SGLang, vLLM, a provider.

Such a server takes and gives text, so trajectories are grown as text here: until a tool's closing tag, then the tool's
answer, then on. A model that was trained on the protocol reads the result inside its own turn, which needs the
`continue_final_message` of SGLang and vLLM; one that is only prompted gets it as a message, which every server takes.
"""

import asyncio
import math
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import openai

from arpo_megatron.algorithms.branching import path_seed
from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.evaluation.agents.base import Deliver, PendingQuestion
from arpo_megatron.evaluation.journal import Outcome
from arpo_megatron.evaluation.prompts import Tools
from arpo_megatron.evaluation.response import AgentResponse, NoResponse, Response
from arpo_megatron.rollout.tools import ToolClient
from arpo_megatron.tasks.base import Message
from arpo_megatron.tasks.tags import calls as protocol
from arpo_megatron.tree import Finish
from arpo_megatron.utils import chat_client as chat
from arpo_megatron.utils.text import whole_characters
from tools_sandbox.client import SandboxError

KEY_VARIABLE = "OPENAI_API_KEY"
"""Environment variable of the server's key, if it wants one."""
_BACKOFF_S = 8.0
"""Longest pause between two tries of the openai client."""
_SILENT_S = 10.0
"""How long the first request may take before the user is told that it does."""
_EXTENSIONS = ("top_k", "repetition_penalty", "continue_final_message", "add_generation_prompt")
"""Parameters that SGLang and vLLM have beyond OpenAI's."""
_CHARACTERS = 4
"""Of a tool's result for each token it may have: a server's tokenizer is not known here."""

Tell = Callable[[str], None]
T = TypeVar("T")


@dataclass(slots=True)
class _Trajectory:
    """What has been said so far at one attempt."""

    text: str = ""
    model_text: str = ""
    turns: list[Message] = field(default_factory=list)
    tool_calls: int = 0
    tool_errors: int = 0
    model_tokens: int = 0
    prompt_tokens: int = 0
    length: int = 0  # tokens behind the prompt

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
    """Answers with a model behind an address.

    Attributes:
        url: of the server; `/v1` is added where it has no path.
        model: its name there.
        config: sampling (`evaluation`), limits (`rollout`), patience and requests at once (`engine`), seed.
        tools: how the model comes to its tools.
        sandbox_url: of the tool service; None without tools.
        sandbox_token: its token, if it has one.
        tell: takes a line for the user where the server is not there at once.
    """

    url: str
    model: str
    config: JobConfig
    tools: Tools
    sandbox_url: str | None
    sandbox_token: str | None = None
    tell: Tell = lambda _text: None

    def answer(self, wanted: Sequence[PendingQuestion], deliver: Deliver) -> None:
        """As the protocol says. Raises UserError where the server refuses the kind of request that is needed."""
        asyncio.run(self._answer_all(wanted, deliver))

    async def _answer_all(self, wanted: Sequence[PendingQuestion], deliver: Deliver) -> None:
        places = asyncio.Semaphore(self.config.engine.max_running_requests)
        retry_for_s = self.config.engine.retry_for_s
        async with connected(self.url, self.config) as client:
            sandbox = None
            if self.sandbox_url is not None:
                sandbox = ToolClient(self.sandbox_url, self.sandbox_token, retry_for_s=retry_for_s)
            try:
                await self._probe(client)

                async def one(each: PendingQuestion, number: int) -> None:
                    async with places:
                        given = await self._attempt(client, sandbox, each, number)
                    deliver(each, {number: given})

                async with asyncio.TaskGroup() as group:
                    for each in wanted:
                        for number in each.attempts:
                            group.create_task(one(each, number))
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
            finally:
                if sandbox is not None:
                    await sandbox.__aexit__(None, None, None)

    async def _probe(self, client: openai.AsyncOpenAI) -> None:
        """One token with all the parameters, so that what the server does not take is said once and at once.

        Its context may still be too short for what follows: `arpo eval` tells at the end what was refused.
        """
        question: Message = {"role": "user", "content": "1+1="}

        async def ask(client: openai.AsyncOpenAI) -> None:
            await self._complete(client, [question], 1, seed=0)
            if self.tools is Tools.TRAINED:  # behind a tool's result the model's own turn goes on
                await self._complete(client, [question, {"role": "assistant", "content": "<think>"}], 1, seed=0)

        try:
            await first_answer(ask, client, self.url, self.config, self.tell)
        except chat.UnreadableReplyError as error:
            raise UserError(
                f"{self.url} does not speak OpenAI's chat format: asked for one token it gave {error}"
            ) from None
        except openai.APIStatusError as error:
            said, trouble = _text(error), chat.trouble_of(error.status_code)
            if trouble is chat.Trouble.SERVER:
                raise UserError(f"{self.url} is up but does not answer: {said}") from None
            if trouble is chat.Trouble.ACCESS:
                raise self._no_access(error) from None
            hint = ""
            if any(name in said for name in _EXTENSIONS):
                hint = (
                    "; a server without these extensions takes evaluation.top_k=0 "
                    "evaluation.repetition_penalty=1.0 and --tools prompt or none"
                )
            raise UserError(f"{self.url} does not accept what {self.model} is to be asked: {said}{hint}") from None
        except openai.APIError as error:
            raise UserError(f"{self.url} does not answer: {_text(error)}") from None

    async def _attempt(
        self, client: openai.AsyncOpenAI, sandbox: ToolClient | None, wanted: PendingQuestion, number: int
    ) -> Response:
        try:
            return await self._respond(client, sandbox, wanted, number)
        except SandboxError as error:
            return NoResponse(Outcome.TOOLS, str(error))
        except openai.APIStatusError as error:
            trouble = chat.trouble_of(error.status_code)
            if trouble is chat.Trouble.ACCESS:
                raise self._no_access(error) from None
            return NoResponse(Outcome.ENGINE if trouble is chat.Trouble.SERVER else Outcome.REFUSED, _text(error))
        except (openai.APIError, chat.UnreadableReplyError) as error:
            return NoResponse(Outcome.ENGINE, _text(error))

    def _no_access(self, error: openai.APIStatusError) -> UserError:
        """Also in the middle of an evaluation: a key that ended, a model that was taken away."""
        return UserError(
            f"{self.url} answers {error.status_code} for {self.model!r} ({_text(error)}): check the address, --model "
            f"and the key in ${KEY_VARIABLE}; attempts that are made are kept, and the same command makes the others"
        )

    async def _respond(
        self, client: openai.AsyncOpenAI, sandbox: ToolClient | None, wanted: PendingQuestion, number: int
    ) -> AgentResponse:
        """Alternate between model and tool until the trajectory ends."""
        said, began, limits = _Trajectory(), time.monotonic(), self.config.rollout
        while (left := limits.max_response_tokens - said.length) > 0:
            seed = path_seed(self.config.seed, 0, wanted.task.id, (number, said.tool_calls))
            answer = await self._complete(client, [*wanted.task.messages, *said.turns], left, seed=seed)
            if answer.prompt_tokens is not None and answer.completion_tokens is not None:
                said.prompt_tokens = said.prompt_tokens or answer.prompt_tokens
                said.model_tokens += answer.completion_tokens
                said.length = answer.prompt_tokens + answer.completion_tokens - said.prompt_tokens
            text, stop = answer.text, None
            if sandbox is not None:  # else a tag is prose
                text, stop = call_in(answer.text, answer.finish_reason == "stop")
            said.text += text
            said.model_text += text
            if stop is None or sandbox is None:
                return said.response(Finish.LENGTH if answer.finish_reason == "length" else Finish.END, began)
            call = protocol.parse_call(text, stop)
            if isinstance(call, protocol.Malformed):
                return said.response(Finish.MALFORMED, began)
            if said.tool_calls >= limits.max_tool_calls:
                return said.response(Finish.CALL_LIMIT, began)
            result = await sandbox.call(
                call.tool,
                dict(call.arguments),
                trajectory_id=f"{wanted.task.id}/{number}",
                timeout_s=limits.tool_timeout_s,
            )
            said.tool_calls += 1
            said.tool_errors += result.status != "ok"
            shown = whole_characters(result.text[: _CHARACTERS * limits.max_tool_tokens])
            self._append(said, text, protocol.result_text(shown))
        return said.response(Finish.LENGTH, began)

    def _append(self, said: _Trajectory, text: str, result: str) -> None:
        """Put a tool's result behind the model's `text`."""
        said.text += result
        if self.tools is Tools.TRAINED:
            said.turns = [{"role": "assistant", "content": said.text}]
        else:
            said.turns += [{"role": "assistant", "content": text}, {"role": "user", "content": result.strip()}]

    async def _complete(
        self, client: openai.AsyncOpenAI, messages: Sequence[Message], max_tokens: int, *, seed: int
    ) -> chat.Completion:
        """One request; only what changes something is sent, since not every server knows every parameter."""
        drawn = self.config.evaluation
        extra: dict[str, Any] = {}
        if drawn.top_k:
            extra["top_k"] = drawn.top_k
        if drawn.penalty != 1.0:
            extra["repetition_penalty"] = drawn.penalty
        if messages[-1]["role"] == "assistant":
            extra |= {"continue_final_message": True, "add_generation_prompt": False}
        return await chat.complete(
            client,
            model=self.model,
            messages=list(messages),
            temperature=drawn.temperature,
            top_p=drawn.top_p,
            max_tokens=max_tokens,
            stop=list(protocol.STOP_STRINGS) if self.sandbox_url is not None else openai.omit,
            seed=seed,
            extra_body=extra or None,
        )


def connected(url: str, config: JobConfig) -> openai.AsyncOpenAI:
    """A client of the server; use as `async with`."""
    return chat.connected(
        url if urlsplit(url).path.strip("/") else url.rstrip("/") + "/v1",
        key=os.environ.get(KEY_VARIABLE),
        deadline_s=config.engine.request_timeout_s,
        retries=math.ceil(config.engine.retry_for_s / _BACKOFF_S),
    )


async def first_answer(
    ask: Callable[[openai.AsyncOpenAI], Awaitable[T]],
    client: openai.AsyncOpenAI,
    url: str,
    config: JobConfig,
    tell: Tell,
) -> T:
    """What the first request to a server is answered with.

    Later ones are repeated in silence, for a server may be away for a while. One that never was there is likelier a
    wrong address: that nothing can be connected to is said at once, and that an answer keeps the user waiting too.

    Args:
        ask: makes the request.
        client: of the server, with all its patience.
        url: its address, as the user gave it.
        config: patience (`engine`).
        tell: takes the line that says what is waited for.

    Raises:
        UserError: nothing listens there.
        openai.APIError: there is no answer.
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
        if chat.trouble_of(error.status_code) is not chat.Trouble.SERVER:
            raise
        why = _text(error)
    engine = config.engine
    tell(
        f"no answer from {url} yet ({why}): what fails is sent again for about engine.retry_for_s="
        f"{engine.retry_for_s:g} s, and a reply may take engine.request_timeout_s={engine.request_timeout_s:g} s"
    )
    return await ask(client)


def served_model(url: str, config: JobConfig, tell: Tell = lambda _text: None) -> str:
    """The name of the only model that a server has. Raises UserError where there are several, or none can be told."""

    async def names() -> list[str]:
        async with connected(url, config) as client:
            return await first_answer(chat.model_names, client, url, config, tell)

    try:
        found = asyncio.run(names())
    except (openai.APIError, chat.UnreadableReplyError) as error:
        raise UserError(f"{url} does not say which models it has ({_text(error)}); give --model NAME") from None
    if len(found) != 1:
        raise UserError(f"{url} has {len(found)} models ({', '.join(found[:5])}); choose with --model NAME")
    return found[0]


def call_in(text: str, stopped: bool) -> tuple[str, str | None]:
    """The text up to the end of its tool call, and the closing tag that ends it; None where it holds no call.

    Servers cut the stop string off. Where the model stopped inside an open call, outside its thoughts, it was that.

    Args:
        text: what the server gave.
        stopped: whether the model stopped by itself or at a stop string.
    """
    if (stop := protocol.find_stop(text)) is not None:
        return text[: text.find(stop) + len(stop)], stop
    opening = protocol.OPENING.search(text, text.rfind("</think>") + 1)
    if not stopped or opening is None:
        return text, None
    stop = f"</{opening[1]}>"
    return text + stop, stop


def _text(error: Exception) -> str:
    return whole_characters(" ".join(str(error).split())[:300])
