"""Expert routes of tokens, as SGLang returns them.

SGLang keeps the chosen experts of each slot of its KV pool, so an answer can contain the routes of cached tokens too.
It knows them for all tokens of a request except the last sampled one, which has not been fed to the model. The next
request of the path returns that token's routes; the last token of a leaf has none. A path asks only for routes that no
earlier request has asked for, so each token of a tree is returned once.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from arpo_megatron.tree import Int16Array


@dataclass(frozen=True, slots=True)
class ExpertRouteSpec:
    """Sizes of a model's expert routes: its layers, and the experts that each layer picks for a token."""

    layers: int
    top_k: int


@dataclass(frozen=True, slots=True)
class ExpertRouteRequest:
    """The routes that a generation returns: those of all tokens from position `start` of prefix and answer on."""

    start: int
    spec: ExpertRouteSpec

    def as_request(self) -> dict[str, Any]:
        """Return the fields of SGLang's request."""
        return {"return_routed_experts": True, "routed_experts_start_len": self.start}

    def read(self, meta: Mapping[str, Any], sampled: int) -> Int16Array | None:
        """Read the routes of an answer.

        Args:
            meta: `meta_info` of the answer.
            sampled: number of tokens in the answer.

        Returns:
            int16[k, layers, top_k] for the tokens from `start` to the last but one; None for an answer that was cut
            short before the routes were known.

        Raises:
            ValueError: the answer has another number of routes.
        """
        text = meta.get("routed_experts")
        if not text and meta["finish_reason"]["type"] == "abort":
            return None
        values = np.frombuffer(base64.b64decode(text or ""), np.int32)
        sizes = (meta["prompt_tokens"] + sampled - 1 - self.start, self.spec.layers, self.spec.top_k)
        if values.size != np.prod(sizes):
            raise ValueError(
                f"the engine returned {values.size} expert routes for {sizes[0]} tokens x {sizes[1]} layers x "
                f"{sizes[2]}: was it started with --enable-return-routed-experts?"
            )
        return values.reshape(sizes).astype(np.int16)
