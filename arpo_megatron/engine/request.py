"""One request to SGLang and its answer: token ids in, token ids out.

Text never decides what the tokens are: `Generation.token_ids` is what the engine sampled, also where a stop string
ends inside a token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from arpo_megatron.engine.expert_routes import RouteRequest
from arpo_megatron.engine.server.entropy import META_KEY
from arpo_megatron.tree import Float32Array, Int16Array, Int32Array


class EngineRefusedError(RuntimeError):
    """The engine will never accept this request (too long, for instance); repeating it is pointless."""


class EngineFinish(StrEnum):
    """Why the engine stopped a generation."""

    STOP_STRING = "stop_string"  # `Generation.matched` says which
    END_TOKEN = "end_token"  # noqa: S105  the model's end-of-sequence token, the last of token_ids
    LENGTH = "length"
    CUT_SHORT = "cut_short"  # by `EngineClient.pause`; without the last token, see `read_generation`


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer of the engine.

    Attributes:
        token_ids: int32[n], as sampled, stop tokens included.
        logprobs: float32[n], log softmax(logits / temperature) of each sampled token, in nats.
        entropies: float32[n], entropy in nats of each of those distributions, over the whole vocabulary.
        finish: why it ended.
        matched: the stop string, where one ended it.
        prompt_tokens: tokens sent.
        cached_tokens: how many of those the radix cache served.
        weight_version: the version of the weights that sampled it; a push waits until there is no request.
        routes: int16[k, layers, top_k], as asked for; None: not asked for, or cut short before they were known.
    """

    token_ids: Int32Array
    logprobs: Float32Array
    entropies: Float32Array
    finish: EngineFinish
    matched: str | None
    prompt_tokens: int
    cached_tokens: int
    weight_version: int
    routes: Int16Array | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Temperature 0 is greedy; log-probs and entropies are then those of temperature 1.

    `top_k` 0 and `repetition_penalty` 1 change nothing; the penalty is for tokens sampled in the same request.

    `seed` counts where the engine samples deterministically (`engine.deterministic`); without one, equal prompts would
    be continued equally there.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    top_k: int = 0
    repetition_penalty: float = 1.0

    def as_request(self) -> dict[str, Any]:
        """SGLang's `sampling_params`; special tokens stay in the text in which stop strings are looked for."""
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


def generation_request(
    input_ids: Sequence[int] | Int32Array,
    *,
    max_new_tokens: int,
    sampling: Sampling,
    stop: Sequence[str],
    routes: RouteRequest | None,
) -> dict[str, Any]:
    """The JSON that asks for a `Generation`; `EngineClient.generate` says what the arguments are."""
    parameters = sampling.as_request() | {"max_new_tokens": max_new_tokens}
    if stop:
        parameters["stop"] = list(stop)
    body = {"input_ids": _plain(input_ids), "sampling_params": parameters, "return_logprob": True}
    return body if routes is None else body | routes.as_request()


def read_generation(answer: Mapping[str, Any], asked: RouteRequest | None) -> Generation:
    """The engine's JSON as a `Generation`. Raises EngineRefusedError where it lacks what every answer must have.

    Of an answer that was cut short the last token is left out. It may have been the end, a stop string's or the
    sequence's, and SGLang does not say so: it reports the abort instead. Whoever goes on samples it anew.
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
    reason = meta["finish_reason"]
    matched = reason.get("matched")
    if reason["type"] == "length":
        finish = EngineFinish.LENGTH
    elif reason["type"] == "abort":
        finish = EngineFinish.CUT_SHORT
    else:
        finish = EngineFinish.STOP_STRING if isinstance(matched, str) else EngineFinish.END_TOKEN
    routes = None if asked is None else asked.read(meta, len(token_ids))
    if finish is EngineFinish.CUT_SHORT:
        token_ids, logprobs, entropies = token_ids[:-1], logprobs[:-1], entropies[:-1]
        routes = None if routes is None else routes[:-1]
    return Generation(
        token_ids=token_ids,
        logprobs=logprobs,
        entropies=entropies,
        finish=finish,
        matched=matched if isinstance(matched, str) else None,
        prompt_tokens=int(meta["prompt_tokens"]),
        cached_tokens=int(meta["cached_tokens"]),
        weight_version=version_of(meta),
        routes=routes,
    )


def prefill_request(input_ids: Sequence[int] | Int32Array) -> dict[str, Any]:
    """The JSON that has a prefix put into the radix cache, sampling nothing."""
    return {"input_ids": _plain(input_ids), "sampling_params": {"max_new_tokens": 0}}


def read_prefill(answer: Mapping[str, Any]) -> tuple[int, int]:
    """Prompt tokens, and how many of those were cached."""
    return int(answer["meta_info"]["prompt_tokens"]), int(answer["meta_info"]["cached_tokens"])


def version_of(fields: Mapping[str, Any]) -> int:
    """The policy version in an answer's `meta_info`, or in what the engine says of its model; 0 where there is none."""
    version = str(fields.get("weight_version", ""))
    return int(version) if version.isdecimal() else 0


def _plain(ids: Sequence[int] | Int32Array) -> list[int]:
    return ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
