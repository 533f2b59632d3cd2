"""The agent's loop for one conversation: sample to a closing tag, run the tool, insert its result, continue.

Token ids in, token ids out, as in training: sampled text is never tokenized again.
"""

import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from typing import Any

import aiohttp

from arpo_megatron.engine.client import EngineUnavailableError
from arpo_megatron.engine.request import EngineFinish, Sampling
from arpo_megatron.engine.stream import StreamedTokens, stream_generation
from arpo_megatron.rollout.limits import NO_CALLS, AnsweredCall, CallHistory, RolloutLimits
from arpo_megatron.rollout.tools import ToolClient
from arpo_megatron.tasks.protocols.base import TextCodec, ToolCall
from arpo_megatron.tree import Finish

_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token that the model sampled."""

    id: int
    logprob: float | None
    """In nats; None if it was not asked for."""
    entropy: float | None
    """Entropy of the distribution that it was drawn from, in nats; None if the engine does not compute it."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text and tokens that the model has written since the last one."""

    text: str
    """Whole characters, without the end-of-sequence token."""
    tokens: tuple[SampledToken, ...] = ()
    """The tokens since the last one, the end-of-sequence token included."""


@dataclass(frozen=True, slots=True)
class ToolStep:
    """A tool call of the model and its result."""

    name: str
    arguments: dict[str, Any]
    result: str
    """The text that the model reads."""
    status: str
    seconds: float
    token_ids: tuple[int, ...] = ()
    """The inserted result, with its tags."""

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("name", "arguments", "result", "status", "seconds")}


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of the agent's answer."""

    finish: Finish
    """Why the last turn of the model ended; for a call, why the call had no result."""
    prompt_tokens: int
    completion_tokens: int
    """Tokens that the model sampled; those of tool results are not counted."""
    weight_version: int = 0
    """Version of the weights that sampled the last turn."""

    @property
    def reason(self) -> str:
        """OpenAI's `finish_reason`: "stop" or "length"."""
        return "length" if self.finish is Finish.LENGTH else "stop"


Event = TextDelta | ToolStep | Ended


@dataclass(frozen=True, slots=True)
class ServedAgent:
    """Answers conversations with the model of an engine and the tools of a service."""

    session: aiohttp.ClientSession
    engine_url: str
    engine_token: str | None
    tools: ToolClient
    limits: RolloutLimits
    codec: TextCodec
    prompt: Callable[[Sequence[dict[str, str]]], str]
    """Messages -> the text that the model is prompted with."""
    training_limits: RolloutLimits | None = None
    """The limits of training, for continuations of its trees; None: `limits`."""
    vocabulary: int | None = None
    """Number of token ids that the engine can read, at least those of `codec`; None: these."""

    def check_ids(self, name: str, ids: object) -> None:
        """Raise ValueError if a field of a request is no list of ids that the engine can read: others may end it."""
        size = self.vocabulary or self.codec.vocabulary_size
        if not isinstance(ids, list) or not all(isinstance(each, int) and 0 <= each < size for each in ids):
            ids_of = f"this model's token ids is needed, 0 to {size - 1}"
            raise ValueError(f"{name}: a list of {ids_of}; use the run's own model")

    async def answer(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: Sampling,
        max_tokens: int | None,
        trajectory_id: str,
        *,
        logprobs: bool = False,
    ) -> AsyncIterator[Event]:
        """Yield the events of one answer; the last one is `Ended`.

        Args:
            messages: the conversation, with `role` and `content`. An earlier answer of the agent has `tool_steps`,
                whose results are inserted again: `result`, and `offset`, the number of characters before it.
            sampling: how tokens are drawn.
            max_tokens: most tokens of the answer, tool results included; None: the limit of the agent.
            trajectory_id: names the conversation to the tool service.
            logprobs: ask for the log-probs of tokens.

        Raises:
            ValueError: the conversation has no room for an answer.
            EngineRefusedError, aiohttp.ClientError: the engine failed.
            SandboxUnavailable: the tool service failed.
        """
        ids = self._prompt_ids(messages)
        start = Start(ids, len(ids))
        async for event in self.proceed(start, sampling, max_tokens, trajectory_id, logprobs=logprobs):
            yield event

    def _prompt_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens of a conversation. A result is tokenized alone: it cannot spell special tokens."""
        mark, results, plain = secrets.token_hex(16), list[str](), []
        for message in messages:
            text, written = "", 0
            for step in message.get("tool_steps") or ():
                text += f"{message['content'][written : step['offset']]}{mark}{len(results)};"
                written = step["offset"]
                results.append(step["result"])
            plain.append({"role": message["role"], "content": text + message["content"][written:]})
        ids: list[int] = []
        for number, part in enumerate(re.split(rf"{mark}(\d+);", self.prompt(plain))):
            ids += self._tokens(results[int(part)]) if number % 2 else self.codec.encode(part)
        return ids

    async def proceed(
        self, start: "Start", sampling: Sampling, max_tokens: int | None, trajectory_id: str, *, logprobs: bool = False
    ) -> AsyncIterator[Event]:
        """Yield the events of one continuation of given tokens; arguments and errors are those of `answer`."""
        limits, ids = self.limits, list(start.token_ids)
        room = min(
            limits.max_length - len(ids),
            start.prompt_tokens + limits.max_response_tokens - len(ids),
            max_tokens or limits.max_length,
        )
        if len(ids) >= limits.max_length:
            raise ValueError(f"the conversation has {len(ids)} tokens; the model's context has {limits.max_length}")
        if room <= 0:
            used = f"{len(ids) - start.prompt_tokens} of max_response_tokens={limits.max_response_tokens}"
            raise ValueError(f"no room for an answer: {used} tokens are used")
        state = _State(prompt=len(ids), ids=ids, end=len(ids) + room, history=start.history)
        while state.left > 0:
            turn = _Turn(self.codec)
            async for streamed in stream_generation(
                self.session,
                self.engine_url,
                self.engine_token,
                state.ids,
                max_new_tokens=min(state.left, limits.max_turn_tokens or state.left),
                sampling=sampling,
                stop=limits.stops,
                logprobs=logprobs,
            ):
                if delta := turn.read(streamed):
                    yield delta
            state.sampled += len(streamed.token_ids)
            state.version = streamed.weight_version
            state.ids.extend(streamed.token_ids)
            if streamed.finish in (None, EngineFinish.CUT_SHORT):
                raise EngineUnavailableError("the engine aborted the answer: ask again")
            read = await limits.read_turn(turn.text, streamed.finish, streamed.matched, state.history, state.left)
            state.history = read.history
            if read.call is None:
                yield state.ended(read.finish)
                return
            step = await self._answer_call(read.call, trajectory_id)
            yield step
            state.ids.extend(step.token_ids)
        yield state.ended(Finish.LENGTH)

    async def _answer_call(self, call: AnsweredCall, trajectory_id: str) -> ToolStep:
        if not isinstance(call, ToolCall):
            return ToolStep(call.tool, {}, call.result, call.status, 0.0, self._tokens(call.result))
        began = time.monotonic()
        arguments = dict(call.arguments)
        answer = await self.tools.call(
            call.tool, arguments, trajectory_id=trajectory_id, timeout_s=self.limits.tool_timeout_s
        )
        seconds = round(time.monotonic() - began, 3)
        return ToolStep(call.tool, arguments, answer.text, answer.status, seconds, self._tokens(answer.text))

    def _tokens(self, result: str) -> tuple[int, ...]:
        return tuple(self.limits.protocol.result_frame().tokens(result, self.codec, self.limits.max_tool_tokens))


@dataclass(frozen=True, slots=True)
class Start:
    """The tokens that an answer continues."""

    token_ids: Sequence[int]
    prompt_tokens: int
    """How many of them are the prompt; the others count towards the limit of an answer."""
    history: CallHistory = NO_CALLS
    """The calls among them."""


@dataclass(slots=True)
class _State:
    """Tokens and calls of an answer in progress."""

    prompt: int
    ids: list[int]
    end: int
    """Largest number of tokens, prompt included."""
    history: CallHistory
    sampled: int = 0
    version: int = 0

    @property
    def left(self) -> int:
        return self.end - len(self.ids)

    def ended(self, finish: Finish) -> Ended:
        return Ended(finish, self.prompt, self.sampled, self.version)


@dataclass(slots=True)
class _Turn:
    """Text of one generation, released in whole characters."""

    codec: TextCodec
    text: str = ""
    _sent: int = field(default=0)
    _tokens_sent: int = field(default=0)

    def read(self, streamed: StreamedTokens) -> TextDelta | None:
        """Return what is new; half a character waits for its rest."""
        ids, last = streamed.token_ids, streamed.finish is not None
        written = ids[:-1] if streamed.finish is EngineFinish.END_TOKEN else ids
        self.text = self.codec.decode(list(written))
        whole = len(self.text) if last else len(self.text.rstrip(_REPLACEMENT))
        new = self.text[self._sent : whole]
        if not new and not last:
            return None
        first, self._sent, self._tokens_sent = self._tokens_sent, max(self._sent, whole), len(ids)
        details = zip_longest(ids, streamed.logprobs, streamed.entropies)
        return TextDelta(new, tuple(SampledToken(*each) for each in islice(details, first, len(ids))))
