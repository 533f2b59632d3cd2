"""Scoring finished trajectories: the tag format, the answer, and the shaping of the reward."""

from arpo_megatron.config import RewardConfig
from arpo_megatron.rewards.arpo import ArpoReward
from arpo_megatron.rewards.base import Reward
from arpo_megatron.rewards.released import ReleasedReward


def make_reward(config: RewardConfig) -> Reward:
    """The reward that `reward.kind` names."""
    kinds: dict[str, type[ArpoReward] | type[ReleasedReward]] = {"arpo": ArpoReward, "arpo_released": ReleasedReward}
    return kinds[config.kind](format_penalty=config.format_penalty, tool_bonus=config.tool_bonus)
