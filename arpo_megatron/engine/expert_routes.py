"""Expert routes as SGLang returns them.

SGLang remembers for each slot of its KV pool to which experts that slot's token went, so an answer can tell it of
cached tokens too, as they were when they were computed. Known are all tokens of a request but the last one sampled,
which has not been fed to the model: the next request of the path tells of it, and of a leaf's nobody does. A path asks
only for what no request before it has asked for, so each token of a tree has one record.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from arpo_megatron.tree import Int16Array


@dataclass(frozen=True, slots=True)
class ExpertRouteSpec:
    """Of a model: layers, and experts a token in each."""

    layers: int
    top_k: int


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """The routes that a generation shall return: of all tokens from position `start` of prefix and answer on."""

    start: int
    spec: ExpertRouteSpec

    def as_request(self) -> dict[str, Any]:
        """Fields of SGLang's request."""
        return {"return_routed_experts": True, "routed_experts_start_len": self.start}

    def read(self, meta: Mapping[str, Any], sampled: int) -> Int16Array | None:
        """int16[k, layers, top_k] of the tokens from `start` to the last but one.

        Args:
            meta: `meta_info` of an answer.
            sampled: tokens of the answer.

        Returns:
            None for an answer that was cut short before they were known.

        Raises:
            ValueError: there are none, or not so many.
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
