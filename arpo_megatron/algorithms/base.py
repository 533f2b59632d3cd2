"""The protocols of credit and loss, and what they are given. Everything is said in terms of the tree.

A step goes through them in this order:

    AdvantageEstimator    rewards of the leaves of all trees of a step     -> A[leaf] or A[leaf, segment]
    TokenScaling          (of an estimator that wants it) what else is known of a minibatch's tokens
                                                                           -> a factor of A on each token
    tree_credits          A, weights w of the trajectories                 -> pos, neg, w of each token (credit.py)
    TokenLoss             in the pass: ratio, entropy of each token        -> what pos and neg are multiplied by
    or BatchLoss      before it, on the controller: the whole minibatch    -> a coefficient of each token's log-prob
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from arpo_megatron.algorithms.credit import TreeCredit
from arpo_megatron.algorithms.types import Floats
from arpo_megatron.tree import RolloutTree

if TYPE_CHECKING:  # the command line reads the parameters of a loss without loading torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one task, finished and scored.

    Attributes:
        tree: holds them.
        rewards: float64[leaves] in the order of `tree.leaves()`.
        accuracies: float64[leaves], how right each answer is, in [0, 1].
    """

    tree: RolloutTree
    rewards: Floats
    accuracies: Floats


class AdvantageEstimator(Protocol):
    """From rewards to advantages. Pure."""

    def __call__(self, groups: Sequence[Group]) -> list[Floats]:
        """Advantages of a step.

        Args:
            groups: all of the step, so that an estimator may compare tasks with each other.

        Returns:
            for each group float64[leaves], or float64[leaves, segments] where a trajectory's segments differ; what
            stands at segments outside of a trajectory's path is ignored.
        """


@dataclass(frozen=True, slots=True)
class Batch:
    """What the controller knows of one minibatch before an update, tree by tree.

    Token arrays are float64[tokens] in segment-index order, in nats, NaN where there is nothing to know (outside of
    MODEL segments, and sampling log-probs that are unknown).

    Attributes:
        trees: of the minibatch.
        advantages: float64[leaves] or [leaves, segments] a tree.
        weights: float64[leaves] a tree, w_i: aggregation times trajectory weight.
        trajectory_weights: float64[leaves] a tree, that weight alone.
        old_logprobs: under the policy of the step.
        logprobs: under the present policy.
        sampling_logprobs: as the engine told them.
        entropies: under the policy of the step.
    """

    trees: Sequence[RolloutTree]
    advantages: Sequence[Floats]
    weights: Sequence[Floats]
    trajectory_weights: Sequence[Floats]
    old_logprobs: Sequence[Floats]
    logprobs: Sequence[Floats]
    sampling_logprobs: Sequence[Floats]
    entropies: Sequence[Floats]


@runtime_checkable
class TokenScaling(Protocol):
    """What an advantage estimator adds where a token's advantage depends on the token, too. Pure."""

    def token_factors(self, batch: Batch) -> list[Floats]:
        """For each tree float64[tokens], by which A of every leaf is multiplied; `batch.logprobs` are the old ones."""


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """Where a run stands, for losses that change in its progress.

    Attributes:
        step: finished steps.
        steps: that it will have.
        entropy: mean over the finished steps of the policy's mean entropy, in nats, a shared token counted once; None
            before the first.
    """

    step: int = 0
    steps: int = 1
    entropy: float | None = None


@dataclass(frozen=True, slots=True)
class LossTokens:
    """The target tokens of a pack, in the pass. All tensors are float[m]; gradients flow through the first three.

    Attributes:
        logprobs: of the policy in training, in nats.
        ratio: exp(logprobs - old log-probs), the logarithm limited to `MAX_LOG_RATIO`.
        entropies: in nats.
        positive: sum over leaves of w_i max(A_i, 0).
        negative: sum over leaves of w_i min(A_i, 0).
        weight: sum over leaves of w_i.
        progress: of the run.
    """

    logprobs: "Tensor"
    ratio: "Tensor"
    entropies: "Tensor"
    positive: "Tensor"
    negative: "Tensor"
    weight: "Tensor"
    progress: TrainingProgress = TrainingProgress()


@dataclass(frozen=True, slots=True)
class Factors:
    """What a loss makes of tokens: L = -sum(positive * gain + negative * cost) + sum(weight * penalty).

    Attributes:
        gain: float[m].
        cost: float[m].
        penalty: float[m], None: 0.
        cut_high: bool[m], tokens whose positive gradient an upper bound has changed, for the statistics.
        cut_low: likewise the negative one and a lower bound.
        cut_dual: likewise the negative one and an upper bound.
    """

    gain: "Tensor"
    cost: "Tensor"
    penalty: "Tensor | None" = None
    cut_high: "Tensor | None" = None
    cut_low: "Tensor | None" = None
    cut_dual: "Tensor | None" = None


@runtime_checkable
class TokenLoss(Protocol):
    """A loss f(r, H) * A of each token for each sign of A, so that the sums of A over leaves are enough. Pure."""

    def factors(self, tokens: LossTokens) -> Factors:
        """The two factors, in terms of tensor methods alone (torch is not imported where a loss is named)."""


@dataclass(frozen=True, slots=True)
class MinibatchValue:
    """A loss whose terms need the whole minibatch, and what it asks of each token.

    Attributes:
        loss: its value.
        credits: one a tree; `positive` + `negative` is the coefficient c of a token in -sum(c * logprob), whose
            gradient is that of the loss; `weight` weighs the token in penalty and bonus.
        statistics: figures that replace those of the update.
    """

    loss: float
    credits: list[TreeCredit]
    statistics: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class BatchLoss(Protocol):
    """A loss that is linear in the log-probs once something of the whole minibatch is known, such as ratios. Pure.

    One whose ratios are to the policies that sampled says so by `corrects_for_sampling = True` (a ClassVar): it may be
    given old trajectories without `algorithm.trajectory_weight_limit`.
    """

    def value(self, batch: Batch) -> MinibatchValue:
        """Computed on rank 0; `batch.logprobs` cost a pass of their own before every update but a step's first."""


PolicyLoss = TokenLoss | BatchLoss
