"""Derivatives of log-probs along a direction u, from two forward passes in float64 on the CPU."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from arpo_megatron.algorithms.types import Floats
from arpo_megatron.studies.information.samples import CREDITS, coefficients
from arpo_megatron.tree import Role, RolloutTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_STEP = 1e-3
"""eps of theta +- eps u for a u of length 1. transformers computes norms in float32, whatever the dtype: their rounding
makes the error of the difference quotient about 1e-4 of a derivative, far below the spread of trees."""


@dataclass(frozen=True, slots=True)
class _Prefixes:
    """The different prefixes of a tree's trajectories: equal tokens after equal tokens are computed once, as one node.

    The segments of a tree alone would repeat what two trajectories have sampled alike.
    """

    tokens: list[int]
    parents: list[int]
    """Node before each node; -1 for the first token."""
    depths: list[int]
    owners: list[int]
    """MODEL segment of each of its tokens."""
    nodes: list[int]
    """Node of each of these tokens."""

    @classmethod
    def of(cls, tree: RolloutTree) -> "_Prefixes":
        """Merge the trajectories of a tree."""
        found, known, ends = cls([], [], [], [], []), dict[tuple[int, int], int](), list[int]()
        for number, segment in enumerate(tree.segments):
            node = ends[segment.parent] if segment.parent >= 0 else -1
            for token in segment.token_ids.tolist():
                above, node = node, known.setdefault((node, token), len(known))
                if node == len(found.tokens):
                    found.tokens.append(token)
                    found.parents.append(above)
                    found.depths.append(found.depths[above] + 1 if above >= 0 else 0)
                if segment.role is Role.MODEL:
                    found.owners.append(number)
                    found.nodes.append(node)
            ends.append(node)
        return found

    @property
    def visible(self) -> NDArray[np.bool_]:
        """bool[nodes, nodes], whether a node attends to another: itself and the nodes before it."""
        found = np.eye(len(self.tokens), dtype=bool)
        for node, above in enumerate(self.parents):
            if above >= 0:
                found[node] |= found[above]
        return found


class DirectionalModel:
    """A Hugging Face model that computes the log-probs of segments at theta and at theta +- eps u."""

    def __init__(self, directory: Path, *, temperature: float = 1.0) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            directory, local_files_only=True, dtype=torch.float64
        )
        self._temperature = temperature
        self.parameters = [parameter.requires_grad_() for parameter in self.model.parameters()]

    def segment_logprobs(self, tree: RolloutTree) -> torch.Tensor:
        """Return float64[segments], the summed log-probs of MODEL segments; 0 for others."""
        prefixes = _Prefixes.of(tree)
        visible = torch.where(torch.from_numpy(prefixes.visible), 0.0, -torch.inf).to(torch.float64)
        tokens = torch.tensor(prefixes.tokens)
        logits = self.model(
            tokens[None], attention_mask=visible[None, None], position_ids=torch.tensor(prefixes.depths)[None]
        ).logits[0]
        logprobs = (logits / self._temperature).log_softmax(-1)
        owners, nodes = (torch.tensor(own, dtype=torch.int64) for own in (prefixes.owners, prefixes.nodes))
        each = logprobs[torch.tensor(prefixes.parents)[nodes], tokens[nodes]]
        return torch.zeros(len(tree.segments), dtype=torch.float64).index_add(0, owners, each)

    def add_gradient(self, tree: RolloutTree, rewards: Floats) -> None:
        """Add the gradient of one tree's objective (token-mean) to the parameters' `grad`."""
        on_path = np.zeros((len(rewards), len(tree.segments)), bool)
        for row, leaf in enumerate(tree.leaves()):
            on_path[row, tree.path(leaf)] = True
        weights = coefficients(on_path, rewards, np.zeros(len(tree.segments), np.int64), CREDITS[0])
        if weights.any():
            (self.segment_logprobs(tree) @ torch.from_numpy(weights)).backward()

    def take_gradient(self) -> torch.Tensor:
        """Return the gradients as one float64 vector, and clear them."""
        flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self.model.zero_grad()
        return torch.cat([each.reshape(-1) for each in flat])

    @torch.no_grad()
    def derivatives(self, trees: Sequence[RolloutTree], direction: torch.Tensor) -> list[Floats]:
        """Return for each tree float64[segments], the derivatives of its segments' log-probs along a unit vector."""
        with self._moved(direction, _STEP):
            above = [self.segment_logprobs(tree) for tree in trees]
        with self._moved(direction, -_STEP):
            below = [self.segment_logprobs(tree) for tree in trees]
        return [((a - b) / (2 * _STEP)).numpy() for a, b in zip(above, below, strict=True)]

    @contextmanager
    def _moved(self, direction: torch.Tensor, step: float) -> Iterator[None]:
        kept = [parameter.clone() for parameter in self.parameters]
        parts = direction.split([parameter.numel() for parameter in self.parameters])
        try:
            for parameter, part in zip(self.parameters, parts, strict=True):
                parameter.add_(part.view_as(parameter), alpha=step)
            yield
        finally:
            for parameter, own in zip(self.parameters, kept, strict=True):
                parameter.copy_(own)
