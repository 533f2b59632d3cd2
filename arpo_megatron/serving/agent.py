"""The agent's loop for one conversation: sample to a closing tag, run the tool, insert its result, continue.

Token ids in, token ids out, as in training: sampled text is never tokenized again.
"""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from arpo_megatron.engine.request import EngineFinish, Sampling
from arpo_megatron.engine.stream import stream_generation
from arpo_megatron.rollout.limits import NO_CALLS, RolloutLimits
from arpo_megatron.rollout.tools import ToolClient
from arpo_megatron.tasks.protocols.base import Malformed, Reading, TextCodec, ToolCall
from arpo_megatron.tasks.tags.calls import ANSWER_STOP

_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that the model has written since the last one, without its end-of-sequence token."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolStep:
    """A finished tool call."""

    name: str
    arguments: dict[str, Any]
    result: str
    """The text that the model reads."""
    status: str
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {name: getattr(self, name) for name in ("name", "arguments", "result", "status", "seconds")}


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of the agent's answer."""

    reason: str
    """OpenAI's word: "stop" or "length"."""
    prompt_tokens: int
    completion_tokens: int
    """Tokens that the model sampled; those of tool results are not counted."""


Event = TextDelta | ToolStep | Ended


@dataclass(frozen=True, slots=True)
class Agent:
    """Answers conversations with the model of an engine and the tools of a service."""

    session: aiohttp.ClientSession
    engine_url: str
    engine_token: str | None
    tools: ToolClient
    limits: RolloutLimits
    codec: TextCodec
    prompt: Callable[[Sequence[dict[str, str]]], str]
    """Messages -> the text that the model is prompted with."""

    async def answer(
        self, messages: Sequence[dict[str, str]], sampling: Sampling, max_tokens: int | None, trajectory_id: str
    ) -> AsyncIterator[Event]:
        """Yield the events of one answer; the last one is `Ended`.

        Args:
            messages: the conversation, with `role` and `content`.
            sampling: how tokens are drawn.
            max_tokens: most tokens of the answer, tool results included; None: the limit of the agent.
            trajectory_id: names the conversation to the tool service.

        Raises:
            ValueError: the conversation has no room for an answer.
            EngineRefusedError, aiohttp.ClientError: the engine failed.
            SandboxUnavailable: the tool service failed.
        """
        limits = self.limits
        ids = list(self.codec.encode(self.prompt(messages)))
        room = min(limits.max_length - len(ids), limits.max_response_tokens, max_tokens or limits.max_response_tokens)
        if room <= 0:
            raise ValueError(f"the conversation has {len(ids)} tokens; the model's context has {limits.max_length}")
        state = _State(prompt=len(ids), ids=ids, end=len(ids) + room)
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
            ):
                written = streamed.token_ids[:-1] if streamed.finish is EngineFinish.END_TOKEN else streamed.token_ids
                if text := turn.read(written, last=streamed.finish is not None):
                    yield TextDelta(text)
            state.sampled += len(streamed.token_ids)
            state.ids.extend(streamed.token_ids)
            stop = streamed.matched
            if streamed.finish is EngineFinish.LENGTH or stop == ANSWER_STOP:
                yield state.ended("length" if streamed.finish is EngineFinish.LENGTH else "stop")
                return
            step = await self._call(await limits.protocol.read_call(turn.text, stop), state, trajectory_id)
            if step is None:
                yield state.ended("stop")
                return
            yield step
            state.ids.extend(self._result_tokens(step.result))
        yield state.ended("length")

    async def _call(self, call: Reading, state: "_State", trajectory_id: str) -> ToolStep | None:
        """Answer a call; None if the answer ends."""
        if call is None or isinstance(call, Malformed):
            return None
        admitted = self.limits.admit(call, state.history, state.left)
        if admitted is None:
            return None
        allowed, state.history = admitted
        if not isinstance(allowed, ToolCall):
            return ToolStep(allowed.tool, {}, allowed.result, allowed.status, 0.0)
        began = time.monotonic()
        arguments = dict(allowed.arguments)
        answer = await self.tools.call(
            allowed.tool, arguments, trajectory_id=trajectory_id, timeout_s=self.limits.tool_timeout_s
        )
        return ToolStep(allowed.tool, arguments, answer.text, answer.status, round(time.monotonic() - began, 3))

    def _result_tokens(self, text: str) -> list[int]:
        return self.limits.protocol.result_tokens(text, self.codec, self.limits.max_tool_tokens)


@dataclass(slots=True)
class _State:
    """Tokens and calls of an answer in progress."""

    prompt: int
    ids: list[int]
    end: int
    """Largest number of tokens, prompt included."""
    sampled: int = 0
    history: Any = NO_CALLS

    @property
    def left(self) -> int:
        return self.end - len(self.ids)

    def ended(self, reason: str) -> Ended:
        return Ended(reason, self.prompt, self.sampled)


@dataclass(slots=True)
class _Turn:
    """Text of one generation, released in whole characters."""

    codec: TextCodec
    text: str = ""
    _sent: int = field(default=0)

    def read(self, token_ids: Sequence[int], *, last: bool) -> str:
        """Return the text that is new; half a character waits for its rest."""
        self.text = self.codec.decode(list(token_ids))
        whole = len(self.text) if last else len(self.text.rstrip(_REPLACEMENT))
        new, self._sent = self.text[self._sent : whole], max(self._sent, whole)
        return new
