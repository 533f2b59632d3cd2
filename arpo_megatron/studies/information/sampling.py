"""Sampling of the study: trees of every arm from one policy, in pieces that survive an interruption."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from arpo_megatron.config import AlgorithmConfig, JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.jobs.inputs import load_data, load_tokenizer
from arpo_megatron.jobs.prompts import with_tool_prompts
from arpo_megatron.jobs.resolve import resolve
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.job import open_job, prepare_run
from arpo_megatron.launch.services import running_services
from arpo_megatron.rewards import make_reward
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.rollout.endpoints import connect_rollouts
from arpo_megatron.rollout.handle import RolloutHandle
from arpo_megatron.rollout.messages import RolloutSettings
from arpo_megatron.studies.information.directional import DirectionalModel
from arpo_megatron.studies.information.samples import TreeSample
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.protocols.build import reading_protocol
from arpo_megatron.trainer.scorer import TreeScorer
from arpo_megatron.utils.atomic import append_line, atomic_write

GRPO, ARPO, RANDOM = "grpo", "arpo", "random"
ARMS: Mapping[str, tuple[str, ...]] = {
    GRPO: ("algorithm.name=grpo",),
    ARPO: ("algorithm.name=arpo",),
    "arpo_reserved": ("algorithm.name=arpo", "algorithm.fork_budget=reserved"),
    "arpo_released": ("algorithm.name=arpo_released",),
    RANDOM: ("algorithm.name=random",),
}
"""Overrides of each arm. `random` forks at the mean chance of the fork points that `arpo` has met so far."""
_GROUP = ("algorithm.group_size=16", "algorithm.initial_rollouts=8", "sft.steps=0")
DIRECTION, INFO = "direction.npz", "study.json"
"""Files of the reference direction, and of the command."""
_CHUNK = 64
"""Trees that grow at a time. While the last of them end, the engine has little to do."""


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """A study of one policy: its configs, by arm, and its files."""

    out: Path
    config: JobConfig
    """Config of the services; its run directory is in `out`."""
    algorithms: Mapping[str, AlgorithmConfig]
    """Algorithm of each arm."""

    @classmethod
    def create(cls, recipe: str, overrides: Sequence[str], out: Path) -> "SamplingPlan":
        """Resolve the configs. Raises UserError if one is not valid, or no model is named."""
        own = (*_GROUP, *overrides, f"run_dir={out.absolute() / 'run'}")
        config = resolve(recipe, overrides=own)
        if config.model.path is None:
            raise UserError("name the policy that is studied: model.path=DIRECTORY, for example sft/ of a run")
        return cls(out, config, {arm: resolve(recipe, overrides=[*own, *ARMS[arm]]).algorithm for arm in ARMS})

    @property
    def direction(self) -> Path:
        """File of the reference direction."""
        return self.out / DIRECTION

    def samples(self, arm: str) -> Path:
        """Return the file of an arm's trees, one JSON line each."""
        return self.out / f"{arm}.jsonl"


def read_samples(path: Path) -> tuple[list[TreeSample], int]:
    """Return the trees of a file of samples and the number of those that failed."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    return [TreeSample(**row) for row in rows if "failed" not in row], sum("failed" in row for row in rows)


def read_direction(path: Path) -> tuple[tuple[np.ndarray, np.ndarray], int]:
    """Return the sums of gradients over two halves of the reference sample, and its number of trees."""
    with np.load(path) as found:
        return (found["first"], found["second"]), int(found["trees"])


def sample(plan: SamplingPlan, *, direction_trees: int, trees: int, note: Callable[[str], None]) -> None:
    """Sample the reference direction, then `trees` of every arm, from where an earlier call stopped.

    Args:
        plan: the study.
        direction_trees: trees of the reference sample; GRPO on other tasks than those of the arms.
        trees: trees per arm, one per task.
        note: called with the progress.

    Raises:
        UserError: an input is missing, there are too few tasks, or `out` belongs to another config.
        ProcessDiedError: a service died.
    """
    with _Sampler.open(plan, direction_trees + trees, note) as sampler:
        sampler.find_direction(direction_trees)
        sampler.grow_arms(trees)


@dataclass(slots=True)
class _Sampler:
    """Services that run, and the model that computes derivatives."""

    plan: SamplingPlan
    rollouts: RolloutHandle
    scorer: TreeScorer
    model: DirectionalModel
    tasks: Sequence[Task]
    check: Callable[[], None]
    note: Callable[[str], None]

    @classmethod
    @contextmanager
    def open(cls, plan: SamplingPlan, wanted: int, note: Callable[[str], None]) -> "Iterator[_Sampler]":
        """Start the services of the study, which needs `wanted` tasks."""
        config, model = plan.config, plan.config.model.path
        assert model is not None  # `SamplingPlan.create` has checked it
        started = RunDirectory(plan.out.absolute() / "run").config.exists()
        with open_job(config, resume=started) as job:
            prepare_run(config, job.run, note)
            tokenizer = load_tokenizer(model)
            data, prompt = load_data(config, tokenizer), config.rollout.system_prompt
            tasks = with_tool_prompts(data.train, config, job.run, tokenizer, prompt)
            if len(tasks) < wanted:
                raise UserError(
                    f"--trees and --direction-trees need {wanted} tasks, but the data have {len(tasks)}: lower them or "
                    "raise data.tasks"
                )
            protocol = reading_protocol(config.rollout)
            reward = make_reward(
                config.reward, max_response_tokens=config.rollout.max_response_tokens, protocol=protocol
            )
            scorer = TreeScorer(reward, lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)))
            derivatives = DirectionalModel(model, temperature=config.rollout.temperature)
            with running_services(job, model) as ready, connect_rollouts(config, model, ready) as rollouts:
                yield cls(plan, rollouts, scorer, derivatives, tasks, job.supervisor.check, note)

    def find_direction(self, count: int) -> None:
        """Extend the reference sample to `count` trees."""
        path, done = self.plan.direction, 0
        halves = [np.zeros(sum(p.numel() for p in self.model.parameters)) for _ in range(2)]
        if path.exists():
            found, done = read_direction(path)
            halves = list(found)
        if done < count and any(self.plan.samples(arm).exists() for arm in ARMS):
            raise UserError(f"trees were sampled along a direction of {done} trees: keep --direction-trees {done}")
        while done < count:
            tasks = self.tasks[::-1][done : min(count, done + _CHUNK)]
            scored, failed = self._grow(self.plan.algorithms[GRPO], tasks, step=len(ARMS))
            for place, tree in enumerate(scored):
                self.model.add_gradient(tree.tree, tree.rewards)
                halves[place % 2] += self.model.take_gradient().numpy()
            done += len(tasks)
            with atomic_write(path) as partial, partial.open("wb") as file:
                np.savez(file, first=halves[0], second=halves[1], trees=done)
            self.note(f"direction: {done} of {count} trees{f', {len(failed)} failed' if failed else ''}")

    def grow_arms(self, count: int) -> None:
        """Grow `count` trees of each arm, the arm with the fewest first, and append their samples.

        The derivatives of trees are computed while the next ones grow.
        """
        done = {arm: self._done(arm) for arm in (ARPO, *(arm for arm in ARMS if arm != ARPO))}
        before: Future[None] | None = None
        with ThreadPoolExecutor(1) as pool:
            while done[arm := min(done, key=lambda name: done[name])] < count:
                tasks = self.tasks[done[arm] : min(count, done[arm] + _CHUNK)]
                scored, failed = self._grow(self._algorithm(arm), tasks, step=list(ARMS).index(arm))
                if before is not None:
                    before.result()
                done[arm] += len(tasks)
                before = pool.submit(self._add, arm, scored, failed, f"{arm}: {done[arm]} of {count} trees")
            if before is not None:
                before.result()

    def _algorithm(self, arm: str) -> AlgorithmConfig:
        algorithm = self.plan.algorithms[arm]
        if arm != RANDOM:
            return algorithm
        chances = [chance for tree in read_samples(self.plan.samples(ARPO))[0] for chance in tree.chances]
        return replace(algorithm, params={**algorithm.params, "fork_rate": float(np.mean(chances))})

    def _add(self, arm: str, scored: Sequence[ScoredTree], failed: Sequence[str], progress: str) -> None:
        """Compute the derivatives of grown trees and append their samples to the arm's."""
        import torch

        halves, _ = read_direction(self.plan.direction)
        direction = torch.from_numpy(halves[0] + halves[1])
        derivatives = self.model.derivatives([each.tree for each in scored], direction / direction.norm())
        lines = [TreeSample.of(each.tree, each.rewards, own) for each, own in zip(scored, derivatives, strict=True)]
        rows = [*(each.line() for each in lines), *(json.dumps({"failed": reason}) for reason in failed)]
        append_line(self.plan.samples(arm), "\n".join(rows))
        self.note(f"{progress}{f', {len(failed)} failed' if failed else ''}")

    def _done(self, arm: str) -> int:
        samples, failed = read_samples(self.plan.samples(arm))
        return len(samples) + failed

    def _grow(
        self, algorithm: AlgorithmConfig, tasks: Sequence[Task], *, step: int
    ) -> tuple[list[ScoredTree], list[str]]:
        """Grow a tree of each task, and keep whole ones only; return why the others failed, too.

        Draws and sampling seeds depend on task and step. Each arm has its own step, so that arms share no draws.
        """
        settings = replace(RolloutSettings.training(self.plan.config), branching=algorithm)
        report = self.rollouts.grow_trees(
            tasks, step=step, version=0, settings=settings, progress=lambda _progress: self.check()
        )
        whole = [tree for tree in report.trees if tree.lost is None]
        by_id = {task.id: task for task in tasks}
        scored = self.scorer.score(whole, [by_id[tree.task_id] for tree in whole], step=step)
        lost = ["a failed tool call has cost a trajectory"] * (len(report.trees) - len(whole))
        return scored, [*(each.reason for each in report.failed), *lost]
