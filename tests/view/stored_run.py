"""A small run directory, written by the writers of a job."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from arpo_megatron.config import JobConfig, ModelConfig, TrainConfig
from arpo_megatron.config.io import save_config
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.monitor.events import EventLog
from arpo_megatron.monitor.metrics import MetricsLog
from arpo_megatron.monitor.tree_store import TrainedTree, held_out_file, step_file, write_trees
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.tasks.base import Task
from arpo_megatron.trainer.held_out import HeldOutResult
from arpo_megatron.tree import BranchRecord, Finish, Role, RolloutTree, ToolRecord

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u202etxt\x1b[2J"
STEPS = 4


def tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer: one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return made


TOKENIZER = tokenizer()


def decode(ids: Any) -> str:
    return str(TOKENIZER.decode(list(ids), skip_special_tokens=False))


def grown(
    task: str, answer: str = " 4 \U0001f600", *, forks: bool = True, tool_text: str = "<result>4</result>"
) -> RolloutTree:
    """Two trajectories from the prompt; the first calls a tool and forks after its answer."""
    rng = np.random.default_rng(7)
    tree = RolloutTree(task, TOKENIZER.encode("What is 2 + 2?").ids, step=1, seconds=1.5)

    def model(parent: int, text: str, **fields: Any) -> int:
        ids = TOKENIZER.encode(text).ids
        values = rng.exponential(size=len(ids)).astype(np.float32)
        return tree.add(parent, Role.MODEL, ids, logprobs=-values, entropies=values[:8], policy_version=1, **fields)

    call = model(0, "<python>2 + 2</python>", finish=Finish.TOOL_CALL)
    record = ToolRecord("python", {"code": f"2 + 2  # {HOSTILE}"}, "error", 0.25, cached=False)
    tool = tree.add(call, Role.TOOL, TOKENIZER.encode(tool_text).ids, tool=record)
    for place in range(2 if forks else 1):
        branch = BranchRecord(dH=0.25, probability=0.75, draw=0.5 if forks else 0.9, why="draw") if place == 0 else None
        model(tool, answer + "!" * place, finish=Finish.END, branch=branch)
    model(0, "5", finish=Finish.LENGTH)
    return tree


def scored(tree: RolloutTree, *, mixed: bool = True) -> ScoredTree:
    leaves = len(tree.leaves())
    rewards = np.linspace(1, 0, leaves) if mixed else np.zeros(leaves)
    return ScoredTree(
        Task(tree.task_id, (), "4", "math", f"What is 2 + 2? {HOSTILE}"),
        tree,
        rewards,
        (rewards > 0.5).astype(float),
        np.ones(leaves, bool),
        terms={"verified": rewards, "judged": (rewards > 0.5).astype(float)},
        answers=["4"] * (leaves - 1) + [None],
        format_faults=[""] * leaves,
    )


def trained(item: ScoredTree) -> TrainedTree:
    logprobs = [
        segment.logprobs if segment.logprobs is not None else np.full(len(segment), np.nan)
        for segment in item.tree.segments
    ]
    return TrainedTree(item.rewards - item.rewards.mean(), np.concatenate(logprobs).astype(np.float64) - 0.125)


def make_run(path: Path, *, seed: int = 1, steps: int = STEPS, last: bool = True) -> RunDirectory:
    """Write a run of `steps` steps with trees, evaluations and a restart; unfinished unless `last`."""
    run = RunDirectory(path)
    model = path / "initial_model"
    model.mkdir(parents=True)
    TOKENIZER.save(str(model / "tokenizer.json"))
    config = replace(JobConfig(name="test", seed=seed), model=ModelConfig(path=model), train=TrainConfig(steps=STEPS))
    save_config(config, run.config)
    events, metrics = EventLog(run.events), MetricsLog(path, config)
    events.emit("note", text="code: commit 0123456789ab-dirty", code="commit 0123456789ab-dirty")
    events.emit("phase", name="evaluate before", step=0)
    for step in range(1, steps + 1):
        write_step(run, metrics, events, step)
    if last:
        run.result.write_text(f'{{"step": {steps}}}')
    return run


def write_step(run: RunDirectory, metrics: MetricsLog, events: EventLog, step: int) -> None:
    items = [scored(grown("sum-1")), scored(grown("sum-2", forks=False), mixed=False)]
    cut = ScoredTree.incomplete(items[0].task, grown("cut"), "failed")
    write_trees(step_file(run, step), step, [*items, cut], decode, [trained(item) for item in items])
    row = {
        "step": step,
        "reward": 0.2 * step,
        "entropy_mean": 1.0 / step,
        "trees": 2,
        "groups_without_signal": 1,
        "dropped/failed": 1,
        "tool_calls_executed": 2,
        "logprob_gap": 1e-5 * step,
        "seconds/rollout": 2.0,
        "seconds/update": 1.0,
    }
    metrics.log(row)
    events.emit("step", steps=STEPS, **row)
    if step == 2:
        events.emit("restart", service="engine", state="down", number=1, text=f"engine died {HOSTILE}")
        events.emit("restart", service="engine", state="up", number=1, text="the engine answers")
    if step == STEPS:
        events.emit("phase", name="export", step=step)
        events.emit("restart", service="engine", state="down", number=1, text="engine of arpo serve died")
    if step in (1, STEPS):
        tasks = [Task(f"held-{number}", (), "4", "math", "What?") for number in range(3)]
        alone = [_one_path(task.id, right=number < step) for number, task in enumerate(tasks)]
        HeldOutResult.from_trees(tasks, alone, 0.5).write(run.held_out, step, {})
        write_trees(held_out_file(run, step), step, alone, decode)


def _one_path(task: str, *, right: bool) -> ScoredTree:
    tree = RolloutTree(task, [0])
    tree.add(0, Role.MODEL, TOKENIZER.encode("4" if right else "5").ids, finish=Finish.END)
    value = np.array([float(right)])
    return ScoredTree(Task(task, (), "4", "math", "What?"), tree, value, value, np.ones(1, bool))
