"""From attempts to figures: one row a benchmark."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from arpo_megatron.evaluation.journal import UNANSWERED, Attempt
from arpo_megatron.evaluation.pass_at_k import interval, pass_at_k


@dataclass(frozen=True, slots=True)
class EvalSummary:
    """What the attempts at a benchmark come to. Shares and scores are in [0, 1]; whatever failed scores 0.

    Attributes:
        benchmark: its name.
        metric: what a score is: "math", "f1", "judge", or the name of a run's reward.
        tasks: questions asked.
        attempts: at each.
        not_answered: attempts for which there is no response.
        success: share of attempts that are right as a whole.
        accuracy: mean score; pass@1.
        accuracy_interval: its bootstrap interval over questions.
        k: of the next two.
        pass_at_k: expected best score of k attempts.
        pass_at_k_interval: its interval.
        format_ok: share of attempts that keep to the format.
        tool_calls: of all attempts.
        tool_calls_a_question: mean over attempts.
        tool_errors: calls whose tool did not answer "ok".
        model_tokens_a_question: sampled, mean over attempts.
        tool_tokens_a_question: of tool results, mean over attempts.
        outcomes: attempts by what became of them.
        in_training_data: questions that the training data holds; None: not looked for.
        accuracy_of_others: mean score without those.
    """

    benchmark: str
    metric: str
    tasks: int
    attempts: int
    not_answered: int
    success: float
    accuracy: float
    accuracy_interval: tuple[float, float]
    k: int
    pass_at_k: float
    pass_at_k_interval: tuple[float, float]
    format_ok: float
    tool_calls: int
    tool_calls_a_question: float
    tool_errors: int
    model_tokens_a_question: float
    tool_tokens_a_question: float
    outcomes: Mapping[str, int]
    in_training_data: int | None = None
    accuracy_of_others: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return asdict(self)


def summarize(
    attempts: Sequence[Attempt], *, metric: str, k: int, seed: int, overlapping: Collection[str] | None = None
) -> EvalSummary:
    """The figures of one benchmark.

    Args:
        attempts: all of it, as many at each question.
        metric: what their scores are.
        k: for pass@k.
        seed: of the bootstrap.
        overlapping: ids of questions that the training data holds; None: not looked for.

    Raises:
        ValueError: attempts at several benchmarks, at none, or fewer than k at a question.
    """
    (benchmark,) = {attempt.benchmark for attempt in attempts}
    by_question: dict[str, list[float]] = {}
    for attempt in attempts:
        by_question.setdefault(attempt.question_id, []).append(attempt.score)
    means = {question: float(np.mean(scores)) for question, scores in by_question.items()}
    best = [pass_at_k(scores, k) for scores in by_question.values()]
    others = [mean for question, mean in means.items() if overlapping is not None and question not in overlapping]
    count = len(attempts)
    return EvalSummary(
        benchmark=benchmark,
        metric=metric,
        tasks=len(by_question),
        attempts=count // len(by_question),
        not_answered=sum(attempt.outcome in UNANSWERED for attempt in attempts),
        success=sum(attempt.correct for attempt in attempts) / count,
        accuracy=float(np.mean(list(means.values()))),
        accuracy_interval=interval(list(means.values()), seed=seed),
        k=k,
        pass_at_k=float(np.mean(best)),
        pass_at_k_interval=interval(best, seed=seed),
        format_ok=sum(attempt.format_ok for attempt in attempts) / count,
        tool_calls=sum(attempt.tool_calls for attempt in attempts),
        tool_calls_a_question=sum(attempt.tool_calls for attempt in attempts) / count,
        tool_errors=sum(attempt.tool_errors for attempt in attempts),
        model_tokens_a_question=sum(attempt.model_tokens for attempt in attempts) / count,
        tool_tokens_a_question=sum(attempt.tool_tokens for attempt in attempts) / count,
        outcomes=dict(Counter(attempt.outcome.value for attempt in attempts)),
        in_training_data=None if overlapping is None else len(means) - len(others),
        accuracy_of_others=float(np.mean(others)) if others else None,
    )
