"""Old trajectories that are trained again."""

from arpo_megatron.algorithms.replay.base import ReplayBuffer
from arpo_megatron.config import AlgorithmConfig
from arpo_megatron.registry import ExtensionPoint, make


def make_replay_buffer(config: AlgorithmConfig) -> ReplayBuffer | None:
    """The part that `algorithm.replay` names; None: there is none. Raises UserError."""
    if config.replay is None:
        return None
    store: ReplayBuffer = make(ExtensionPoint.REPLAY, config.replay, config.component_params())
    return store
