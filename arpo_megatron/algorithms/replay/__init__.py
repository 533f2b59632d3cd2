"""Old trajectories that are trained again."""

from arpo_megatron.algorithms.replay.base import ExperienceStore
from arpo_megatron.config import AlgorithmConfig
from arpo_megatron.registry import Point, make


def make_store(config: AlgorithmConfig) -> ExperienceStore | None:
    """The part that `algorithm.store` names; None: there is none. Raises UserError."""
    if config.store is None:
        return None
    store: ExperienceStore = make(Point.STORE, config.store, config.given())
    return store
