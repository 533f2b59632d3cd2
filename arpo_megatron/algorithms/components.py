"""The components of a method that a config names, and the check that they fit together."""

from arpo_megatron.algorithms.base import AdvantageEstimator, PolicyLoss, TokenLoss, TokenScaling
from arpo_megatron.algorithms.branching import initial_trajectories
from arpo_megatron.algorithms.importance import Correction
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
    _check_correction(job, loss)
    for point, name in components:
        if point is ExtensionPoint.REPLAY:
            make(point, name, config.component_params())


def sampling_correction(job: JobConfig) -> Correction:
    """Return the importance weights of a job: `algorithm.sampling_correction` with `auto` resolved."""
    chosen = job.algorithm.sampling_correction
    if chosen != "auto":
        return chosen
    other_policy = _older_weights(job) or job.engine.quantization != "none"
    return "tis" if other_policy and not _corrects(make_policy_loss(job.algorithm)) else "none"


def _older_weights(job: JobConfig) -> str | None:
    """Return the setting because of which a job trains on tokens of older weights; None if it does not."""
    if job.algorithm.replay is not None:
        return f"algorithm.replay={job.algorithm.replay}"
    return f"rollout.max_staleness={job.rollout.max_staleness}" if job.rollout.max_staleness else None


def _corrects(loss: PolicyLoss) -> bool:
    return getattr(loss, "corrects_for_sampling", False)


def _check_correction(job: JobConfig, loss: PolicyLoss) -> None:
    """Refuse to train on tokens of older weights without a correction, or with two."""
    chosen = job.algorithm.sampling_correction
    if _corrects(loss):
        if chosen not in ("auto", "none"):
            raise UserError(
                f"algorithm.loss={job.algorithm.loss} corrects for sampling itself: "
                f"leave out algorithm.sampling_correction={chosen}"
            )
    elif chosen == "none" and (cause := _older_weights(job)):
        raise UserError(f"{cause} trains on tokens of older weights: set algorithm.sampling_correction=tis")
    if job.algorithm.sampling_ratio_min > job.algorithm.sampling_ratio_max:
        raise UserError("algorithm.sampling_ratio_min exceeds algorithm.sampling_ratio_max")
