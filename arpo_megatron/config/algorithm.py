"""From questions to gradients: data, branching, losses, rewards."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from arpo_megatron.config.fields import STRICT, Fraction, NonNegativeFloat, Positive, PositiveFloat


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """Where tasks come from."""

    kind: Literal["generated", "arpo_parquet"] = "generated"
    """`generated`: calculator and look-up tasks made from the seed. `arpo_parquet`: the released ARPO files."""
    path: Path | None = None
    """Parquet file of training questions (`arpo_parquet`)."""
    search_cache: Path | None = None
    """JSON file of stored searches that serves as the search index (`arpo_parquet`); None: search_cache.json beside
    `path` where there is one."""
    max_prompt_tokens: Positive = 1536
    """A longer prompt is a bad row: counted, named and skipped."""
    tasks: Positive = 2000
    """How many training tasks to generate (`generated`)."""
    held_out: Positive = 200
    """How many tasks are kept for evaluation only."""


@dataclass(frozen=True, config=STRICT)
class AlgorithmConfig:
    """How trajectories branch and how their rewards become gradients."""

    name: Literal["arpo", "arpo_reference", "random", "grpo"] = "arpo"
    """`arpo`: entropy-driven forks after tool results, as in the paper. `arpo_reference`: by the released code's
    arithmetic, defects included. `random`: the control arm, forks without regard to entropy. `grpo`: `samples` fresh
    trajectories, no forks."""
    samples: Positive = 16
    """M: trajectories a task."""
    initial: Positive = 8
    """N: trajectories sampled from the prompt before branching; the rest is the forking budget. `grpo` ignores it."""
    beam: Positive = 2
    """Z: most MODEL children of one fork point, the measured path included."""
    branch_probability: Fraction = 0.5
    """alpha: chance of a fork when the entropy has not changed."""
    entropy_weight: NonNegativeFloat = 0.2
    """beta: how much a rise of the normalised entropy adds to that chance."""
    threshold: Fraction | None = None
    """tau: fork when the chance exceeds it. None: compared with a seeded uniform draw, as the released code does."""
    entropy_tokens: Positive = 20
    """k: entropy is measured on this many tokens after a tool result."""
    attribution: Literal["soft", "hard"] = "soft"
    """Advantage of a shared token: each leaf's own (soft) or the mean over the leaves below (hard)."""
    aggregation: Literal["token-mean", "sequence-mean"] = "token-mean"
    """Weight of a token: 1 / model tokens of the minibatch, or 1 / (trajectories * own length)."""
    clip_low: Fraction = 0.2
    """PPO ratio is clipped below 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.2
    """PPO ratio is clipped above 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = 3.0
    """Bound c of the ratio for negative advantages; None: no bound."""
    ratio: Literal["token", "sequence"] = "token"
    """`token`: PPO's ratio of each token. `sequence`: one ratio a trajectory, the geometric mean of its tokens' (GSPO,
    arXiv 2507.18071); its bounds are clip_low and clip_high too, and want to be about a hundred times smaller.
    `aggregation` (it is always sequence-mean) and dual_clip (there is none) have no part in it."""
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
    """Replace trees whose trajectories all earned the same (DAPO's dynamic sampling, arXiv 2503.14476)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.name != "grpo" and self.initial > self.samples:
            raise ValueError(f"algorithm.initial={self.initial} exceeds algorithm.samples={self.samples}")
        if self.samples < 2:
            raise ValueError("algorithm.samples must be at least 2: an advantage compares trajectories of a group")
        if self.ratio == "sequence" and (self.kl_coefficient or self.entropy_coefficient):
            raise ValueError(
                "algorithm.ratio=sequence has neither penalty nor bonus: set algorithm.kl_coefficient and "
                "algorithm.entropy_coefficient to 0"
            )
        if self.ratio == "sequence" and self.attribution == "hard":
            raise ValueError("algorithm.ratio=sequence gives every trajectory its own advantage: attribution=soft")
        return self


@dataclass(frozen=True, config=STRICT)
class RewardConfig:
    """How a finished trajectory is scored."""

    kind: Literal["arpo", "arpo_released"] = "arpo"
    """`arpo`: format gate, math-verify or QA F1, tool bonus. `arpo_released`: the released scorer, errors included."""
    format_penalty: float = -1.0
    """Reward of a trajectory that breaks the tag protocol."""
    tool_bonus: NonNegativeFloat = 0.1
    """Added to a right answer that used both search and python."""
    success_threshold: Fraction = 0.5
    """A trajectory counts as a success when its accuracy exceeds this."""
