"""Section `algorithm`: the components of a method, their parameters, and the weights of tokens in the loss."""

from dataclasses import field, fields
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from arpo_megatron.config.fields import (
    STRICT,
    Fraction,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
)


@dataclass(frozen=True, config=STRICT)
class AlgorithmConfig:
    """How trajectories branch, and how rewards become gradients."""

    name: str = "arpo"
    """The preset. A variant, a file or an override that names one applies its values before its own keys
    (docs/reference/algorithms.md lists presets). Later it is only a name: the keys below define the method."""
    selector: str = "epochs"
    """Which tasks a step gets. `epochs`: all of them, shuffled."""
    branching: str = "arpo"
    """Where trees fork. `arpo`: after tool results, driven by entropy, as in the paper. `arpo_released`: the
    entropy rule and the rounds of the released code. `random`: the control arm, which ignores entropy.
    `grpo`: nowhere, `group_size` independent trajectories. docs/reference/algorithms.md lists all of them."""
    advantage: str = "group"
    """How rewards become advantages: an estimator of docs/reference/algorithms.md."""
    loss: str = "ppo"
    """How advantages become gradients: a loss of docs/reference/algorithms.md."""
    replay: str | None = None
    """Which old trajectories are trained again: a replay buffer of docs/reference/algorithms.md; None: none."""
    params: dict[str, float | bool | str] = field(default_factory=dict, hash=False)
    """Parameters of the chosen components that have no key here, by name (docs/reference/algorithms.md)."""
    group_size: Positive = 16
    """M: trajectories per task."""
    initial_rollouts: Positive = 8
    """N: trajectories sampled from the prompt before branching; the rest is the fork budget. A policy that never forks
    ignores it."""
    beam_size: Positive = 2
    """Z: largest number of MODEL children of one fork point, the measured path included."""
    fork_budget: Literal["pooled", "reserved"] = "pooled"
    """Whose the forks are. `pooled`: any path of the task may take them, in rounds of fork points, as in the paper.
    `reserved`: each of the first trajectories has its share, so entropy decides when a path forks but not which one."""
    branch_probability: Fraction = 0.5
    """alpha: chance of a fork if the entropy has not changed."""
    entropy_weight: NonNegativeFloat = 0.2
    """beta: how much a rise of the normalised entropy adds to that chance."""
    threshold: Fraction | None = None
    """tau: fork if the chance exceeds it. None: compare the chance with a seeded uniform draw, as the released code
    does."""
    entropy_tokens: Positive = 20
    """k: entropy is measured on this many tokens after a tool result."""
    shared_advantage: Literal["soft", "hard"] = "soft"
    """Advantage of a shared token: each leaf's own (`soft`) or the mean over the leaves below (`hard`)."""
    loss_aggregation: Literal["token-mean", "sequence-mean"] = "token-mean"
    """Weight of a token. `token-mean`: 1 / model tokens of the batch. `sequence-mean`: 1 / (trajectories * tokens
    of its trajectory)."""
    clip_low: Fraction = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.2
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = 3.0
    """Upper bound c of the ratio for negative advantages; None: no bound."""
    sampling_correction: Literal["auto", "none", "tis", "icepop", "geometric", "product"] = "auto"
    """Importance weights for tokens that older weights, or an engine with other arithmetic, have sampled, divided by
    their mean over the batch. r is the probability of a token under the step's policy over that at which it was
    sampled. `tis`: min(r, sampling_ratio_max) per token. `icepop`: r per token, 0 outside the two bounds.
    `geometric` and `product`: the geometric mean or the product of r over a trajectory, at most sampling_ratio_max.
    `auto`: `tis` if tokens may come from older weights (`rollout.max_staleness`, `algorithm.replay`) or from a
    quantized engine and the loss does not correct for that itself, else `none`."""
    sampling_ratio_max: PositiveFloat = 2.0
    """Largest ratio of `sampling_correction`."""
    sampling_ratio_min: NonNegativeFloat = 0.5
    """Smallest ratio that `sampling_correction=icepop` keeps."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the k3 penalty on distance from the initial weights; above 0 a copy of them is kept in host memory."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    router_replay: Literal["none", "rollout"] = "none"
    """`rollout`: in training, a mixture of experts sends each token to the experts that the engine chose (rollout
    routing replay, arXiv 2510.11370), with weights of the trainer's routers; engines then run without an HTTP router.
    `none`: the trainer's routers choose."""
    minibatches: Positive = 1
    """Optimizer updates per step; the tasks of a step are divided among them."""
    drop_groups_without_signal: bool = False
    """Replace trees whose answers are all equally correct, whatever their shaped rewards are (dynamic sampling of DAPO,
    arXiv 2503.14476, eq. 11)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.group_size < 2:
            raise ValueError("algorithm.group_size must be at least 2: an advantage compares trajectories of a group")
        if taken := sorted(set(self.params) & {item.name for item in fields(self)}):
            raise ValueError(f"algorithm.params.{taken[0]} is a key of its own: use algorithm.{taken[0]}")
        return self

    def component_params(self) -> dict[str, Any]:
        """Return all values that a component may take, by name; `config` is this object."""
        return {**{item.name: getattr(self, item.name) for item in fields(self)}, **self.params, "config": self}
