"""Scoring finished trajectories: the tag format, the answer, and the shaping of the reward."""

from collections.abc import Callable
from pathlib import Path

from arpo_megatron.config import RewardConfig
from arpo_megatron.errors import UserError
from arpo_megatron.registry import ExtensionPoint, check_params, make
from arpo_megatron.rewards.base import Reward
from arpo_megatron.rewards.composed import ComposedReward, WeightedTerm
from arpo_megatron.rewards.judge.judge import Judge


def make_reward(
    config: RewardConfig,
    *,
    max_response_tokens: int | None = None,
    cache: Path | None = None,
    waiting: str = "training",
    log: Callable[[str], None] = lambda _text: None,
    check: Callable[[], None] = lambda: None,
) -> ComposedReward:
    """The reward that a config describes; its judge asks nothing yet.

    Args:
        config: kind, terms with their weights and numbers, judge.
        max_response_tokens: `rollout.max_response_tokens`, for parts that have such a field.
        cache: the judge's file of replies where the config names none; None: none is kept.
        waiting: see `Judge`.
        log: likewise.
        check: likewise.

    Raises:
        UserError: an unknown kind, term or number, or a judge is wanted and none is given.
    """
    base, terms = _made(config, max_response_tokens)
    wanted = base.needs_judge or any(each.term.needs_judge for each in terms)
    judge = Judge(config.judge, config.judge.cache or cache, waiting=waiting, log=log, check=check) if wanted else None
    return ComposedReward(base, terms, judge)


def check_reward(config: RewardConfig, max_response_tokens: int) -> None:
    """That all parts exist and take their numbers. Raises UserError: one line that says what is wrong."""
    _made(config, max_response_tokens)


def _made(config: RewardConfig, max_response_tokens: int | None) -> tuple[Reward, tuple[WeightedTerm, ...]]:
    """The base and the terms that count."""
    own = {name: getattr(config, name) for name in ("format_penalty", "tool_bonus", "math", "qa")}
    keys = {**{name: f"reward.{name}" for name in own}, "max_response_tokens": "rollout.max_response_tokens"}
    if clash := sorted(set(config.params) & set(keys)):
        raise UserError(f"reward.params.{clash[0]} is {keys[clash[0]]}: give it there")
    parts = [(ExtensionPoint.REWARD, config.kind), *((ExtensionPoint.REWARD_TERM, name) for name in config.terms)]
    check_params(parts, config.params)
    given = {**own, **config.params}
    if max_response_tokens is not None:
        given["max_response_tokens"] = max_response_tokens
    base: Reward = make(ExtensionPoint.REWARD, config.kind, given)
    terms = tuple(
        WeightedTerm(name, weight, make(ExtensionPoint.REWARD_TERM, name, given))
        for name, weight in config.terms.items()
        if weight
    )
    return base, terms
