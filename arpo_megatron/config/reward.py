"""Sections `reward` and `reward.judge`: how a finished trajectory is scored."""

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
    """A model that judges answers at a server with the OpenAI chat protocol."""

    url: str | None = None
    """Base address, e.g. http://HOST:PORT/v1; None: no judge."""
    model: str = ""
    """Name of the model at the server."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the API key, if the server needs one."""
    wording: Literal["marked", "arpo"] = "marked"
    """How `arpo eval` asks the judge about answers to benchmarks. `marked`: with a code that an answer cannot fake.
    `arpo`: in the words of ARPO's authors, to compare with published figures; training always uses `marked`."""
    max_tokens: Positive = 1024
    """Longest reply in tokens; a judge that reasons needs room for it."""
    timeout_s: PositiveFloat = 120.0
    """Deadline in seconds for the last byte of a reply."""
    retries: NonNegative = 4
    """Number of repetitions of a failed question before the judge counts as down."""
    concurrency: Positive = 32
    """Largest number of questions in flight."""
    when_down: Literal["wait", "fallback"] = "wait"
    """`wait`: training, or an evaluation, waits until the judge is back. `fallback`: answers are scored by rule
    (math-verify, F1), and terms that need a judge leave the group out. Both are logged and counted."""
    cache: Path | None = None
    """SQLite file of replies; None: judge.sqlite in the run directory."""


@dataclass(frozen=True, config=STRICT)
class RewardConfig:
    """How a finished trajectory is scored."""

    kind: str = "arpo"
    """`arpo`: format gate, answer, tool bonus. `arpo_released`: the released scorer, errors included. Other names are
    rewards of installed packages, or FILE.py:NAME of a class or of a function (question, answer, trajectory) -> reward
    (docs/guides/rewards.md)."""
    math: Literal["verify", "judge"] = "verify"
    """How mathematical answers are graded (`arpo`): by math-verify or by the judge."""
    qa: Literal["f1", "exact_match", "judge"] = "f1"
    """How answers in words are graded (`arpo`): by token F1, exact match, or the judge."""
    format_penalty: float = -1.0
    """Reward of a trajectory that breaks the tag protocol."""
    tool_bonus: NonNegativeFloat = 0.1
    """Bonus for a right answer that used both search and python."""
    success_threshold: Fraction = 0.5
    """A trajectory is a success if its accuracy exceeds this."""
    terms: dict[str, float] = Field(default_factory=dict)
    """Weights of the terms that are added to the reward, by name, e.g. {overlong: 1.0}; see docs/guides/rewards.md."""
    params: dict[str, int | float] = Field(default_factory=dict)
    """Parameters of those terms, and of a reward of an installed package, by name, e.g. {overlong_buffer: 512}."""
    judge: JudgeConfig = JudgeConfig()
