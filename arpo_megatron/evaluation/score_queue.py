"""A queue that scores responses in threads, because a judge may be slow or unavailable for a long time."""

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
    """Scores the responses of agents; a context manager.

    Args:
        scorers: scorer by benchmark.
        journal: receives answers and attempts.
        judged: benchmarks with a judge. Their answers are saved before they are scored.
        progress: called from any thread with the number of scored attempts.
        threads: attempts scored at a time; None for the default of the machine.
    """

    def __init__(
        self,
        scorers: Mapping[str, Scorer],
        journal: Journal,
        judged: Collection[str],
        progress: Callable[[int], None],
        threads: int | None = None,
    ) -> None:
        self._scorers, self._journal, self._judged, self._progress = scorers, journal, judged, progress
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="scoring")
        self._futures = list[Future[None]]()
        self._failed: BaseException | None = None
        self._lock, self._done = Lock(), 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        """Stop scoring.

        Responses are lost without their score unless they wait for a judge. So after a UserError, scoring by rules
        finishes. Scorers that wait for a judge return when the judge is closed.
        """
        finish = kind is not None and issubclass(kind, UserError) and not self._judged
        self._threads.shutdown(wait=finish, cancel_futures=not finish)

    def saved_answers(self, question: Question, numbers: Iterable[int]) -> dict[int, Response]:
        """Return the saved answers among these attempts, which need only a verdict."""
        if question.benchmark not in self._judged:
            return {}
        rows = {number: self._journal.answer(question.benchmark, question.id, number) for number in numbers}
        return {
            number: AgentResponse(**{**row, "finish": Finish(row["finish"])})
            for number, row in rows.items()
            if row is not None
        }

    def deliver(self, pending: PendingQuestion, responses: Mapping[int, Response]) -> None:
        """Queue an agent's responses. Raises the error of an earlier response that could not be scored."""
        question = pending.question
        responses = {number: responses[number] for number in pending.attempts if number in responses}
        if question.benchmark in self._judged:
            rows = {number: asdict(each) for number, each in responses.items() if isinstance(each, AgentResponse)}
            self._journal.save_answers(question.benchmark, question.id, rows)
        self.score(question, responses)

    def score(self, question: Question, responses: Mapping[int, Response]) -> None:
        """Queue responses without saving them. Raises like `deliver`."""
        if self._failed is not None:
            raise self._failed
        self._futures += [self._threads.submit(self._score, question, *each) for each in responses.items()]

    def finish(self) -> None:
        """Wait until all responses are scored. Raises like `deliver`."""
        for future in as_completed(self._futures):
            future.result()

    def _score(self, question: Question, number: int, response: Response) -> None:
        scorer = self._scorers[question.benchmark]
        try:
            self._journal.add([score_response(question, number, response, scorer)])
        except BaseException as error:
            self._failed = error
            raise
        with self._lock:
            self._done += 1
            self._progress(self._done)
