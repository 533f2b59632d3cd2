"""A request to SGLang and its answer: token ids in, token ids out.

Text is never tokenized again: `Generation.token_ids` are the sampled tokens, even if a stop string ends inside one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import orjson

from arpo_megatron.engine.expert_routes import ExpertRouteRequest
from arpo_megatron.engine.server.entropy import META_KEY
from arpo_megatron.tree import Float32Array, Int16Array, Int32Array

NO_MORE = 2**30
"""`stream_interval` of a request whose next piece after the first token is the whole answer."""


class EngineRefusedError(RuntimeError):
    """The engine will never accept this request (it is too long, for example), so it is not retried."""


class EngineFinish(StrEnum):
    """Why the engine stopped a generation."""

    STOP_STRING = "stop_string"
    """It sampled the stop string in `Generation.matched`."""
    END_TOKEN = "end_token"  # noqa: S105
    """It sampled the model's end-of-sequence token, the last of `Generation.token_ids`."""
    LENGTH = "length"
    """It sampled as many tokens as were asked for."""
    CUT_SHORT = "cut_short"
    """`EngineClient.pause` aborted it. The last sampled token is left out, see `read_generation`."""


@dataclass(frozen=True, slots=True)
class Generation:
    """Tokens that the engine sampled for one request, with log-probs and entropies."""

    token_ids: Int32Array
    """int32[n], as sampled, stop tokens included."""
    logprobs: Float32Array
    """float32[n], log softmax(logits / temperature) of each sampled token, in nats."""
    entropies: Float32Array
    """float32[n], entropy of each of those distributions over the whole vocabulary, in nats."""
    finish: EngineFinish
    """Why the generation ended."""
    matched: str | None
    """The stop string that ended it, if one did."""
    prompt_tokens: int
    """Tokens in the request's prompt."""
    cached_tokens: int
    """Prompt tokens that the radix cache served."""
    weight_version: int
    """Version of the weights that sampled it. A push waits for running requests, so there is only one."""
    routes: Int16Array | None = None
    """int16[k, layers, top_k], the expert routes asked for. None if none were, or the answer was cut short too soon."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. At temperature 0 (greedy), log-probs and entropies are those of temperature 1."""

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    """Used only if the engine samples deterministically (`engine.deterministic`, on a GPU): there, equal prompts
    with equal seeds get equal continuations."""
    top_k: int = 0
    """0: no limit."""
    repetition_penalty: float = 1.0
    """1: none. It counts only tokens sampled in the same request."""

    def as_request(self) -> dict[str, Any]:
        """Return SGLang's `sampling_params`. Special tokens stay in the text that is searched for stop strings."""
        parameters: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if self.top_k:
            parameters["top_k"] = self.top_k
        if self.repetition_penalty != 1.0:
            parameters["repetition_penalty"] = self.repetition_penalty
        return parameters if self.seed is None else parameters | {"sampling_seed": self.seed}


@dataclass(frozen=True, slots=True)
class EncodedIds:
    """Token ids that were written as JSON before."""

    parts: Sequence[bytes]
    """`encode_ids` of consecutive parts; none is empty."""
    count: int
    """Number of ids."""

    def __len__(self) -> int:
        return self.count


def as_ids(ids: Sequence[int] | Int32Array) -> Int32Array:
    """Return token ids as int32[n], which the client writes as JSON ten times as fast as a list."""
    return np.ascontiguousarray(ids, dtype=np.int32)


def encode_ids(ids: Int32Array) -> bytes:
    """Return int32[n] as the elements of a JSON array, without its brackets."""
    return orjson.dumps(as_ids(ids), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]


def encode_request(body: Mapping[str, Any]) -> bytes:
    """Return a request, with numpy arrays or `EncodedIds`, as JSON."""
    return orjson.dumps(body, default=_fragment, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_PASSTHROUGH_DATACLASS)


def _fragment(value: object) -> orjson.Fragment:
    if not isinstance(value, EncodedIds):
        raise TypeError(f"a request has a value of type {type(value).__name__}")
    return orjson.Fragment(b"[" + b",".join(value.parts) + b"]")


def generation_request(
    input_ids: Sequence[int] | Int32Array,
    *,
    max_new_tokens: int,
    sampling: Sampling,
    stop: Sequence[str],
    routes: ExpertRouteRequest | None,
    stream: int = 0,
    encoded: Sequence[bytes] = (),
) -> dict[str, Any]:
    """Return the request for a `Generation`; `EngineClient.generate` documents the other arguments.

    Args:
        stream: stream a piece of the answer after this many tokens; 0: the answer comes in one piece.
        encoded: see `EngineClient.generate`.
    """
    parameters = sampling.as_request() | {"max_new_tokens": max_new_tokens}
    if stop:
        parameters["stop"] = list(stop)
    if stream:
        parameters["stream_interval"] = stream
    ids = EncodedIds(encoded, len(input_ids)) if encoded else as_ids(input_ids)
    body: dict[str, Any] = {"input_ids": ids, "sampling_params": parameters, "return_logprob": True}
    if stream:
        body["stream"] = True
    return body if routes is None else body | routes.as_request()


def read_generation(answer: Mapping[str, Any], route_request: ExpertRouteRequest | None) -> Generation:
    """Read the engine's JSON.

    The last token of an answer that was cut short is left out, because it may have been the end: SGLang then reports
    the abort, not a stop string or the end of the sequence. The continuation samples it again.

    Raises:
        EngineRefusedError: the answer lacks tokens, log-probs or entropies.
    """
    meta = answer["meta_info"]
    token_ids = np.array(answer.get("output_ids") or [], dtype=np.int32)
    logprobs = np.array([entry[0] for entry in meta.get("output_token_logprobs") or []], dtype=np.float32)
    entropies = np.array(meta.get(META_KEY) or [], dtype=np.float32)
    if not 0 < len(token_ids) == len(logprobs) == len(entropies):
        raise EngineRefusedError(
            f"the engine answered {len(token_ids)} tokens with {len(logprobs)} log-probs and {len(entropies)} "
            "entropies: was it started with arpo_megatron.engine.server.main?"
        )
    finish, matched = read_finish(meta["finish_reason"])
    routes = None if route_request is None else route_request.read(meta, len(token_ids))
    if finish is EngineFinish.CUT_SHORT:
        token_ids, logprobs, entropies = token_ids[:-1], logprobs[:-1], entropies[:-1]
        routes = None if routes is None else routes[:-1]
    return Generation(
        token_ids=token_ids,
        logprobs=logprobs,
        entropies=entropies,
        finish=finish,
        matched=matched,
        prompt_tokens=int(meta["prompt_tokens"]),
        cached_tokens=int(meta["cached_tokens"]),
        weight_version=version_of(meta),
        routes=routes,
    )


def read_finish(reason: Mapping[str, Any]) -> tuple[EngineFinish, str | None]:
    """Read SGLang's `finish_reason`; return why a generation ended, and the stop string that ended it, if one did."""
    matched = reason["matched"] if isinstance(reason.get("matched"), str) else None
    ended = EngineFinish.END_TOKEN if matched is None else EngineFinish.STOP_STRING
    return {"length": EngineFinish.LENGTH, "abort": EngineFinish.CUT_SHORT}.get(reason["type"], ended), matched


def first_tokens(answer: Mapping[str, Any], count: int) -> Generation:
    """Return the first `count` tokens of a streamed answer, which has more, as one that was cut short."""
    meta = answer["meta_info"]
    cut = {
        **meta,
        "finish_reason": {"type": "abort"},
        "output_token_logprobs": meta["output_token_logprobs"][: count + 1],
        META_KEY: meta[META_KEY][: count + 1],
    }
    return read_generation({"output_ids": answer["output_ids"][: count + 1], "meta_info": cut}, None)


def prefill_request(input_ids: Sequence[int] | Int32Array) -> dict[str, Any]:
    """Return the request that puts a prefix into the radix cache without sampling."""
    return {"input_ids": as_ids(input_ids), "sampling_params": {"max_new_tokens": 0}}


def read_prefill(answer: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of prompt tokens, and how many of them were cached."""
    return int(answer["meta_info"]["prompt_tokens"]), int(answer["meta_info"]["cached_tokens"])


def version_of(fields: Mapping[str, Any]) -> int:
    """Return the policy version in an answer's `meta_info` or in the engine's `/model_info`; 0 if there is none."""
    version = str(fields.get("weight_version", ""))
    return int(version) if version.isdecimal() else 0
