"""The estimator and the loss that a config names."""

from arpo_megatron.algorithms.base import AdvantageEstimator, PolicyLoss, TokenLoss, TokenScaling
from arpo_megatron.algorithms.branching import initial_trajectories
from arpo_megatron.config import AlgorithmConfig, JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.registry import ExtensionPoint, check_params, load, make


def make_advantage_estimator(config: AlgorithmConfig) -> AdvantageEstimator:
    """The part that `algorithm.advantage` names. Raises UserError."""
    estimator: AdvantageEstimator = make(ExtensionPoint.ADVANTAGE, config.advantage, config.component_params())
    return estimator


def make_policy_loss(config: AlgorithmConfig) -> PolicyLoss:
    """The part that `algorithm.loss` names. Raises UserError."""
    loss: PolicyLoss = make(ExtensionPoint.LOSS, config.loss, config.component_params())
    return loss


def chosen(config: AlgorithmConfig) -> list[tuple[ExtensionPoint, str]]:
    """The parts of a method: plug-in point and name."""
    return [
        (ExtensionPoint.TASK_SELECTOR, config.selector),
        (ExtensionPoint.BRANCH_POLICY, config.branching),
        (ExtensionPoint.ADVANTAGE, config.advantage),
        (ExtensionPoint.LOSS, config.loss),
        *([] if config.replay is None else [(ExtensionPoint.REPLAY, config.replay)]),
    ]


def check_components(job: JobConfig) -> None:
    """That all parts exist and take their numbers. Raises UserError: one line that says what is wrong."""
    config = job.algorithm
    parts = chosen(config)
    for point, name in parts:
        load(point, name)
    check_params(parts, config.params)
    initial_trajectories(config)
    loss, estimator = make_policy_loss(config), make_advantage_estimator(config)
    if isinstance(estimator, TokenScaling) and not isinstance(loss, TokenLoss):
        raise UserError(
            f"algorithm.advantage={config.advantage} scales tokens, which algorithm.loss={config.loss} has no place for"
        )
    if config.trajectory_weight_limit is None and not getattr(loss, "corrects_for_sampling", False):
        _check_on_policy(job)
    for point, name in parts:
        if point is ExtensionPoint.REPLAY:
            make(point, name, config.component_params())


def _check_on_policy(job: JobConfig) -> None:
    """That nothing is trained that older weights have sampled: neither loss nor weights correct for it."""
    remedy = "trains what older weights sampled: correct for it with algorithm.trajectory_weight_limit=2"
    if job.algorithm.replay is not None:
        raise UserError(f"algorithm.replay={job.algorithm.replay} {remedy}")
    if job.rollout.max_staleness:
        raise UserError(f"rollout.max_staleness={job.rollout.max_staleness} {remedy}, or set rollout.max_staleness=0")
