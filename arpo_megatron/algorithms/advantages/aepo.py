"""AEPO's advantage: that of the group, larger where the policy was uncertain."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from arpo_megatron.algorithms.advantages.group import GroupNormalised
from arpo_megatron.algorithms.base import Group, LossBatch
from arpo_megatron.algorithms.credit import TreeShape
from arpo_megatron.algorithms.types import Floats


@dataclass(frozen=True, slots=True)
class EntropyAware:
    """A_it = A_i * (1 + entropy_advantage * (H_t - mean(H)) / std(H)) (AEPO, arXiv 2510.14545, section 3.3).

    A_i is the advantage of `group` and H_t the entropy of token t under the policy of the step. Mean and standard
    deviation run over the model tokens of all trajectories of the batch, a shared token once per trajectory. The
    released code computes H only with an entropy bonus, which its scripts do not set, so this factor is inactive there.
    """

    entropy_advantage: float = 0.2
    """a, 0.2 in the paper."""

    def __call__(self, groups: Sequence[Group]) -> list[Floats]:
        return GroupNormalised()(groups)

    def token_factors(self, batch: LossBatch) -> list[Floats]:
        """Return 1 + a * standardised entropy; 1 if all entropies are equal."""
        shapes = [TreeShape(tree) for tree in batch.trees]
        copies = [shape.copies for shape in shapes]
        values = [np.nan_to_num(entropies) for entropies in batch.entropies]
        total = sum(float(count.sum()) for count in copies)
        mean = sum(float((c * h).sum()) for c, h in zip(copies, values, strict=True)) / max(1.0, total)
        squares = sum(float((c * (h - mean) ** 2).sum()) for c, h in zip(copies, values, strict=True))
        std = (squares / max(1.0, total)) ** 0.5
        if std < 1e-8:
            return [np.ones_like(h) for h in values]
        return [1 + self.entropy_advantage * (h - mean) / std for h in values]
