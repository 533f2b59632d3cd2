"""Rewards of finished trajectories: the answer, the tag format, weighted terms, and a model judge.

May import `tasks`, `registry`, `config`, `utils`, `tree` and `errors`; scoring needs no engine and no torch.
"""

from collections.abc import Callable
from pathlib import Path

from arpo_megatron.config import RewardConfig
from arpo_megatron.errors import UserError
from arpo_megatron.registry import ExtensionPoint, check_params, make
from arpo_megatron.rewards.base import Reward
from arpo_megatron.rewards.composed import ComposedReward, WeightedTerm
from arpo_megatron.rewards.function import as_reward
from arpo_megatron.rewards.judge.judge import Judge
from arpo_megatron.tasks.protocols.base import CallProtocol
from arpo_megatron.tasks.tags.protocol import DEFAULT_PROTOCOL


def make_reward(
    config: RewardConfig,
    *,
    max_response_tokens: int | None = None,
    protocol: CallProtocol = DEFAULT_PROTOCOL,
    cache: Path | None = None,
    waiting: str = "training",
    log: Callable[[str], None] = lambda _text: None,
    check: Callable[[], None] = lambda: None,
) -> ComposedReward:
    """Build the reward that a config describes. Its judge sends no request yet.

    Args:
        config: kind, terms with weights and params, judge.
        max_response_tokens: `rollout.max_response_tokens`, for components with such a field.
        protocol: reads the answer of a response (`tasks.protocols.build.reading_protocol`); its tools are those of
            the job.
        cache: the judge's file of replies if the config names none; None: no file.
        waiting: see `Judge`.
        log: see `Judge`.
        check: see `Judge`.

    Raises:
        UserError: an unknown kind, term or parameter, or a needed judge is not configured.
    """
    base, terms = _build(config, max_response_tokens, protocol)
    judge = None
    if base.needs_judge or any(each.term.needs_judge for each in terms):
        judge = Judge(config.judge, config.judge.cache or cache, waiting=waiting, log=log, check=check)
    return ComposedReward(base, terms, judge)


def check_reward(config: RewardConfig, max_response_tokens: int) -> None:
    """Check that all components exist and accept their params. Raises UserError with one line."""
    _build(config, max_response_tokens, DEFAULT_PROTOCOL)


def _build(
    config: RewardConfig, max_response_tokens: int | None, protocol: CallProtocol
) -> tuple[Reward, tuple[WeightedTerm, ...]]:
    """Return the base and the terms with a weight."""
    own = {name: getattr(config, name) for name in ("format_penalty", "tool_bonus", "math", "qa")}
    keys = {name: f"reward.{name}" for name in own}
    keys |= {name: f"rollout.{name}" for name in ("max_response_tokens", "tools", "protocol")}
    if clash := sorted(set(config.params) & set(keys)):
        raise UserError(f"reward.params.{clash[0]} is a key of its own: use {keys[clash[0]]}")
    components = [(ExtensionPoint.REWARD, config.kind), *((ExtensionPoint.REWARD_TERM, name) for name in config.terms)]
    check_params(components, config.params)
    tools = tuple(tool.name for tool in protocol.tools)
    params = {**own, "protocol": protocol, "tools": tools, **config.params}
    if max_response_tokens is not None:
        params["max_response_tokens"] = max_response_tokens
    base: Reward = as_reward(make(ExtensionPoint.REWARD, config.kind, params), config.kind)
    terms = tuple(
        WeightedTerm(name, weight, make(ExtensionPoint.REWARD_TERM, name, params))
        for name, weight in config.terms.items()
        if weight
    )
    return base, terms
