"""The components of a method that a config names, and the check that they fit together."""

from arpo_megatron.algorithms.base import AdvantageEstimator, PolicyLoss, TokenLoss, TokenScaling
from arpo_megatron.algorithms.branching import initial_trajectories
from arpo_megatron.config import AlgorithmConfig, JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.registry import ExtensionPoint, check_params, load, make


def make_advantage_estimator(config: AlgorithmConfig) -> AdvantageEstimator:
    """Build the estimator that `algorithm.advantage` names. Raises UserError."""
    estimator: AdvantageEstimator = make(ExtensionPoint.ADVANTAGE, config.advantage, config.component_params())
    return estimator


def make_policy_loss(config: AlgorithmConfig) -> PolicyLoss:
    """Build the loss that `algorithm.loss` names. Raises UserError."""
    loss: PolicyLoss = make(ExtensionPoint.LOSS, config.loss, config.component_params())
    return loss


def chosen_components(config: AlgorithmConfig) -> list[tuple[ExtensionPoint, str]]:
    """Return the components of a method as pairs of extension point and name."""
    return [
        (ExtensionPoint.TASK_SELECTOR, config.selector),
        (ExtensionPoint.BRANCH_POLICY, config.branching),
        (ExtensionPoint.ADVANTAGE, config.advantage),
        (ExtensionPoint.LOSS, config.loss),
        *([] if config.replay is None else [(ExtensionPoint.REPLAY, config.replay)]),
    ]


def check_components(job: JobConfig) -> None:
    """Check that all components exist, accept their params and fit together. Raises UserError with one line."""
    config = job.algorithm
    components = chosen_components(config)
    for point, name in components:
        load(point, name)
    check_params(components, config.params)
    initial_trajectories(config)
    loss, estimator = make_policy_loss(config), make_advantage_estimator(config)
    if isinstance(estimator, TokenScaling) and not isinstance(loss, TokenLoss):
        raise UserError(
            f"algorithm.advantage={config.advantage} scales single tokens, which algorithm.loss={config.loss} does not "
            "support: use a token-level loss such as ppo"
        )
    if config.trajectory_weight_limit is None and not getattr(loss, "corrects_for_sampling", False):
        _check_on_policy(job)
    for point, name in components:
        if point is ExtensionPoint.REPLAY:
            make(point, name, config.component_params())


def _check_on_policy(job: JobConfig) -> None:
    """Refuse to train on tokens of older weights if neither the loss nor trajectory weights correct for it."""
    remedy = "trains on tokens of older weights: correct for them with algorithm.trajectory_weight_limit=2"
    if job.algorithm.replay is not None:
        raise UserError(f"algorithm.replay={job.algorithm.replay} {remedy}")
    if job.rollout.max_staleness:
        raise UserError(f"rollout.max_staleness={job.rollout.max_staleness} {remedy}, or set rollout.max_staleness=0")
