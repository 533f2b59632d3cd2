"""The protocols of advantage estimators and policy losses, and the data that they take and return.

A step uses them in this order:

    AdvantageEstimator    rewards of the leaves of all trees of a step -> A[leaf] or A[leaf, segment]
    TokenScaling          optional part of an estimator: log-probs and entropies of a batch -> a factor per token
    tree_credits          A and the trajectory weights w -> positive, negative and weight of each token (credit.py)
    TokenLoss             in the training pass: ratio and entropy of a token -> the factors of positive and negative
    or BatchLoss          before the pass, on the controller: the whole batch -> a coefficient of each log-prob
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
    """The trajectories of one task, finished and scored."""

    tree: RolloutTree
    """The tree that holds them."""
    rewards: Floats
    """float64[leaves], in the order of `tree.leaves()`."""
    accuracies: Floats
    """float64[leaves], correctness of each answer, in [0, 1]."""


class AdvantageEstimator(Protocol):
    """Turns rewards into advantages. Implementations are pure."""

    def __call__(self, groups: Sequence[Group]) -> list[Floats]:
        """Compute the advantages of a step.

        Args:
            groups: all groups of the step, so that an estimator may compare tasks with each other.

        Returns:
            For each group float64[leaves], or float64[leaves, segments] if the segments of a trajectory differ. Values
            at segments outside a trajectory's path are ignored.
        """


@runtime_checkable
class Counterfactual(Protocol):
    """Implemented by advantage estimators that compare log-probs with those in other contexts, at the cost of a pass
    over these. Implementations are pure.
    """

    def contexts(self, groups: Sequence[Group], masked: Sequence[int]) -> list[RolloutTree]:
        """Return for each group a tree of the contexts, for example that of the group with further branches.

        Args:
            groups: all groups of the step.
            masked: the tokens of a tool result without content.
        """

    def credit(
        self, groups: Sequence[Group], contexts: Sequence[RolloutTree], logprobs: Sequence[Floats]
    ) -> list[Floats]:
        """Compute the advantages of a step; see `AdvantageEstimator`.

        Args:
            groups: all groups of the step.
            contexts: what `contexts` has returned.
            logprobs: for each context tree float64[tokens] in segment-index order, in nats, under the policy of the
                step; NaN outside MODEL segments.
        """


@dataclass(frozen=True, slots=True)
class LossBatch:
    """One batch as the controller knows it before the update; each field has one entry per tree.

    Token arrays are float64[tokens] in segment-index order, in nats. They are NaN outside MODEL segments and where a
    sampling log-prob is unknown.
    """

    trees: Sequence[RolloutTree]
    advantages: Sequence[Floats]
    """float64[leaves] or float64[leaves, segments]."""
    weights: Sequence[Floats]
    """float64[leaves], w_i: the aggregation weight times the trajectory weight."""
    trajectory_weights: Sequence[Floats]
    """float64[leaves], the trajectory weight alone."""
    old_logprobs: Sequence[Floats]
    """Log-probs under the policy of the step."""
    logprobs: Sequence[Floats]
    """Log-probs under the policy in training."""
    sampling_logprobs: Sequence[Floats]
    """Log-probs that the engine reported when it sampled the tokens."""
    entropies: Sequence[Floats]
    """Entropies under the policy of the step."""
    tempered_logprobs: Sequence[Floats] = ()
    """Log-probs under the policy of the step at another temperature (`Tempered`); empty if the loss asks for none."""
    turn: int = 0
    """The turn that is updated, counted from the end of each trajectory, for a loss with `turn_by_turn`."""


@runtime_checkable
class TokenScaling(Protocol):
    """Implemented by advantage estimators that depend on the token, too. Implementations are pure."""

    def token_factors(self, batch: LossBatch) -> list[Floats]:
        """Return for each tree float64[tokens], factors of the advantages of all leaves; `batch.logprobs` are the old
        ones.
        """


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """How far a run has come, for losses that change during training."""

    step: int = 0
    """Finished steps."""
    steps: int = 1
    entropy: float | None = None
    """Mean over the finished steps of the policy's mean entropy in nats, with a shared token counted once; None before
    the first."""


@dataclass(frozen=True, slots=True)
class LossTokens:
    """The target tokens of a pack in the training pass. All tensors are float[m]; gradients flow through the first
    three.
    """

    logprobs: "Tensor"
    """Log-probs under the policy in training, in nats."""
    ratio: "Tensor"
    """exp(logprobs - old log-probs), with the logarithm clamped to `MAX_LOG_RATIO`."""
    entropies: "Tensor"
    """Entropies under the policy in training, in nats."""
    positive: "Tensor"
    """Sum over leaves of w_i max(A_i, 0)."""
    negative: "Tensor"
    """Sum over leaves of w_i min(A_i, 0)."""
    weight: "Tensor"
    """Sum over leaves of w_i."""
    progress: TrainingProgress = TrainingProgress()


@dataclass(frozen=True, slots=True)
class Factors:
    """The terms of a token loss: L = -sum(positive * gain + negative * cost) + sum(weight * penalty)."""

    gain: "Tensor"
    """float[m]."""
    cost: "Tensor"
    """float[m]."""
    penalty: "Tensor | None" = None
    """float[m]; None: 0."""
    clipped_high: "Tensor | None" = None
    """bool[m], tokens whose positive gradient is changed by an upper bound, for the statistics."""
    clipped_low: "Tensor | None" = None
    """bool[m], tokens whose negative gradient is changed by a lower bound."""
    clipped_dual: "Tensor | None" = None
    """bool[m], tokens whose negative gradient is changed by an upper bound."""


@runtime_checkable
class TokenLoss(Protocol):
    """A loss f(r, H) * A of each token for each sign of A, so the sums of A over leaves suffice. Implementations are
    pure.
    """

    def factors(self, tokens: LossTokens) -> Factors:
        """Return the factors, using tensor methods only: torch is not imported when a loss is looked up by name."""


@dataclass(frozen=True, slots=True)
class BatchValue:
    """The value of a loss of a whole batch, and its gradient as a coefficient of each token's log-prob."""

    loss: float
    credits: list[TreeCredit]
    """One per tree. `positive` + `negative` is the coefficient c of a token in -sum(c * logprob), whose gradient equals
    that of the loss; `weight` weighs the token in penalty and bonus."""
    statistics: dict[str, Any] = field(default_factory=dict)
    """Metrics that replace those of the update."""


@runtime_checkable
class BatchLoss(Protocol):
    """A loss that is linear in the log-probs once the batch is known as a whole, its ratios for example.

    A loss whose ratios refer to the policies that sampled declares `corrects_for_sampling = True` (a ClassVar). It may
    then train old trajectories without `algorithm.sampling_correction`. One that declares `turn_by_turn = True` gets an
    update for each turn (`LossBatch.turn`), the last one first. Implementations are pure.
    """

    def value(self, batch: LossBatch) -> BatchValue:
        """Compute the loss on the controller. `batch.logprobs` cost an extra pass before every update but the first of
        a step.
        """


@runtime_checkable
class Tempered(Protocol):
    """Implemented by batch losses that need `LossBatch.tempered_logprobs`, which cost a pass over the step's packs."""

    def temperature(self, entropy: float) -> float:
        """Return the temperature as a multiple of the sampling temperature.

        Args:
            entropy: mean entropy of the step's tokens in nats, with a shared token counted once.
        """


PolicyLoss = TokenLoss | BatchLoss
