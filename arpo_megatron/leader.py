"""Rank 0's part of a step: growing, scoring, pushing, counting. No other rank talks to the outside."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from arpo_megatron.actor.packing import TreePack, pack_trees
from arpo_megatron.algorithms.credit import supervised_credit
from arpo_megatron.config import JobConfig
from arpo_megatron.evaluation.score import evaluation_of
from arpo_megatron.harvest import Harvest, show_progress, staleness
from arpo_megatron.launch import Services, connect_rollouts
from arpo_megatron.machine import placement
from arpo_megatron.monitor.events import EventLog
from arpo_megatron.rewards import make_reward
from arpo_megatron.rewards.base import Reward, score_tree
from arpo_megatron.rollout.accounting import GrowStats
from arpo_megatron.rollout.messages import CollectTrees, GrowSettings
from arpo_megatron.rollout.service import RolloutHandle
from arpo_megatron.run_directory import RunDirectory
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.sampler import TaskSampler
from arpo_megatron.tree import Float32Array, Role, RolloutTree
from arpo_megatron.tree_files import ScoredTree
from arpo_megatron.weights.engines import WeightPushError
from arpo_megatron.weights.sync import PROBE_TOKENS, WeightSync
from arpo_megatron.weights.transports import Bucket

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

EVALUATION = "evaluation"
"""Group of the trees of held-out tasks."""
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
    sampler: TaskSampler
    events: EventLog
    probe: list[int]
    memory_lent: Path
    evaluating: bool = False
    harvest: Harvest = field(init=False)

    def __post_init__(self) -> None:
        self.harvest = Harvest(self.config, self.rollouts, self.score, self.sampler, self.events)

    @classmethod
    def start(
        cls,
        config: JobConfig,
        directory: RunDirectory,
        model: Path,
        tokenizer: "PreTrainedTokenizerFast",
        services: Services,
        sampler: TaskSampler,
        events: EventLog,
    ) -> Self:
        """Take hold of the rollout process (with the tokenizer of `model`), and prepare to push weights."""
        return cls(
            config=config,
            tokenizer=tokenizer,
            rollouts=connect_rollouts(config, model, services),
            reward=make_reward(config.reward),
            sync=WeightSync.of(config, services.engine_urls, directory.path),
            sampler=sampler,
            events=events,
            probe=tokenizer.encode(PROBE_TEXT, add_special_tokens=False)[:PROBE_TOKENS],
            memory_lent=directory.memory_lent,
        )

    def close(self) -> None:
        """Let go of the rollout process and the engine."""
        self.rollouts.close()
        self.sync.close()

    def score(self, trees: Sequence[RolloutTree], tasks: Sequence[Task]) -> list[ScoredTree]:
        """Rewards for every leaf of the trees of these tasks."""
        return [self._scored(tree, task) for tree, task in zip(trees, tasks, strict=True)]

    def _scored(self, tree: RolloutTree, task: Task) -> ScoredTree:
        scores = score_tree(self.reward, tree, task, self.decode)
        return ScoredTree(
            task=task,
            tree=tree,
            rewards=np.array([score.reward for score in scores]),
            accuracies=np.array([score.accuracy for score in scores]),
            format_ok=np.array([score.format_ok for score in scores]),
        )

    def evaluate(self, tasks: Sequence[Task], step: int) -> float:
        """Share of tasks solved by one trajectory each, in [0, 1]; what could not be finished counts as wrong.

        Raises StaleEnginesError where engines need a push; a second call goes on where this one was.
        """
        if not self.evaluating:
            settings = GrowSettings.evaluation(self.config)
            self.rollouts.start_trees(EVALUATION, tasks, step=step, version=step, settings=settings)
            self.evaluating = True
        report = self.rollouts.collect(CollectTrees(EVALUATION), partial(show_progress, self.events))
        self.evaluating = False
        for each in report.failed:
            text = f"{each.tree.task_id} could not be evaluated and counts as wrong: {each.reason}"
            self.events.emit("note", text=text)
        return evaluation_of(report, tasks, self.reward, self.decode, self.config.reward.success_threshold).success

    def probe_pack(self) -> TreePack:
        """The probe sequence as a pack whose targets are all its tokens but the first."""
        tree = RolloutTree("probe", self.probe[:1])
        tree.add(0, Role.MODEL, self.probe[1:])
        return pack_trees([tree], supervised_credit([tree]), token_budget=len(self.probe))[0]

    def lend_memory(self) -> None:
        """Stop the trees, and give the engines' memory to the trainer until the next push."""
        self.harvest.before_push()
        self.sync.engines.wait_until_up(self.config.engine.startup_timeout_s)
        self.memory_lent.touch()  # an engine that dies from now on stays down until the push
        try:
            self.sync.engines.release_memory()
        except WeightPushError as error:
            self.events.emit("note", text=f"an engine has not given its memory back: {error}")

    def push(self, buckets: Iterable[Bucket], version: int) -> Callable[[], list[Float32Array]]:
        """Send the weights to the engines, between whose requests there is none meanwhile.

        Returns, to be waited for, what each engine makes of the probe. Raises WeightPushError.
        """
        self.harvest.before_push()
        self.memory_lent.unlink(missing_ok=True)
        self.sync.engines.wait_until_up(self.config.engine.startup_timeout_s)
        if placement(self.config).shared:  # one that has its memory, because it was restarted, say, does nothing
            self.sync.engines.resume_memory()
        self.sync.push(buckets, version)
        return self.sync.engines.start_scores(self.probe)

    def count(self, totals: dict[str, float]) -> None:
        """Add the counters of the last step to `totals`."""
        for name, value in self.counters().items():
            totals[name] = totals.get(name, 0) + value

    def counters(self) -> dict[str, float]:
        """Counters of the last step that add up over steps."""
        return {
            **sum_by_name(_counted(stats) for stats in self.harvest.stats),
            **self.harvest.metrics(),
        }

    def step_metrics(self, scored: Sequence[ScoredTree], version: int) -> dict[str, float]:
        """What the trees of the last step, trained by the update of policy `version`, earned and what they cost."""
        rewards = np.concatenate([item.rewards for item in scored])
        accuracies = np.concatenate([item.accuracies for item in scored])
        counted = self.counters()
        ages = [staleness(item.tree, version) for item in scored]
        return {
            "reward": float(rewards.mean()),
            "success": float((accuracies > self.config.reward.success_threshold).mean()),
            "format_ok": float(np.concatenate([item.format_ok for item in scored]).mean()),
            "groups_without_signal": sum(bool(np.ptp(item.rewards) == 0) for item in scored),
            "staleness": float(np.mean([mean for mean, _ in ages])),
            "staleness_max": max(most for _, most in ages),
            "cached_prompt_share": counted["cached_tokens"] / max(1, counted["prompt_tokens"]),
            "prefill_over_unique": counted["prefilled_tokens"] / max(1, counted["unique_tokens"]),
            "prefill_over_given": counted["prefilled_tokens"] / max(1, counted["given_tokens"]),
            "predicted_cached_share": counted["predicted_cached_tokens"] / max(1, counted["predicted_prompt_tokens"]),
            "tokens_per_s": counted["tokens_sampled"] / max(1e-9, sum(stats.seconds for stats in self.harvest.stats)),
            **counted,
        }

    def decode(self, ids: Sequence[int]) -> str:
        """Token ids as text, special tokens kept."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))


def sum_by_name(rows: Iterable[dict[str, float]]) -> dict[str, float]:
    """Rows with the same names -> their sums."""
    total: Counter[str] = Counter()
    for row in rows:
        total.update(row)
    return dict(total)


def _counted(stats: GrowStats) -> dict[str, float]:
    """The counters of one collection under the names of the metrics."""
    return {
        "forks": stats.forks,
        "trees": stats.trees,
        "trajectories": stats.trajectories,
        "tool_calls_executed": stats.counts.calls_executed,
        "tool_calls_cached": stats.counts.calls_cached,
        "tool_calls_inherited": stats.calls_inherited,
        "requests_repeated": stats.counts.repeated,
        "tokens_sampled": stats.counts.tokens_sampled,
        "prompt_tokens": stats.counts.prompt_tokens,
        "cached_tokens": stats.counts.cached_tokens,
        "prefilled_tokens": stats.counts.prefilled_tokens,
        "predicted_prompt_tokens": stats.predicted_prompt_tokens,
        "predicted_cached_tokens": stats.predicted_cached_tokens,
        "unique_tokens": stats.unique_tokens,
        "flat_tokens": stats.flat_tokens,
        "given_tokens": stats.given_tokens,
    }
