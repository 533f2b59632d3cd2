"""Advice on a run: metrics that often mean trouble, each with its value and the page of the docs that helps."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from arpo_megatron.view.rows import Row

_WINDOW = 5
"""Steps over which a metric is averaged, so that one unlucky step gives no advice."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A remark on something that is off in a run, with its remedy."""

    title: str
    detail: str
    """The evidence, with numbers."""
    remedy: str
    metric: str
    page: str
    """Page of the documentation."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def advice(metrics: Sequence[Row], held_out: Sequence[Row], trees: Sequence[Row], config: Row) -> list[Advice]:
    """Return the remarks that apply to a run.

    Args:
        metrics: rows of metrics.jsonl.
        held_out: results of the evaluations, ascending by step.
        trees: summaries of the trees of the newest step (`tree_page.step_trees`).
        config: config values by dotted key.
    """
    found = [rule(metrics, config) for rule in _RULES] if len(metrics) >= 3 else []
    others = [_held_out_fell(held_out), _slow_tools(trees), _failing_tools(trees)]
    return [each for each in [*found, *others] if each is not None]


def _recent_mean(metrics: Sequence[Row], name: str) -> float | None:
    values = [row[name] for row in metrics[-_WINDOW:] if row.get(name) is not None]
    return fmean(values) if values else None


def _first_median(metrics: Sequence[Row], name: str) -> float | None:
    values = [row[name] for row in metrics[:_WINDOW] if row.get(name) is not None]
    return median(values) if values else None


def _sum(metrics: Sequence[Row], name: str) -> float:
    return sum(row.get(name) or 0 for row in metrics[-_WINDOW:])


def _entropy_collapse(metrics: Sequence[Row], _config: Row) -> Advice | None:
    before, now = _first_median(metrics, "entropy_mean"), _recent_mean(metrics, "entropy_mean")
    if before is None or now is None or len(metrics) < 2 * _WINDOW or now > 0.3 * before:
        return None
    return Advice(
        "The policy has become nearly deterministic",
        f"mean entropy fell from {before:.3g} to {now:.3g} nats, so trajectories of a task differ less and less",
        "raise algorithm.clip_high or algorithm.entropy_coefficient, or lower optimizer.lr",
        "entropy_mean",
        "docs/guides/training.md",
    )


def _no_signal(metrics: Sequence[Row], _config: Row) -> Advice | None:
    trees = _sum(metrics, "trees")
    without = _sum(metrics, "groups_without_signal") + _sum(metrics, "dropped/no_signal")
    if not trees or without / trees <= 0.5:
        return None
    solved = _sum(metrics, "groups_solved")
    if 2 * solved > without:
        title = "Most tasks are solved already"
        detail = f"in {solved / trees:.0%} of the recent trees all answers are right"
        remedy = "train on harder tasks, or leave out the solved ones (algorithm.selector)"
    else:
        title = "Most tasks teach nothing"
        detail = (
            f"in {without / trees:.0%} of the recent trees all trajectories have the same reward or are equally correct"
        )
        remedy = "train on easier tasks, select by difficulty (algorithm.selector), or begin with SFT (sft.steps)"
    return Advice(title, detail, remedy, "groups_without_signal", "docs/reference/algorithms.md")


def _gap_grows(metrics: Sequence[Row], _config: Row) -> Advice | None:
    before, now = _first_median(metrics, "logprob_gap"), _recent_mean(metrics, "logprob_gap")
    if now is None or now < 0.1 or (before is not None and now < 2 * before):
        return None
    return Advice(
        "Trainer and engine disagree more than before",
        f"the largest log-prob gap of a step is {now:.2g} nats on average; at the start it was {before or 0:.2g}",
        "compare dtypes and kernels of trainer and engine, and limit the effect with algorithm.sampling_correction=tis",
        "logprob_gap",
        "docs/guides/engines-and-weights.md",
    )


def _shares(metrics: Sequence[Row]) -> tuple[float, float]:
    """Return seconds of the rollout and of the whole step, summed over the window."""
    names = {name for row in metrics[-_WINDOW:] for name in row if name.startswith("seconds/")}
    return _sum(metrics, "seconds/rollout"), sum(_sum(metrics, name) for name in names)


def _engine_idle(metrics: Sequence[Row], config: Row) -> Advice | None:
    rollout, total = _shares(metrics)
    if config.get("rollout.max_staleness") or not total or rollout / total >= 0.4:
        return None
    return Advice(
        "The engines are idle most of the time",
        f"the rollout takes {rollout / total:.0%} of a step; for the rest the engines wait for the trainer",
        "let trees grow while the trainer works (rollout.max_staleness=1), or give the trainer more GPUs",
        "seconds/rollout",
        "docs/guides/rollouts.md",
    )


def _trainer_idle(metrics: Sequence[Row], config: Row) -> Advice | None:
    rollout, total = _shares(metrics)
    if not total or rollout / total <= 0.85:
        return None
    ahead = ", or let trees grow while the trainer works (rollout.max_staleness=1)"
    return Advice(
        "The trainer waits for the rollout most of the time",
        f"the rollout takes {rollout / total:.0%} of a step",
        f"add engines (engine.replicas){'' if config.get('rollout.max_staleness') else ahead}",
        "seconds/rollout",
        "docs/guides/rollouts.md",
    )


def _dropped(metrics: Sequence[Row], reason: str) -> str | None:
    """Return how many recent trees were dropped for a reason, if they are more than one in twenty."""
    dropped, trees = _sum(metrics, f"dropped/{reason}"), _sum(metrics, "trees")
    if reason == "failed":  # `trees` counts the finished ones
        trees += dropped
    if not dropped or dropped / trees <= 0.05:
        return None
    return f"{dropped:.0f} of the last {trees:.0f} trees"


def _failed_trees(metrics: Sequence[Row], _config: Row) -> Advice | None:
    if (dropped := _dropped(metrics, "failed")) is None:
        return None
    return Advice(
        "Many trees could not be finished",
        f"{dropped} failed",
        "read the notes below and the logs of engine and sandbox for the cause",
        "dropped/failed",
        "docs/guides/rollouts.md",
    )


def _lost_trajectories(metrics: Sequence[Row], _config: Row) -> Advice | None:
    lost, kept = _sum(metrics, "trajectories_lost"), _sum(metrics, "trajectories")
    if not lost or lost / (lost + kept) <= 0.05:
        return None
    return Advice(
        "Failed tool calls cost many trajectories",
        f"{lost:.0f} of the last {lost + kept:.0f} trajectories ended as a service or a provider failed",
        "read the notes below and logs/sandbox.log for the cause; lower requests_per_s of a provider that limits them",
        "trajectories_lost",
        "docs/guides/rollouts.md",
    )


def _stale_trees(metrics: Sequence[Row], _config: Row) -> Advice | None:
    if (dropped := _dropped(metrics, "stale")) is None:
        return None
    return Advice(
        "Many trees were too old to train",
        f"{dropped} exceeded rollout.max_staleness",
        "raise rollout.max_staleness, or set tool time limits so that no tree grows for several steps",
        "dropped/stale",
        "docs/guides/rollouts.md",
    )


def _cache_misses(metrics: Sequence[Row], _config: Row) -> Advice | None:
    cached, predicted = _recent_mean(metrics, "cached_prompt_share"), _recent_mean(metrics, "predicted_cached_share")
    if cached is None or predicted is None or cached >= predicted - 0.1:
        return None
    return Advice(
        "The engines compute shared prefixes again",
        f"{cached:.0%} of the prompt tokens came from the cache; the shape of the trees predicts {predicted:.0%}",
        "give the engine's cache more memory (engine.memory_fraction), or let fewer trees grow at once",
        "cached_prompt_share",
        "docs/guides/engines-and-weights.md",
    )


def _repeated_requests(metrics: Sequence[Row], _config: Row) -> Advice | None:
    repeated, calls = _sum(metrics, "requests_repeated"), _sum(metrics, "tool_calls_executed")
    if repeated < 10 or repeated <= 0.05 * (calls + _sum(metrics, "trajectories")):
        return None
    return Advice(
        "Services fail and their work is repeated",
        f"{repeated:.0f} generations and tool calls were repeated in the last {_WINDOW} steps",
        "see the restarts below; arpo health RUN_DIR names the log of each service",
        "requests_repeated",
        "docs/guides/engines-and-weights.md",
    )


def _skipped_updates(metrics: Sequence[Row], _config: Row) -> Advice | None:
    skipped = _sum(metrics, "updates_skipped")
    if not skipped:
        return None
    return Advice(
        "Updates were skipped",
        f"loss or gradient of {skipped:.0f} recent updates was not finite",
        "arpo recompute-update RUN_DIR/skipped_updates/FILE shows which quantity is not finite",
        "updates_skipped",
        "docs/guides/training.md",
    )


def _trees_not_stored(metrics: Sequence[Row], _config: Row) -> Advice | None:
    lost = metrics[-1].get("trees_not_stored") or 0
    if not lost:
        return None
    return Advice(
        "Trees are missing from this page",
        f"the disk refused {lost:.0f} trees",
        "free space on the disk of the run directory",
        "trees_not_stored",
        "docs/reference/run-directory.md",
    )


def _held_out_fell(held_out: Sequence[Row]) -> Advice | None:
    if len(held_out) < 2:
        return None
    best, last = max(held_out, key=lambda row: float(row["success"])), held_out[-1]
    tasks = max(1, len(last.get("solved", ())))
    noise = 2 * (0.25 / tasks) ** 0.5  # two standard errors of a share, at most
    if best["success"] - last["success"] <= noise:
        return None
    return Advice(
        "Held-out success has fallen",
        f"{best['success']:.1%} after step {best['step']}, {last['success']:.1%} after step {last['step']}",
        f"arpo export RUN_DIR --step N converts an older checkpoint; the best is near step {best['step']}",
        "held_out_success",
        "docs/guides/training.md",
    )


def _slow_tools(trees: Sequence[Row]) -> Advice | None:
    calls = sum(sum(row["tools"].values()) for row in trees)
    seconds, grown = sum(row["tool_seconds"] for row in trees), sum(row["seconds"] * row["leaves"] for row in trees)
    if not calls or seconds / calls < 2 or seconds / max(grown, 1e-9) < 0.3:
        return None
    return Advice(
        "Tools are slow",
        f"a call of the newest step took {seconds / calls:.1f} s on average, {seconds / grown:.0%} of the time in "
        "which trajectories grew",
        "arpo bench sandbox measures the tool service; more workers or a shorter time limit help",
        "grow_seconds",
        "docs/guides/tools.md",
    )


def _failing_tools(trees: Sequence[Row]) -> Advice | None:
    calls = sum(sum(row["tools"].values()) for row in trees)
    failed = sum(row["tool_errors"] for row in trees)
    if calls < 10 or failed / calls <= 0.5:
        return None
    return Advice(
        "Most tool calls fail",
        f"{failed} of {calls} calls of the newest step ended in an error, a timeout or a refusal",
        "open a tree with tool errors below: its cards show arguments and answers",
        "tool status",
        "docs/guides/tools.md",
    )


_RULES: tuple[Callable[[Sequence[Row], Row], Advice | None], ...] = (
    _entropy_collapse,
    _no_signal,
    _gap_grows,
    _engine_idle,
    _trainer_idle,
    _failed_trees,
    _lost_trajectories,
    _stale_trees,
    _cache_misses,
    _repeated_requests,
    _skipped_updates,
    _trees_not_stored,
)
