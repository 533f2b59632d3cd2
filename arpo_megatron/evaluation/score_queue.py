"""Answers are kept, then scored in threads of their own: a judge may be away for longer than anybody wants to wait."""

from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict
from threading import Lock
from typing import Self

from arpo_megatron.errors import UserError
from arpo_megatron.evaluation.agents.base import PendingQuestion
from arpo_megatron.evaluation.journal import Journal
from arpo_megatron.evaluation.questions import Question
from arpo_megatron.evaluation.response import AgentResponse, Response
from arpo_megatron.evaluation.scorers import Scorer, score_response
from arpo_megatron.tree import Finish


class ScoreQueue:
    """Scores what agents deliver; use as `with`.

    Args:
        scorers: by benchmark.
        journal: takes answers and attempts.
        kept: benchmarks whose answers wait for a verdict, and are kept before.
        note: is told how many attempts are scored, from any thread.
        at_once: how many attempts are scored at a time: as many as a judge may be asked; None: as suits the machine.
    """

    def __init__(
        self,
        scorers: Mapping[str, Scorer],
        journal: Journal,
        kept: Collection[str],
        note: Callable[[int], None],
        at_once: int | None = None,
    ) -> None:
        self._scorers, self._journal, self._kept, self._note = scorers, journal, kept, note
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="scoring")
        self._futures = list[Future[None]]()
        self._failed: BaseException | None = None
        self._lock, self._done = Lock(), 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        """Whoever ends this early may have scorers that wait for a judge; they are let go when that is closed.

        Where rules alone score, and what ended it is the user's to mend, what was answered is still scored: it is
        kept nowhere else.
        """
        rest = kind is not None and issubclass(kind, UserError) and not self._kept
        self._threads.shutdown(wait=rest, cancel_futures=not rest)

    def kept(self, question: Question, numbers: Iterable[int]) -> dict[int, Response]:
        """The answers among these attempts that only want a verdict."""
        if question.benchmark not in self._kept:
            return {}
        found = {number: self._journal.answer(question.benchmark, question.id, number) for number in numbers}
        return {
            number: AgentResponse(**{**row, "finish": Finish(row["finish"])})
            for number, row in found.items()
            if row is not None
        }

    def deliver(self, each: PendingQuestion, given: Mapping[int, Response]) -> None:
        """Of the protocol of agents. Raises what an earlier answer could not be scored for."""
        question, new = each.question, {number: given[number] for number in each.attempts if number in given}
        if question.benchmark in self._kept:
            rows = {number: asdict(one) for number, one in new.items() if isinstance(one, AgentResponse)}
            self._journal.keep_answers(question.benchmark, question.id, rows)
        self.score(question, new)

    def score(self, question: Question, given: Mapping[int, Response]) -> None:
        """Have answers scored, each in some thread. Raises as `deliver`."""
        if self._failed is not None:
            raise self._failed
        self._futures += [self._threads.submit(self._scored, question, number, one) for number, one in given.items()]

    def finish(self) -> None:
        """Wait until all are scored. Raises as `deliver`."""
        for future in as_completed(self._futures):
            future.result()

    def _scored(self, question: Question, number: int, given: Response) -> None:
        scorer = self._scorers[question.benchmark]
        try:
            self._journal.add([score_response(question, number, given, scorer)])
        except BaseException as error:
            self._failed = error
            raise
        with self._lock:
            self._done += 1
            self._note(self._done)
