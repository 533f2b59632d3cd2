"""Rank 0's part of a step: growing, scoring, pushing, counting. No other rank talks to the outside."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from arpo_megatron.algorithms.credit import supervised_credit
from arpo_megatron.algorithms.replay import make_replay_buffer
from arpo_megatron.config import JobConfig
from arpo_megatron.engine.admin import WeightPushError
from arpo_megatron.engine.wire.buckets import Bucket
from arpo_megatron.hardware.placement import placement
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.monitor.events import EventLog
from arpo_megatron.monitor.tree_store import TreeLog
from arpo_megatron.packing.packs import TreePack, pack_trees
from arpo_megatron.rewards import make_reward
from arpo_megatron.rewards.composed import ComposedReward
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.rewards.tree_scorer import TreeScorer, mean_terms, terms_by_name
from arpo_megatron.rollout.accounting import RolloutStats, tokens_per_second
from arpo_megatron.rollout.endpoints import Services, connect_rollouts
from arpo_megatron.rollout.handle import RolloutHandle
from arpo_megatron.rollout.messages import CollectTrees, RolloutSettings
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.selectors.base import TaskSelector
from arpo_megatron.trainer.collector import TreeCollector, age_metrics, check_stop, show_progress
from arpo_megatron.trainer.held_out import HeldOutResult
from arpo_megatron.trainer.step_journal import StepJournal
from arpo_megatron.tree import Float32Array, Role, RolloutTree
from arpo_megatron.weights.sync import LONG_PROBE_TOKENS, WeightSync

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

EVALUATION = "evaluation"
"""Group of the trees of held-out tasks."""
PROBE_TEXT = "<think>probe</think><python>12*34</python> <result>\n408\n</result><answer>\\boxed{408}</answer>"
"""Scored by trainer and engine after each push: text of the job's own protocol, so ordinary rows of the embedding."""


@dataclass(slots=True)
class Controller:
    """Holds the rollout service, the reward and the weight sync of a run."""

    config: JobConfig
    tokenizer: "PreTrainedTokenizerFast"
    rollouts: RolloutHandle
    reward: ComposedReward
    sync: WeightSync
    selector: TaskSelector
    events: EventLog
    probe: list[int]
    memory_lent: Path
    evaluating: bool = False
    collector: TreeCollector = field(init=False)
    tree_log: TreeLog = field(init=False)

    def __post_init__(self) -> None:
        store = make_replay_buffer(self.config.algorithm)
        directory, tell = RunDirectory(self.events.path.parent), lambda text: self.events.emit("note", text=text)
        journal = StepJournal(
            directory.step_journal,
            directory.checkpoints,
            self.config.train.save_every,
            self.config.rollout.journal_every_s,
            tell,
        )
        self.collector = TreeCollector(
            self.config, self.rollouts, self.score, self.selector, self.events, store=store, journal=journal
        )
        self.tree_log = TreeLog(directory, tell)

    @classmethod
    def start(
        cls,
        config: JobConfig,
        directory: RunDirectory,
        model: Path,
        tokenizer: "PreTrainedTokenizerFast",
        services: Services,
        selector: TaskSelector,
        events: EventLog,
    ) -> Self:
        """Take hold of the rollout process (with the tokenizer of `model`), and prepare to push weights."""
        return cls(
            config=config,
            tokenizer=tokenizer,
            rollouts=connect_rollouts(config, model, services),
            reward=make_reward(
                config.reward,
                max_response_tokens=config.rollout.max_response_tokens,
                cache=directory.judge_replies,
                log=lambda text: events.emit("note", text=text),
                check=partial(check_stop, events),
            ),
            sync=WeightSync.of(config, services.engine_urls, directory.path, services.engine_token),
            selector=selector,
            events=events,
            probe=tokenizer.encode(PROBE_TEXT, add_special_tokens=False)[:LONG_PROBE_TOKENS],
            memory_lent=directory.memory_lent,
        )

    def close(self) -> None:
        """Let go of the rollout process, the engine and the judge, and write the trees that wait for the disk."""
        self.tree_log.close()
        self.rollouts.close()
        self.sync.close()
        if self.reward.judge is not None:
            self.reward.judge.close()

    def score(self, trees: Sequence[RolloutTree], tasks: Sequence[Task]) -> list[ScoredTree]:
        """Rewards for every leaf of the trees of these tasks."""
        step = max(0, self.collector.begun)
        found = TreeScorer(self.reward, self.decode).score(trees, tasks, step=step)
        return [
            ScoredTree(
                task=task,
                tree=tree,
                rewards=np.array([score.reward for score in scores]),
                accuracies=np.array([score.accuracy for score in scores]),
                format_ok=np.array([score.format_ok for score in scores]),
                terms=terms_by_name(scores),
            )
            for tree, task, scores in zip(trees, tasks, found, strict=True)
        ]

    def evaluate(self, tasks: Sequence[Task], step: int) -> HeldOutResult:
        """How one trajectory a task fares.

        Raises StaleEnginesError where engines need a push; a second call goes on where this one was.
        """
        if not self.evaluating:
            settings = RolloutSettings.evaluation(self.config)
            self.rollouts.start_trees(EVALUATION, tasks, step=step, version=step, settings=settings)
            self.evaluating = True
        report = self.rollouts.collect(CollectTrees(EVALUATION), partial(show_progress, self.events))
        self.evaluating = False
        self.rollouts.discard_collected(EVALUATION)
        for each in report.failed:
            text = f"{each.tree.task_id} could not be evaluated and counts as wrong: {each.reason}"
            self.events.emit("note", text=text)
        by_id = {task.id: task for task in tasks}
        scored = self.score(report.trees, [by_id[tree.task_id] for tree in report.trees])
        return HeldOutResult.of(tasks, scored, self.config.reward.success_threshold)

    def lend_memory(self) -> None:
        """Stop the trees, and give the engines' memory to the trainer until the next push."""
        self.collector.before_push()
        self.sync.engines.wait_until_up(self.config.engine.startup_timeout_s)
        self.memory_lent.touch()  # an engine that dies from now on stays down until the push
        try:
            self.sync.engines.release_memory()
        except WeightPushError as error:
            self.events.emit("note", text=f"an engine has not given its memory back: {error}")

    def push(self, buckets: Iterable[Bucket], version: int) -> tuple[TreePack, Callable[[], list[Float32Array]]]:
        """Send the weights to the engines, between whose requests there is none meanwhile.

        Returns the probe and, to be waited for, what each engine makes of it. Raises WeightPushError.
        """
        self.collector.before_push()
        self.memory_lent.unlink(missing_ok=True)
        self.sync.engines.wait_until_up(self.config.engine.startup_timeout_s)
        if placement(self.config).shared:  # one that has its memory, because it was restarted, say, does nothing
            self.sync.engines.resume_memory()
        probe = self.probe[: self.sync.push(buckets, version).probe_tokens]
        scores = self.sync.engines.start_scores(probe)
        return probe_pack(probe), scores

    def count(self, totals: dict[str, float]) -> None:
        """Add the counters of the last step to `totals`."""
        for name, value in self.counters().items():
            totals[name] = totals.get(name, 0) + value

    def counters(self) -> dict[str, float]:
        """Counters of the last step that add up over steps."""
        return {
            **sum_by_name(_counted(stats) for stats in self.collector.stats),
            **self.collector.metrics(),
        }

    def step_metrics(self, scored: Sequence[ScoredTree], version: int) -> dict[str, float]:
        """What the trees of the last step, trained by the update of policy `version`, earned and what they cost.

        Trees of stored trajectories alone are the store's to tell of.
        """
        scored = [item for item in scored if item.sampled]
        counted = self.counters()
        judge = self.reward.judge
        return {
            **earned(scored, self.config.reward.success_threshold),
            "groups_without_signal": sum(bool(np.ptp(item.rewards) == 0) for item in scored),
            **age_metrics([item.tree for item in scored], version),
            "cached_prompt_share": counted["cached_tokens"] / max(1, counted["prompt_tokens"]),
            "prefill_over_unique": counted["prefilled_tokens"] / max(1, counted["unique_tokens"]),
            "prefill_over_given": counted["prefilled_tokens"] / max(1, counted["given_tokens"]),
            "predicted_cached_share": counted["predicted_cached_tokens"] / max(1, counted["predicted_prompt_tokens"]),
            "tokens_per_s": tokens_per_second(self.collector.stats),
            **counted,
            **{f"reward/{name}": mean for name, mean in mean_terms([item.terms for item in scored]).items()},
            **({} if judge is None else {f"judge/{name}": count for name, count in judge.take_counts().items()}),
            **self.selector.metrics(),
            **({} if self.collector.store is None else self.collector.store.metrics()),
        }

    def decode(self, ids: Sequence[int]) -> str:
        """Token ids as text, special tokens kept."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))


def earned(scored: Sequence[ScoredTree], threshold: float) -> dict[str, float]:
    """Mean reward, share of successes and of kept formats over the trajectories that were sampled for these trees.

    Replayed ones say how the policy once was; NaN where there is no other.
    """
    own = [(item, slice(len(item.rewards) - item.replayed)) for item in scored]  # those that come first
    rewards = np.concatenate([item.rewards[first] for item, first in own])
    if not len(rewards):
        return dict.fromkeys(("reward", "success", "format_ok"), math.nan)
    return {
        "reward": float(rewards.mean()),
        "success": float((np.concatenate([item.accuracies[first] for item, first in own]) > threshold).mean()),
        "format_ok": float(np.concatenate([item.format_ok[first] for item, first in own]).mean()),
    }


def probe_pack(token_ids: Sequence[int]) -> TreePack:
    """A sequence as a pack whose targets are all its tokens but the first."""
    tree = RolloutTree("probe", token_ids[:1])
    tree.add(0, Role.MODEL, token_ids[1:])
    return pack_trees([tree], supervised_credit([tree]), token_budget=len(token_ids))[0]


def sum_by_name(rows: Iterable[dict[str, float]]) -> dict[str, float]:
    """Rows with the same names -> their sums."""
    total: Counter[str] = Counter()
    for row in rows:
        total.update(row)
    return dict(total)


def _counted(stats: RolloutStats) -> dict[str, float]:
    """The counters of one collection under the names of the metrics."""
    return {
        "forks": stats.forks,
        "trees": stats.trees,
        "trajectories": stats.trajectories,
        "tool_calls_executed": stats.counts.calls_executed,
        "tool_calls_cached": stats.counts.calls_cached,
        "tool_calls_inherited": stats.calls_inherited,
        "requests_repeated": stats.counts.retries,
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
