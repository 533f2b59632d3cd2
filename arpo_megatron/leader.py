"""Rank 0's part of a step: growing, scoring, pushing, counting. No other rank talks to the outside."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from arpo_megatron.actor.packing import TreePack, pack_trees
from arpo_megatron.algorithms.credit import supervised_credit
from arpo_megatron.config import JobConfig
from arpo_megatron.launch import Services, start_rollouts
from arpo_megatron.monitor.events import EventLog
from arpo_megatron.rewards import make_reward
from arpo_megatron.rewards.base import Reward, Score, score_tree
from arpo_megatron.rollout.service import GrowProgress, GrowReport, GrowSettings, RolloutHandle
from arpo_megatron.run_directory import RunDirectory
from arpo_megatron.tasks.base import Task
from arpo_megatron.tree import Float32Array, Role, RolloutTree
from arpo_megatron.tree_files import ScoredTree
from arpo_megatron.weights.sync import WeightSync, probe_gap
from arpo_megatron.weights.transports import Bucket

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PROBE_TEXT = "<think>probe</think><python>12*34</python> <result>\n408\n</result><answer>\\boxed{408}</answer>"
"""Scored by trainer and engine after each push: text of the job's own protocol, so ordinary rows of the embedding."""


@dataclass(slots=True)
class Leader:
    """Holds the rollout service, the reward and the weight sync of a run."""

    config: JobConfig
    tokenizer: "PreTrainedTokenizerFast"
    rollouts: RolloutHandle
    reward: Reward
    sync: WeightSync
    events: EventLog
    probe: list[int]
    report: GrowReport | None = None
    scores: list[list[Score]] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        config: JobConfig,
        directory: RunDirectory,
        model: Path,
        tokenizer: "PreTrainedTokenizerFast",
        services: Services,
        events: EventLog,
    ) -> Self:
        """Start the rollout service (with the tokenizer of `model`) and prepare to push weights to the engine."""
        return cls(
            config=config,
            tokenizer=tokenizer,
            rollouts=start_rollouts(config, model, directory.logs / "rollout.log", services),
            reward=make_reward(config.reward),
            sync=WeightSync.of(config, [services.engine_url], directory.path),
            events=events,
            probe=tokenizer.encode(PROBE_TEXT, add_special_tokens=False),
        )

    def close(self) -> None:
        """End the rollout service and let go of the engine."""
        self.rollouts.close()
        self.sync.close()

    def grow(self, tasks: Sequence[Task], step: int) -> list[RolloutTree]:
        """Grow one tree for each task with the policy of `step`; trees that cannot be finished are reported.

        Raises:
            RuntimeError: not one tree was finished.
        """
        settings = GrowSettings.training(self.config)
        self.report = self.rollouts.grow(
            tasks, step=step, version=step, settings=settings, progress=self._show_progress
        )
        for task_id, reason in self.report.failed:
            self.events.emit("note", text=f"the tree of {task_id} was dropped: {reason}")
        if not self.report.trees:
            raise RuntimeError(f"no tree of step {step + 1} was finished; the first failure: {self.report.failed[0]}")
        return list(self.report.trees)

    def score(self, trees: Sequence[RolloutTree], tasks: Sequence[Task]) -> list[ScoredTree]:
        """Rewards for every leaf."""
        by_id = {task.id: task for task in tasks}
        self.scores = [score_tree(self.reward, tree, by_id[tree.task_id], self._decode) for tree in trees]
        return [
            ScoredTree(
                task=by_id[tree.task_id],
                tree=tree,
                rewards=np.array([score.reward for score in scores]),
                accuracies=np.array([score.accuracy for score in scores]),
            )
            for tree, scores in zip(trees, self.scores, strict=True)
        ]

    def evaluate(self, tasks: Sequence[Task], step: int) -> float:
        """Share of tasks solved by one trajectory each, in [0, 1]; what could not be finished counts as wrong."""
        settings = GrowSettings.evaluation(self.config)
        report = self.rollouts.grow(tasks, step=step, version=step, settings=settings, progress=self._show_progress)
        for task_id, reason in report.failed:
            self.events.emit("note", text=f"{task_id} could not be evaluated and counts as wrong: {reason}")
        scored = self.score(report.trees, tasks)
        threshold = self.config.reward.success_threshold
        return sum(bool(item.accuracies[0] > threshold) for item in scored) / max(1, len(tasks))

    def probe_pack(self) -> TreePack:
        """The probe sequence as a pack whose targets are all its tokens but the first."""
        tree = RolloutTree("probe", self.probe[:1])
        tree.add(0, Role.MODEL, self.probe[1:])
        return pack_trees([tree], supervised_credit([tree]), token_budget=len(self.probe))[0]

    def push(self, buckets: Iterable[Bucket], version: int, probe_logprobs: Float32Array) -> float:
        """Send the weights to the engine; returns its largest difference to `probe_logprobs` in nats."""
        self.sync.push(buckets, version)
        return max(probe_gap(probe_logprobs, engine) for engine in self.sync.score(self.probe))

    def count(self, totals: dict[str, float]) -> None:
        """Add the counters of the last `grow` to `totals`."""
        for name, value in self.counters().items():
            totals[name] = totals.get(name, 0) + value

    def counters(self) -> dict[str, float]:
        """Counters of the last `grow` that add up over steps."""
        if self.report is None:
            return {}
        stats = self.report.stats
        return {
            "forks": stats.forks,
            "trees": stats.trees,
            "trees_dropped": stats.failed,
            "trajectories": stats.trajectories,
            "tool_calls_executed": stats.counts.calls_executed,
            "tool_calls_cached": stats.counts.calls_cached,
            "tool_calls_inherited": stats.calls_inherited,
            "tokens_sampled": stats.counts.tokens_sampled,
            "prompt_tokens": stats.counts.prompt_tokens,
            "cached_tokens": stats.counts.cached_tokens,
            "predicted_prompt_tokens": stats.predicted_prompt_tokens,
            "predicted_cached_tokens": stats.predicted_cached_tokens,
            "unique_tokens": stats.unique_tokens,
            "flat_tokens": stats.flat_tokens,
        }

    def step_metrics(self, scored: Sequence[ScoredTree]) -> dict[str, float]:
        """What the last step earned and what it cost."""
        if self.report is None:
            return {}
        rewards = np.concatenate([item.rewards for item in scored])
        accuracies = np.concatenate([item.accuracies for item in scored])
        flat = [score for scores in self.scores for score in scores]
        stats = self.report.stats
        return {
            "reward": float(rewards.mean()),
            "success": float((accuracies > self.config.reward.success_threshold).mean()),
            "format_ok": float(np.mean([score.format_ok for score in flat])),
            "groups_without_signal": sum(bool(np.ptp(item.rewards) == 0) for item in scored),
            "cached_prompt_share": stats.cached_share,
            "predicted_cached_share": stats.predicted_cached_share,
            "tokens_per_s": stats.counts.tokens_sampled / max(stats.seconds, 1e-9),
            **self.counters(),
        }

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def _show_progress(self, progress: GrowProgress) -> None:
        text = f"{progress.trees_done} of {progress.trees_total} trees, {progress.tokens_sampled} tokens sampled"
        self.events.emit("progress", text=text)
