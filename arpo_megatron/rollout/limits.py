"""Limits of a trajectory, and what they make of a turn of the model. Training and serving share them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self, TypeVar

from arpo_megatron.config import EvalConfig, JobConfig
from arpo_megatron.engine.request import EngineFinish
from arpo_megatron.tasks.protocols.base import CallProtocol, InvalidCall, Malformed, Notice, ToolCall
from arpo_megatron.tasks.tags.calls import ANSWER_STOP
from arpo_megatron.tasks.tags.protocol import DEFAULT_PROTOCOL
from arpo_megatron.tree import Finish

T = TypeVar("T")

AnsweredCall = ToolCall | InvalidCall | Notice
"""A call that gets a result: of the tool, or a text that states why there is none."""
LIMIT, REPEATED = "limit", "repeated"
"""Statuses of calls that a limit refuses, or that the path has made before."""


@dataclass(frozen=True, slots=True)
class CallHistory:
    """The calls of a path so far."""

    calls: tuple[tuple[str, str], ...] = ()
    """Tool and arguments (as JSON) of each call that counts."""
    notices: frozenset[str] = frozenset()
    """Names of the limits whose notices the model has read."""


NO_CALLS = CallHistory()


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """How a turn of the model ended."""

    finish: Finish
    history: CallHistory
    """The calls of the path, that of this turn included."""
    call: AnsweredCall | None = None
    """The call to answer; None if the trajectory ends with the turn."""


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """Limits of a trajectory; see `config.RolloutConfig`."""

    max_length: int
    """Tokens of prompt and response together."""
    max_response_tokens: int
    max_tool_calls: int
    max_tool_tokens: int
    tool_timeout_s: float
    stop_at_answer: bool = False
    sessions: bool = False
    """A python call starts from the interpreter state that the previous one on its path has left."""
    protocol: CallProtocol = DEFAULT_PROTOCOL
    """The form of calls, with the tools that the policy may call. A config names it; the rollout process builds it."""
    max_calls_by_tool: tuple[tuple[str, int], ...] = ()
    max_turn_tokens: int | None = None
    at_limit: Literal["end", "answer_now"] = "end"
    answer_tokens: int | None = None
    refuse_repeated: tuple[str, ...] = ()
    deterministic_tools: tuple[str, ...] = ()

    @classmethod
    def training(cls, config: JobConfig) -> Self:
        """Return the limits of training, from `rollout` and `model.max_length`."""
        rollout = config.rollout
        return cls(
            max_length=config.model.max_length,
            max_response_tokens=rollout.max_response_tokens,
            max_tool_calls=rollout.max_tool_calls,
            max_tool_tokens=rollout.max_tool_tokens,
            tool_timeout_s=rollout.tool_timeout_s,
            stop_at_answer=rollout.stop_at_answer,
            sessions=config.sandbox.sessions,
            max_calls_by_tool=_pairs(rollout.max_calls_by_tool),
            max_turn_tokens=rollout.max_turn_tokens,
            at_limit=rollout.at_limit,
            answer_tokens=rollout.answer_tokens,
            refuse_repeated=rollout.refuse_repeated,
            deterministic_tools=rollout.deterministic_tools,
        )

    @classmethod
    def evaluation(cls, config: JobConfig) -> Self:
        """Return the limits of evaluations: those of section `evaluation`, and of training if it has none."""
        own: EvalConfig = config.evaluation
        limits = cls.training(config)
        by_tool = own.max_calls_by_tool
        return replace(
            limits,
            max_tool_calls=_first(own.max_tool_calls, limits.max_tool_calls),
            max_calls_by_tool=limits.max_calls_by_tool if by_tool is None else _pairs(by_tool),
            max_turn_tokens=_first(own.max_turn_tokens, limits.max_turn_tokens),
            max_response_tokens=_first(own.max_response_tokens, limits.max_response_tokens),
            max_tool_tokens=_first(own.max_tool_tokens, limits.max_tool_tokens),
            answer_tokens=_first(own.answer_tokens, limits.answer_tokens),
            refuse_repeated=_first(own.refuse_repeated, limits.refuse_repeated),
            tool_timeout_s=_first(own.tool_timeout_s, limits.tool_timeout_s),
            stop_at_answer=_first(own.stop_at_answer, limits.stop_at_answer),
            at_limit=_first(own.at_limit, limits.at_limit),
        )

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end a generation."""
        return (*self.protocol.stops, *([ANSWER_STOP] if self.stop_at_answer else []))

    @property
    def shared_tools(self) -> frozenset[str]:
        """The tools whose equal calls in a tree share one execution."""
        cached = {tool.name for tool in self.protocol.tools if tool.cacheable}
        return frozenset(cached | set(self.deterministic_tools))

    async def read_turn(
        self, text: str, finish: EngineFinish, matched: str | None, history: CallHistory, room: int
    ) -> TurnEnd:
        """Return how a turn ended, and the call that its text makes.

        Args:
            text: the turn, without an end token.
            finish: why the engine stopped.
            matched: stop string with which the turn ends.
            history: calls of the path before it.
            room: tokens that the trajectory may still have after it.
        """
        if matched is None and finish is not EngineFinish.END_TOKEN:
            return TurnEnd(Finish.LENGTH, history)
        if matched == ANSWER_STOP:
            return TurnEnd(Finish.END, history)
        call = await self.protocol.read_call(text, matched)
        if call is None:
            return TurnEnd(Finish.END, history)
        if isinstance(call, Malformed):
            return TurnEnd(Finish.MALFORMED, history)
        if (admitted := self.admit(call, history, room)) is None:
            return TurnEnd(Finish.CALL_LIMIT, history)
        allowed, after = admitted
        return TurnEnd(Finish.TOOL_CALL, after, allowed)

    def admit(
        self, call: ToolCall | InvalidCall, history: CallHistory, room: int
    ) -> tuple[AnsweredCall, CallHistory] | None:
        """Return what answers a call, and the history after it; None if the trajectory ends with the call.

        Args:
            call: the call.
            history: the calls before it.
            room: tokens that the trajectory may still have after it.
        """
        key = (call.tool, json.dumps(call.arguments, sort_keys=True) if isinstance(call, ToolCall) else "")
        after = replace(history, calls=(*history.calls, key))
        if (reached := self._reached(call.tool, history, room)) is not None:
            name, text = reached
            if self.at_limit == "end" or name in history.notices:
                return None
            return Notice(call.tool, LIMIT, text), replace(history, notices=history.notices | {name})
        if isinstance(call, ToolCall) and call.tool in self.refuse_repeated and key in history.calls:
            return Notice(call.tool, REPEATED, "You have made this call before; its result is above."), after
        return call, after

    def _reached(self, tool: str, history: CallHistory, room: int) -> tuple[str, str] | None:
        """Return name and text of the limit that a further call of a tool exceeds."""
        answer_room = self.max_response_tokens // 8 if self.answer_tokens is None else self.answer_tokens
        if len(history.calls) >= self.max_tool_calls:
            return "calls", f"The limit of {self.max_tool_calls} tool calls is reached. Answer now."
        most = dict(self.max_calls_by_tool).get(tool)
        if most is not None and sum(name == tool for name, _ in history.calls) >= most:
            return tool, f"The limit of {most} calls of {tool} is reached. Continue without it."
        if self.at_limit == "answer_now" and room < self.max_tool_tokens + answer_room:
            return "tokens", "There is no room for another tool result. Answer now."
        return None


def _pairs(by_tool: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(by_tool.items()))


def _first(own: T | None, other: T) -> T:
    return other if own is None else own
