"""The bodies of requests to `arpo serve`, and their checks."""

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from arpo_megatron.serving.agent import ServedAgent
from arpo_megatron.serving.continuations import ContinuationRequest

_ID_FIELDS = ("input_ids", "stop_token_ids")
"""Fields of SGLang's requests with token ids that it does not check."""


class PastStep(BaseModel):
    """A tool call of an earlier answer; its other fields are ignored."""

    result: str
    offset: int = Field(ge=0)
    """Number of characters of the answer before it."""


class ChatMessage(BaseModel):
    """A message of `/v1/chat/completions`."""

    role: Literal["system", "user", "assistant"]
    content: str
    tool_steps: list[PastStep] = []
    """The tool calls of an answer of the agent, whose results its model has read."""

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, content: Any) -> Any:
        """Return the text of OpenAI's list of parts."""
        if not isinstance(content, list):
            return content
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if not all(isinstance(part, str) for part in parts):
            raise ValueError("only text parts can be read")
        return "".join(map(str, parts))


_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "stop": (None, [], ""),
    **dict.fromkeys(("tools", "functions"), (None, [])),
    "tool_choice": (None, "auto"),
    "function_call": (None, "auto"),
    "response_format": (None, {"type": "text"}),
    "logit_bias": (None, {}),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "top_logprobs", "min_tokens"), (None, 0)),
    **dict.fromkeys(("top_k", "min_p", "repetition_penalty"), (None,)),
}
"""Parameters that would change the answer and that the agent does not honour: the values that change nothing."""


class ChatRequest(BaseModel):
    """The parameters of a chat completion that the agent honours.

    Parameters that would change the answer (`_NEUTRAL`) are refused; others, such as `user`, are ignored.
    """

    model_config = ConfigDict(extra="ignore")
    messages: list[ChatMessage] = Field(min_length=1)
    model: str | None = None
    stream: bool = False
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    n: Literal[1] | None = None
    logprobs: bool = False

    @field_validator("messages")
    @classmethod
    def _ask_something(cls, messages: list[ChatMessage]) -> list[ChatMessage]:
        if all(message.role == "system" for message in messages):
            raise ValueError("only system messages: add the user's question")
        return messages

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_honoured(cls, values: Any) -> Any:
        given = values if isinstance(values, dict) else {}
        for name in given.keys() & _NEUTRAL.keys():
            if given[name] not in _NEUTRAL[name]:
                raise ValueError(f"the agent does not honour {name}; leave it out, or serve with --plain")
        return values


def read_request(body: bytes, *, chat: bool) -> ChatRequest | ContinuationRequest:
    """Read a request for an answer, or for continuations. Raises ValueError, in one line with the field."""
    try:
        return (ChatRequest if chat else ContinuationRequest).model_validate_json(body)
    except ValidationError as error:
        fault = error.errors()[0]
        place = f"{'.'.join(map(str, fault['loc']))}: " if fault["loc"] else ""
        raise ValueError(place + fault["msg"].removeprefix("Value error, ")) from None


def check_plain(agent: ServedAgent, body: bytes) -> None:
    """Raise ValueError for token ids that would end the engine. A body that cannot be read is left to the engine."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        return
    for name in _ID_FIELDS:
        if isinstance(given, dict) and given.get(name) is not None:
            agent.check_ids(name, given[name])
