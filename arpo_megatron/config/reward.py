"""How a finished trajectory is scored."""

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from arpo_megatron.config.fields import (
    STRICT,
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
)


@dataclass(frozen=True, config=STRICT)
class JudgeConfig:
    """A model that judges answers, at a server that speaks the OpenAI chat protocol."""

    url: str | None = None
    """Base address, e.g. http://HOST:PORT/v1; None: there is no judge."""
    model: str = ""
    """Name of the model there."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key, where the server wants one."""
    max_tokens: Positive = 1024
    """Longest reply; a judge that thinks needs room for it."""
    timeout_s: PositiveFloat = 120.0
    """Deadline of one reply in seconds, until its last byte."""
    retries: NonNegative = 4
    """How often a question that failed is asked again before the judge counts as down."""
    concurrency: Positive = 32
    """Questions that are asked at once."""
    when_down: Literal["wait", "fallback"] = "wait"
    """`wait`: training, or an evaluation, waits until the judge is back. `fallback`: answers are scored by rule
    (math-verify, F1) and terms that need a judge are left out of the group. Both are told and counted."""
    cache: Path | None = None
    """SQLite file of replies; None: judge.sqlite in the run directory."""


@dataclass(frozen=True, config=STRICT)
class RewardConfig:
    """How a finished trajectory is scored."""

    kind: str = "arpo"
    """`arpo`: format gate, answer, tool bonus. `arpo_released`: the released scorer, errors included. Or a reward of an
    installed package."""
    math: Literal["verify", "judge"] = "verify"
    """What decides on mathematical answers (`arpo`): math-verify or the judge."""
    qa: Literal["f1", "exact_match", "judge"] = "f1"
    """Accuracy of answers in words (`arpo`): token F1, exact match, or what the judge says."""
    format_penalty: float = -1.0
    """Reward of a trajectory that breaks the tag protocol."""
    tool_bonus: NonNegativeFloat = 0.1
    """Added to a right answer that used both search and python."""
    success_threshold: Fraction = 0.5
    """A trajectory counts as a success when its accuracy exceeds this."""
    terms: dict[str, float] = Field(default_factory=dict)
    """What is added to the reward: weights of terms by name, e.g. {overlong: 1.0}; docs/rewards.md lists them."""
    params: dict[str, int | float] = Field(default_factory=dict)
    """Numbers of those terms, and of a reward of an installed package, by name, e.g. {overlong_buffer: 512}."""
    judge: JudgeConfig = JudgeConfig()
