"""Replay buffers: old trajectories that are trained again, one file per method.

May import `rewards`, `tasks`, `registry`, `config` and `tree`.
"""

from arpo_megatron.algorithms.replay.base import ReplayBuffer
from arpo_megatron.config import AlgorithmConfig
from arpo_megatron.registry import ExtensionPoint, make


def make_replay_buffer(config: AlgorithmConfig) -> ReplayBuffer | None:
    """Build the replay buffer that `algorithm.replay` names, or None. Raises UserError."""
    if config.replay is None:
        return None
    buffer: ReplayBuffer = make(ExtensionPoint.REPLAY, config.replay, config.component_params())
    return buffer
