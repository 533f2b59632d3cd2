"""Rank 0's part of a step: rollouts, rewards, the engines' end of a push. No other rank talks to a service."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from arpo_megatron.algorithms.branching.random_forks import arpo_chance, follows_arpo
from arpo_megatron.algorithms.replay import make_replay_buffer
from arpo_megatron.engine.admin import WeightPushError
from arpo_megatron.monitor.tree_store import TrainedTree, TreeLog, held_out_file, write_trees
from arpo_megatron.rewards import make_reward
from arpo_megatron.rewards.composed import ComposedReward
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.rollout.endpoints import ServiceEndpoints, connect_rollouts
from arpo_megatron.rollout.handle import RolloutHandle
from arpo_megatron.rollout.messages import CollectTrees, RolloutSettings
from arpo_megatron.rollout.record import UntrainedTree, decode_records, encode_records
from arpo_megatron.rollout.worker import TokenizerCodec
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.environments.protocol import EnvironmentProtocol
from arpo_megatron.tasks.protocols.build import make_protocol, reading_protocol
from arpo_megatron.tasks.selectors.base import make_task_selector
from arpo_megatron.trainer.collector import TreeCollector, check_not_blocked, check_stop, report_progress
from arpo_megatron.trainer.held_out import HeldOutResult
from arpo_megatron.trainer.metrics import rollout_counters, rollout_metrics
from arpo_megatron.trainer.scorer import TreeScorer
from arpo_megatron.trainer.setup import ActorSession
from arpo_megatron.trainer.step_journal import StepJournal
from arpo_megatron.weights.sync import LONG_PROBE_TOKENS, WeightSync

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

EVALUATION = "evaluation"
"""Purpose of the trees of held-out tasks."""
PROBE_TEXT = "<think>probe</think><python>12*34</python> <result>\n408\n</result><answer>\\boxed{408}</answer>"
"""Trainer and engines compute its log-probs after each push: text of the tag protocol, so trained embedding rows."""
TREES_FILE = "trees.msgpack"
"""File of a checkpoint: the trees that are not trained yet (`rollout/record.py`)."""
REPLAY_FILE = "replay.msgpack"
"""File of a checkpoint: the replay buffer, if the algorithm has one."""


@dataclass(frozen=True, slots=True)
class ControllerState:
    """The controller's share of a checkpoint."""

    selector: dict[str, Any]
    """State of the task selector, at the same moment as `trees`."""
    trees: Sequence[UntrainedTree] = ()
    """Trees that were started and not trained, with all that they have sampled."""
    replay: Callable[[], bytes] | None = None
    """Returns the replay buffer, as it was before the step in progress; None without one."""

    @classmethod
    def load(cls, checkpoint: Path, selector: dict[str, Any]) -> Self:
        """Read the files of a checkpoint; its state.json holds `selector`."""
        replay = checkpoint / REPLAY_FILE
        trees = decode_records((checkpoint / TREES_FILE).read_bytes())
        return cls(selector, trees, replay.read_bytes if replay.exists() else None)

    def files(self) -> dict[str, Callable[[], bytes]]:
        """Return the files of a checkpoint; their contents are made by the thread that writes them."""
        files: dict[str, Callable[[], bytes]] = {TREES_FILE: partial(encode_records, self.trees)}
        return files if self.replay is None else {**files, REPLAY_FILE: self.replay}


@dataclass(slots=True)
class Controller:
    """Holds the rollout process, the reward and the weight sync of a run."""

    session: ActorSession
    tasks: Sequence[Task]
    tokenizer: "PreTrainedTokenizerFast"
    rollouts: RolloutHandle
    reward: ComposedReward
    sync: WeightSync
    scorer: TreeScorer = field(init=False)
    collector: TreeCollector = field(init=False)
    tree_log: TreeLog = field(init=False)
    evaluating: bool = False

    def __post_init__(self) -> None:
        session, config = self.session, self.session.config
        self.scorer = TreeScorer(self.reward, self.decode)
        self.collector = TreeCollector(
            config=config,
            rollouts=self.rollouts,
            scorer=self.scorer,
            selector=make_task_selector(config.algorithm, self.tasks, config.seed),
            replay=make_replay_buffer(config.algorithm),
            journal=StepJournal(
                session.directory.step_journal,
                session.directory.checkpoints,
                config.train.save_every,
                config.rollout.journal_every_s,
                session.note,
            ),
            events=session.events,
        )
        self.tree_log = TreeLog(session.directory, session.note)

    @classmethod
    def start(
        cls,
        session: ActorSession,
        sync: WeightSync,
        tasks: Sequence[Task],
        tokenizer: "PreTrainedTokenizerFast",
        services: ServiceEndpoints,
    ) -> Self:
        """Connect to the services of a job. The controller is closed with the session."""
        config, directory = session.config, session.directory
        controller = cls(
            session=session,
            tasks=tasks,
            tokenizer=tokenizer,
            rollouts=connect_rollouts(config, session.start, services),
            reward=make_reward(
                config.reward,
                max_response_tokens=config.rollout.max_response_tokens,
                protocol=reading_protocol(config.rollout),
                cache=directory.judge_replies,
                log=session.note,
                check=partial(check_stop, session.events),
            ),
            sync=sync,
        )
        session.closing.callback(controller.close)
        return controller

    def close(self) -> None:
        """Close the rollout process and the judge."""
        self.rollouts.close()
        if self.reward.judge is not None:
            self.reward.judge.close()

    def evaluate(self, tasks: Sequence[Task], step: int) -> HeldOutResult:
        """Answer each task once and score the answers.

        Raises:
            StaleEnginesError: engines need a push; a second call continues.
        """
        if not self.evaluating:
            settings = RolloutSettings.evaluation(self.session.config)
            self.rollouts.start_trees(EVALUATION, tasks, step=step, version=step, settings=settings)
            self.evaluating = True
        report = self.rollouts.collect(
            CollectTrees(EVALUATION),
            partial(report_progress, self.session.events),
            partial(self.scorer.begin, step=step),
        )
        self.evaluating = False
        self.rollouts.discard_collected(EVALUATION)
        for each in report.failed:
            check_not_blocked(each)
            self.session.note(f"{each.tree.task_id} could not be evaluated and counts as wrong: {each.reason}")
        by_id = {task.id: task for task in tasks}
        scored = self.scorer.score(report.trees, [by_id[tree.task_id] for tree in report.trees], step=step)
        try:
            write_trees(held_out_file(self.session.directory, step), step, scored, self.decode)
        except OSError as error:
            self.session.note(f"the held-out trajectories of step {step} are not stored: {error}")
        return HeldOutResult.from_trees(tasks, scored, self.session.config.reward.success_threshold)

    def lend_memory(self) -> None:
        """Pause the trees, and lend the engines' GPU memory to the trainer until the next push."""
        self.collector.before_push()
        self.sync.engines.wait_until_up(self.session.config.engine.startup_timeout_s)
        # An engine that dies from now on stays down until the push.
        self.session.directory.memory_lent.touch()
        try:
            self.sync.engines.release_memory()
        except WeightPushError as error:
            self.session.note(f"an engine has not released its memory: {error}")

    def prepare_push(self) -> None:
        """Pause the trees until `TreeCollector.after_push`, and wait for the engines. Raises WeightPushError."""
        self.collector.before_push()
        self.session.directory.memory_lent.unlink(missing_ok=True)
        self.sync.engines.wait_until_up(self.session.config.engine.startup_timeout_s)

    def probe_tokens(self, count: int) -> Sequence[int]:
        """Return the first `count` tokens of the probe after a push."""
        tokens: list[int] = self.tokenizer.encode(PROBE_TEXT, add_special_tokens=False)[:LONG_PROBE_TOKENS]
        return tokens[:count]

    def finish_step(
        self, trained: Sequence[ScoredTree], values: Sequence[TrainedTree], totals: dict[str, float]
    ) -> dict[str, Any]:
        """End the step: store its trees, add its counters to `totals`, and return its rollout metrics.

        Args:
            trained: the trees of the step.
            values: what the trainer computed for each of them.
            totals: sums over all steps.
        """
        step = self.collector.end_step()
        for name, value in rollout_counters(step, self.session.config).items():
            totals[name] = totals.get(name, 0) + value
        missing = self.tree_log.store(step.step + 1, [*trained, *step.left_out], self.decode, values)
        totals["trees_not_stored"] = int(totals.get("trees_not_stored", 0)) + missing
        algorithm, followed = self.session.config.algorithm, dict[str, float]()
        if follows_arpo(algorithm):
            chance = arpo_chance([item.tree for item in trained if item.sampled], algorithm)
            self.collector.arpo_chances.append(chance)
            followed = {} if chance is None else {"arpo_fork_chance": chance}
        judge, replay = self.reward.judge, self.collector.replay
        return {
            **rollout_metrics(trained, step, self.session.config),
            **followed,
            **({} if judge is None else {f"judge/{name}": count for name, count in judge.take_counts().items()}),
            **self.collector.selector.metrics(),
            **({} if replay is None else replay.metrics()),
            "trees_not_stored": totals["trees_not_stored"],
        }

    def snapshot(self) -> ControllerState:
        """Return the state that a checkpoint keeps, also within a step."""
        collector = self.collector
        return ControllerState(collector.selector.state_dict(), collector.unfinished(), collector.replay_snapshot())

    def restore(self, state: ControllerState | None, step: int, arpo_chances: list[float | None]) -> None:
        """Continue from the checkpoint of `step` (None: there is none), or from the journal of the step after it.

        Args:
            state: of the checkpoint.
            step: number of finished steps.
            arpo_chances: `RunState.arpo_chances`, to which `finish_step` appends.
        """
        self.collector.arpo_chances = arpo_chances
        trees: Sequence[UntrainedTree] = ()
        if state is not None:
            trees = state.trees
            self.collector.selector.load_state_dict(state.selector)
            if state.replay is not None and self.collector.replay is not None:
                self.collector.replay.restore(state.replay())
        if (journal := self.collector.journal.read(step)) is not None:
            trees = journal.trees
            self.collector.selector.load_state_dict(journal.selector)
            self.session.note(
                f"step {step + 1} continues with {len(trees)} trees and {journal.entries} entries of its journal"
            )
        self.collector.restore(trees, self.tasks)

    def masked_result(self) -> list[int]:
        """Return the tokens of a tool result without content."""
        rollout, model = self.session.config.rollout, self.session.start
        named = rollout.environment is not None
        protocol = EnvironmentProtocol(model) if named else make_protocol(rollout.protocol, model=model)
        return protocol.result_frame().tokens("", TokenizerCodec(model), rollout.max_tool_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        """Return token ids as text, special tokens kept."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))
