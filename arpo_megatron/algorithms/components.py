"""The estimator and the loss that a config names."""

from arpo_megatron.algorithms.base import AdvantageEstimator, PolicyLoss, TokenLoss, TokenScaling
from arpo_megatron.algorithms.branching import first_trajectories
from arpo_megatron.config import AlgorithmConfig, JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.registry import Point, check_numbers, load, make


def make_estimator(config: AlgorithmConfig) -> AdvantageEstimator:
    """The part that `algorithm.advantage` names. Raises UserError."""
    estimator: AdvantageEstimator = make(Point.ADVANTAGE, config.advantage, config.given())
    return estimator


def make_loss(config: AlgorithmConfig) -> PolicyLoss:
    """The part that `algorithm.loss` names. Raises UserError."""
    loss: PolicyLoss = make(Point.LOSS, config.loss, config.given())
    return loss


def chosen(config: AlgorithmConfig) -> list[tuple[Point, str]]:
    """The parts of a method: plug-in point and name."""
    return [
        (Point.TASK_SELECTOR, config.selector),
        (Point.BRANCH_POLICY, config.branching),
        (Point.ADVANTAGE, config.advantage),
        (Point.LOSS, config.loss),
        *([] if config.store is None else [(Point.STORE, config.store)]),
    ]


def check_parts(job: JobConfig) -> None:
    """That all parts exist and take their numbers. Raises UserError: one line that says what is wrong."""
    config = job.algorithm
    parts = chosen(config)
    for point, name in parts:
        load(point, name)
    check_numbers(parts, config.numbers)
    first_trajectories(config)
    loss, estimator = make_loss(config), make_estimator(config)
    if isinstance(estimator, TokenScaling) and not isinstance(loss, TokenLoss):
        raise UserError(
            f"algorithm.advantage={config.advantage} scales tokens, which algorithm.loss={config.loss} has no place for"
        )
    if config.trajectory_weight_limit is None and not getattr(loss, "corrects_for_sampling", False):
        _check_on_policy(job)
    for point, name in parts:
        if point is Point.STORE:
            make(point, name, config.given())


def _check_on_policy(job: JobConfig) -> None:
    """That nothing is trained that older weights have sampled: neither loss nor weights correct for it."""
    remedy = "trains what older weights sampled: correct for it with algorithm.trajectory_weight_limit=2"
    if job.algorithm.store is not None:
        raise UserError(f"algorithm.store={job.algorithm.store} {remedy}")
    if job.rollout.max_staleness:
        raise UserError(f"rollout.max_staleness={job.rollout.max_staleness} {remedy}, or set rollout.max_staleness=0")
