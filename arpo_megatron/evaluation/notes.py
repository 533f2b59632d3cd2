"""Notes of a report: conditions and failures that a reader of its tables must know."""

from collections import Counter
from collections.abc import Sequence

from arpo_megatron.config import JobConfig
from arpo_megatron.evaluation.benchmarks import Benchmark
from arpo_megatron.evaluation.journal import TRANSIENT, Attempt, Outcome
from arpo_megatron.evaluation.questions import TestSet
from arpo_megatron.rewards.judge.judge import Judge


def sampling_note(name: str, config: JobConfig) -> str:
    """Describe the sampling of a target."""
    sampling = config.evaluation
    return (
        f"{name}: temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k or 'all'}, "
        f"repetition penalty {sampling.penalty:g}, seed {config.seed}"
    )


def file_notes(sets: Sequence[TestSet]) -> list[str]:
    """Name files of unknown content and rows that were left out."""
    notes = []
    for each in sets:
        name = each.benchmark.name
        if not each.known_file:
            notes.append(f"{name}: {each.path.name} (sha256 {each.sha256[:12]}...) is not a file known to this version")
        if each.left_out:
            row, reason = each.left_out[0]
            notes.append(f"{name}: {len(each.left_out)} rows left out, the first (row {row}): {reason}")
    return notes


def missing_note(missing: Sequence[Benchmark], directory: object) -> list[str]:
    """Name the benchmarks without a file."""
    names = ", ".join(each.name for each in missing)
    return [f"not evaluated, no file in {directory}: {names}"] if missing else []


def judge_note(judge: Judge | None) -> list[str]:
    """Count the judge's requests and failures."""
    if judge is None:
        return []
    counts = judge.take_counts()
    return [
        f"the last process of this evaluation asked the judge {counts['asked']:.0f} times ({counts['cached']:.0f} "
        f"replies were cached) and waited {counts['waited_s']:.0f} s for it; {counts['unreadable']:.0f} replies had no "
        f"verdict, and {counts['fallbacks']:.0f} questions had none because the judge was down"
    ]


def failure_warnings(attempts: Sequence[Attempt]) -> list[str]:
    """Warn about attempts that count as wrong because a service failed or a server refused them."""
    warnings = []
    transient = Counter(attempt.outcome.value for attempt in attempts if attempt.outcome in TRANSIENT)
    if transient:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(transient.items()))
        warnings.append(
            f"{transient.total()} of {len(attempts)} attempts failed because of a service ({kinds}) and count as "
            "wrong; run the same command again to repeat or judge them"
        )
    refused = [attempt.detail for attempt in attempts if attempt.outcome is Outcome.REFUSED]
    if refused:
        warnings.append(
            f"{len(refused)} of {len(attempts)} attempts were refused by the server and count as wrong, also after a "
            f"resume; the first: {refused[0]}"
        )
    return warnings
