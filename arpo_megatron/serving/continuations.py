"""`POST /v1/continuations`: further samples from the middle of a stored trajectory, with the agent's tools.

Token ids in, token ids out: a page that shows a stored tree grows a branch of it again.
"""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from arpo_megatron.engine.request import Sampling
from arpo_megatron.rollout.limits import CallHistory
from arpo_megatron.serving.agent import Ended, Event, SampledToken, ServedAgent, Start, TextDelta, ToolStep
from arpo_megatron.tree import Finish, Role

MAX_CONTINUATIONS = 16
_Positive = Field(default=None, ge=1)


class PastCall(BaseModel):
    """A call among the given tokens."""

    name: str
    arguments: dict[str, Any]


class ContinuationRequest(BaseModel):
    """Body of a request for continuations of a trajectory."""

    model_config = ConfigDict(extra="forbid")
    token_ids: list[int] = Field(min_length=1)
    """Everything before the continuations."""
    prompt_tokens: int = Field(ge=1)
    """How many of them are the prompt."""
    calls: list[PastCall] = []
    """The calls among them, which count towards the agent's limits."""
    n: int = Field(default=1, ge=1, le=MAX_CONTINUATIONS)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    max_tokens: int | None = _Positive
    seed: int | None = None


async def continuations(agent: ServedAgent, sampling: Sampling, wanted: ContinuationRequest) -> list[dict[str, Any]]:
    """Sample continuations, all at once.

    Args:
        agent: the agent.
        sampling: how tokens are drawn; continuation i has the seed `wanted.seed` + i, or a random one.
        wanted: the request.

    Returns:
        For each: `weight_version`, and `segments`, each with the fields of a stored segment (`role`, `token_ids`,
        `logprobs`, `entropies`, `finish`, `tool`).

    Raises:
        ValueError: there is no room for another token, or a token id is not in the vocabulary.
        EngineRefusedError, aiohttp.ClientError, SandboxError: a service failed.
    """
    agent.check_ids("token_ids", wanted.token_ids)
    history = CallHistory(tuple((call.name, json.dumps(call.arguments, sort_keys=True)) for call in wanted.calls))
    start = Start(wanted.token_ids, wanted.prompt_tokens, history)
    first = secrets.randbelow(2**30) if wanted.seed is None else wanted.seed

    async def one(index: int) -> dict[str, Any]:
        own, name = replace(sampling, seed=first + index), f"continuation-{secrets.token_hex(8)}"
        return await _collected(agent.proceed(start, own, wanted.max_tokens, name, logprobs=True))

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(index)) for index in range(wanted.n)]
    return [task.result() for task in tasks]


async def _collected(events: AsyncIterator[Event]) -> dict[str, Any]:
    segments: list[dict[str, Any]] = []
    turn: list[SampledToken] = []
    version = 0

    def end_turn(finish: Finish) -> None:
        segments.append(
            {
                "role": Role.MODEL,
                "token_ids": [token.id for token in turn],
                "logprobs": [token.logprob for token in turn],
                "entropies": [token.entropy for token in turn if token.entropy is not None],
                "finish": finish,
                "tool": None,
            }
        )
        turn.clear()

    async for event in events:
        match event:
            case TextDelta():
                turn += event.tokens
            case ToolStep():
                end_turn(Finish.TOOL_CALL)
                tool = {**event.to_dict(), "cached": False}
                del tool["result"]
                segments.append(
                    {"role": Role.TOOL, "token_ids": list(event.token_ids)}
                    | {"logprobs": None, "entropies": None, "finish": None, "tool": tool}
                )
            case Ended():
                version = event.weight_version
                if turn:
                    end_turn(event.finish)
                else:  # no room for a token after a result: it is left out, as in training
                    segments.pop()
                    segments[-1]["finish"] = event.finish
    return {"weight_version": version, "segments": segments}
