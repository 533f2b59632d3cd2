"""Check that SGLang and transformers agree on an export: one answers a question, the other scores the answer."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.jobs.inputs import load_data, load_tokenizer
from arpo_megatron.jobs.prompts import with_tool_prompts
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.job import hold_run
from arpo_megatron.launch.services import Job, running_services
from arpo_megatron.rollout.endpoints import connect_rollouts
from arpo_megatron.rollout.messages import RolloutSettings
from arpo_megatron.tasks.base import Task
from arpo_megatron.tree import Role, RolloutTree, Trajectory

GAP_LIMITS = {"float32": 1e-2, "bfloat16": 1.0}
"""Largest gap in nats by rounding, over an answer of thousands of tokens. That of bfloat16 was not measured."""


@dataclass(frozen=True, slots=True)
class ExportedAnswer:
    """A held-out question with the greedy answer of an exported model."""

    task: Task
    tree: RolloutTree
    gap: float
    """Largest difference of the log-probs of SGLang and transformers on the answer's tokens, in nats."""

    @property
    def calls(self) -> int:
        """Number of tool calls of the answer."""
        return sum(segment.role is Role.TOOL for segment in self.tree.segments)

    @property
    def line(self) -> str:
        """The result as a line for the user."""
        return (
            f"transformers and SGLang agree on the export: log-probs differ by {self.gap:.1e} nats at most, over an "
            f"answer with {self.calls} tool call(s)"
        )


def verify_export(config: JobConfig, run: RunDirectory, model: Path) -> ExportedAnswer:
    """Serve an exported model with its tools, ask one held-out question, and compare the log-probs of the answer.

    Raises:
        UserError: a job holds the run, there is no answer, or the log-probs differ by more than rounding explains.
        ProcessDiedError: a service did not start.
    """
    with hold_run(config, run) as job:
        job.progress.phase("serve the export")
        return answer_and_compare(job, model)


def answer_and_compare(job: Job, model: Path) -> ExportedAnswer:
    """Answer one held-out question greedily through new services, and compare the engine with transformers.

    Raises:
        UserError: there is no answer, or the log-probs differ too much (`check_gap`).
    """
    config, run = job.config, job.run
    tokenizer = load_tokenizer(model)
    held_out = with_tool_prompts(
        load_data(config, tokenizer).held_out, config, run, tokenizer, config.rollout.system_prompt
    )
    if not held_out:
        raise UserError("data.held_out=0: there is no question to ask the exported model")
    # Generated tasks of the kind "two" need both tools.
    task = next((task for task in held_out if task.id.endswith("-two")), held_out[0])
    with running_services(job, model) as ready:
        rollouts = connect_rollouts(config, model, ready)
        try:
            report = rollouts.grow_trees(
                [task],
                step=config.train.steps,
                version=0,
                settings=RolloutSettings.evaluation(config, temperature=0.0),
                progress=lambda _progress: job.supervisor.check(),
            )
        finally:
            rollouts.close()
    if not report.trees:
        raise UserError(f"the exported model could not answer {task.id}: {report.failed}; log: {run.logs}")
    tree = report.trees[0]
    gap = _transformers_gap(model, tree.trajectory(tree.leaves()[0]))
    check_gap(gap, model, config)
    return ExportedAnswer(task, tree, gap)


def check_gap(gap: float, model: Path, config: JobConfig) -> None:
    """Raise UserError if a gap in nats exceeds `train.logprob_gap_limit`, or `GAP_LIMITS` if that is not set."""
    limit = config.train.logprob_gap_limit or GAP_LIMITS[config.model.dtype]
    if not gap <= limit:  # refuses NaN too
        raise UserError(
            f"{model}: log-probs of transformers and SGLang differ by {gap:.1e} nats, more than {limit:g}: the export "
            "is wrong, or rounding is larger than that for this model (set train.logprob_gap_limit)"
        )


def _transformers_gap(directory: Path, trajectory: Trajectory) -> float:
    """Return the largest gap between transformers' and the engine's log-probs of the answer, in nats."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))[None]
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].float().log_softmax(-1)
    ours = logprobs.gather(-1, ids[0, 1:, None])[:, 0].numpy()
    sampled = trajectory.loss_mask[1:] == 1
    return float(np.abs(ours - trajectory.logprobs[1:])[sampled].max())
