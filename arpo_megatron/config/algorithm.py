"""How trajectories branch, and how their rewards become gradients."""

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
    """How trajectories branch and how their rewards become gradients."""

    name: str = "arpo"
    """The preset: where a variant, a file or a word names one, its parts and numbers are laid under what else that says
    (docs/algorithms.md lists them). Afterwards only a name: the keys below say what is done."""
    selector: str = "epochs"
    """Which tasks a step gets. `epochs`: all of them, shuffled."""
    branching: str = "arpo"
    """Where trees fork. `arpo`: entropy-driven, after tool results, as in the paper. `arpo_reference`: by the released
    code's arithmetic, defects included. `random`: the control arm, without regard to entropy. `grpo`: nowhere,
    `group_size` fresh trajectories."""
    advantage: str = "group"
    """From rewards to advantages: a part of docs/algorithms.md."""
    loss: str = "ppo"
    """From advantages to gradients: likewise."""
    replay: str | None = None
    """Which old trajectories are trained again; None: none."""
    params: dict[str, float | bool | str] = field(default_factory=dict, hash=False)
    """Numbers of the chosen parts that have no key of their own here, by their names (docs/algorithms.md)."""
    group_size: Positive = 16
    """M: trajectories a task."""
    initial_rollouts: Positive = 8
    """N: trajectories sampled from the prompt before branching; the rest is the forking budget. A policy that never
    forks ignores it."""
    beam_size: Positive = 2
    """Z: most MODEL children of one fork point, the measured path included."""
    branch_probability: Fraction = 0.5
    """alpha: chance of a fork when the entropy has not changed."""
    entropy_weight: NonNegativeFloat = 0.2
    """beta: how much a rise of the normalised entropy adds to that chance."""
    threshold: Fraction | None = None
    """tau: fork when the chance exceeds it. None: compared with a seeded uniform draw, as the released code does."""
    entropy_tokens: Positive = 20
    """k: entropy is measured on this many tokens after a tool result."""
    shared_advantage: Literal["soft", "hard"] = "soft"
    """Advantage of a shared token: each leaf's own (soft) or the mean over the leaves below (hard)."""
    loss_aggregation: Literal["token-mean", "sequence-mean"] = "token-mean"
    """Weight of a token: 1 / model tokens of the minibatch, or 1 / (trajectories * own length)."""
    clip_low: Fraction = 0.2
    """PPO ratio is clipped below 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.2
    """PPO ratio is clipped above 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = 3.0
    """Bound c of the ratio for negative advantages; None: no bound."""
    trajectory_weight_limit: PositiveFloat | None = None
    """Weigh each trajectory by min(limit, its probability under the step's policy over that at which the engine sampled
    it), which corrects for older weights and other arithmetic; None: no weights."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the k3 penalty for leaving the first weights; above 0 a copy of them is kept in host memory."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the bonus for entropy."""
    router_replay: Literal["none", "rollout"] = "none"
    """`rollout`: in training a mixture of experts sends each token where the engine had sent it (rollout routing
    replay, arXiv 2510.11370), with weights of the trainer's own routers; engines then have no router before them.
    `none`: where the trainer's routers send it."""
    minibatches: Positive = 1
    """Optimizer updates a step; the tasks of a step are divided among them."""
    drop_groups_without_signal: bool = False
    """Replace trees whose trajectories all earned the same (DAPO's dynamic sampling, arXiv 2503.14476, eq. 11)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.group_size < 2:
            raise ValueError("algorithm.group_size must be at least 2: an advantage compares trajectories of a group")
        if taken := sorted(set(self.params) & {item.name for item in fields(self)}):
            raise ValueError(f"algorithm.params.{taken[0]} has a key of its own: algorithm.{taken[0]}")
        return self

    def component_params(self) -> dict[str, Any]:
        """All numbers that a part may take, by name; `config` is this object."""
        return {**{item.name: getattr(self, item.name) for item in fields(self)}, **self.params, "config": self}
