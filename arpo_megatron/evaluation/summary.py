"""Summary of the attempts at a benchmark: one row of metrics."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from arpo_megatron.evaluation.journal import UNANSWERED, Attempt
from arpo_megatron.evaluation.pass_at_k import interval, pass_at_k


@dataclass(frozen=True, slots=True)
class EvalSummary:
    """Metrics of a benchmark. Shares and scores are in [0, 1]; failed attempts score 0."""

    benchmark: str
    metric: str
    """Meaning of a score: "math", "f1", "judge", or the name of a run's reward."""
    tasks: int
    attempts: int
    not_answered: int
    """Attempts without a response."""
    success: float
    """Share of correct attempts."""
    accuracy: float
    """Mean score, pass@1."""
    accuracy_interval: tuple[float, float]
    """Bootstrap interval of the accuracy over questions."""
    k: int
    pass_at_k: float
    """Expected best score of k attempts."""
    pass_at_k_interval: tuple[float, float]
    format_ok: float
    """Share of attempts in the requested format."""
    tool_calls: int
    tool_calls_per_attempt: float
    tool_errors: int
    """Calls whose status is not "ok"."""
    model_tokens_per_attempt: float
    """Mean sampled tokens per attempt."""
    tool_tokens_per_attempt: float
    """Mean tokens of tool results per attempt."""
    outcomes: Mapping[str, int]
    """Number of attempts by outcome."""
    in_training_data: int | None = None
    """Questions found in the training data; None if it was not searched."""
    accuracy_of_others: float | None = None
    """Mean score of the questions not found in the training data."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-safe values."""
        return asdict(self)


def summarize(
    attempts: Sequence[Attempt], *, metric: str, k: int, seed: int, overlapping: Collection[str] | None = None
) -> EvalSummary:
    """Summarize all attempts at one benchmark.

    Args:
        attempts: the attempts, equally many per question.
        metric: meaning of their scores.
        k: k of pass@k.
        seed: seed of the bootstrap.
        overlapping: ids of the questions found in the training data; None if it was not searched.

    Raises:
        ValueError: the attempts belong to no benchmark or to several, or there are fewer than k per question.
    """
    (benchmark,) = {attempt.benchmark for attempt in attempts}
    scores: dict[str, list[float]] = {}
    for attempt in attempts:
        scores.setdefault(attempt.question_id, []).append(attempt.score)
    means = {question: float(np.mean(own)) for question, own in scores.items()}
    best = [pass_at_k(own, k) for own in scores.values()]
    others = [mean for question, mean in means.items() if overlapping is not None and question not in overlapping]
    count = len(attempts)
    tool_calls = sum(attempt.tool_calls for attempt in attempts)
    return EvalSummary(
        benchmark=benchmark,
        metric=metric,
        tasks=len(scores),
        attempts=count // len(scores),
        not_answered=sum(attempt.outcome in UNANSWERED for attempt in attempts),
        success=sum(attempt.correct for attempt in attempts) / count,
        accuracy=float(np.mean(list(means.values()))),
        accuracy_interval=interval(list(means.values()), seed=seed),
        k=k,
        pass_at_k=float(np.mean(best)),
        pass_at_k_interval=interval(best, seed=seed),
        format_ok=sum(attempt.format_ok for attempt in attempts) / count,
        tool_calls=tool_calls,
        tool_calls_per_attempt=tool_calls / count,
        tool_errors=sum(attempt.tool_errors for attempt in attempts),
        model_tokens_per_attempt=sum(attempt.model_tokens for attempt in attempts) / count,
        tool_tokens_per_attempt=sum(attempt.tool_tokens for attempt in attempts) / count,
        outcomes=dict(Counter(attempt.outcome.value for attempt in attempts)),
        in_training_data=None if overlapping is None else len(means) - len(others),
        accuracy_of_others=float(np.mean(others)) if others else None,
    )
