"""A checkpoint in engines of our own: the k attempts at a question are one tree of independent trajectories (the `grpo`
policy), so their prompt is computed once; see `rollout.grower` for how trajectories grow."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from arpo_megatron.config import JobConfig
from arpo_megatron.evaluation.agents.base import Deliver, PendingQuestion
from arpo_megatron.evaluation.response import Decode, no_response, tree_responses
from arpo_megatron.rollout.handle import RolloutHandle
from arpo_megatron.rollout.messages import CollectTrees, RolloutSettings

_GROUP = "evaluation"
_QUEUED = 4
"""Trajectories under way for each that the engines can decode at once: some of them wait for tools."""


@dataclass(frozen=True, slots=True)
class EngineAgent:
    """Answers with the model that the rollout process's engines serve.

    Attributes:
        rollouts: the rollout process.
        config: sampling (`evaluation`), limits (`rollout`) and size of the engines.
        samples: attempts at a question; all of them are made, also where only some are wanted.
        decode: token ids -> text, special tokens kept.
        check: called while waiting; raises where a service has failed for good.
    """

    rollouts: RolloutHandle
    config: JobConfig
    samples: int
    decode: Decode
    check: Callable[[], None]

    def answer(self, wanted: Sequence[PendingQuestion], deliver: Deliver) -> None:
        """As the protocol says. Raises RolloutError, and what `check` raises."""
        settings = RolloutSettings.evaluation(self.config, samples=self.samples)
        engine = self.config.engine
        waiting = iter(wanted)
        in_flight: dict[str, PendingQuestion] = {}

        def start(count: int) -> None:
            if batch := list(islice(waiting, count)):
                in_flight.update((each.task.id, each) for each in batch)
                self.rollouts.start_trees(_GROUP, [each.task for each in batch], step=0, version=0, settings=settings)

        start(max(1, _QUEUED * engine.replicas * engine.max_running_requests // self.samples))
        while in_flight:
            report = self.rollouts.collect(CollectTrees(_GROUP, count=1), lambda _progress: self.check())
            self.rollouts.discard_collected(_GROUP)
            for tree in report.trees:
                deliver(in_flight.pop(tree.task_id), dict(enumerate(tree_responses(tree, self.decode))))
            for failed in report.failed:
                why = no_response(failed)
                deliver(in_flight.pop(failed.tree.task_id), dict.fromkeys(range(self.samples), why))
            start(len(report.trees) + len(report.failed))
