"""A checkpoint in the job's own engines.

The k attempts at a question are one tree of independent trajectories (the `grpo` policy), so the engine computes their
prompt once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from arpo_megatron.config import JobConfig
from arpo_megatron.evaluation.agents.base import Deliver, PendingQuestion
from arpo_megatron.evaluation.response import Decode, failed_response, tree_responses
from arpo_megatron.rollout.handle import RolloutHandle
from arpo_megatron.rollout.messages import CollectTrees, RolloutSettings

_PURPOSE = "evaluation"
_QUEUED = 4
"""Trajectories in flight for each one that the engines can decode, because some wait for tools."""


@dataclass(frozen=True, slots=True)
class EngineAgent:
    """Answers with the model that the rollout process's engines serve."""

    rollouts: RolloutHandle
    config: JobConfig
    """Sampling (`evaluation`), limits (`rollout`) and size of the engines."""
    attempts: int
    """Attempts at a question. A tree makes all of them, even if only some are pending."""
    decode: Decode
    """Token ids to text, with special tokens."""
    check: Callable[[], None]
    """Called while waiting; raises if a service has failed for good."""

    def answer(self, pending: Sequence[PendingQuestion], deliver: Deliver) -> None:
        """Grow a tree for each question.

        Raises:
            RolloutError: the rollout process failed. Errors of `check` are raised as well.
        """
        settings = RolloutSettings.evaluation(self.config, group_size=self.attempts)
        engine = self.config.engine
        waiting = iter(pending)
        in_flight: dict[str, PendingQuestion] = {}

        def start(count: int) -> None:
            if batch := list(islice(waiting, count)):
                in_flight.update((each.task.id, each) for each in batch)
                self.rollouts.start_trees(_PURPOSE, [each.task for each in batch], step=0, version=0, settings=settings)

        start(max(1, _QUEUED * engine.replicas * engine.max_running_requests // self.attempts))
        while in_flight:
            report = self.rollouts.collect(CollectTrees(_PURPOSE, count=1), lambda _progress: self.check())
            self.rollouts.discard_collected(_PURPOSE)
            for tree in report.trees:
                deliver(in_flight.pop(tree.task_id), dict(enumerate(tree_responses(tree, self.decode))))
            for failed in report.failed:
                failure = failed_response(failed)
                deliver(in_flight.pop(failed.tree.task_id), dict.fromkeys(range(self.attempts), failure))
            start(len(report.trees) + len(report.failed))
