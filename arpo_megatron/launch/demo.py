"""`arpo demo`: train the quickstart recipe, then show an answer of the trained agent and one of its trees."""

import time
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.panel import Panel

from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.jobs.inputs import load_data, load_tokenizer
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.job import open_job, run_job_phases, run_with_restarts
from arpo_megatron.launch.services import Job, services
from arpo_megatron.monitor.progress import Progress
from arpo_megatron.monitor.tree_store import rank_for_display, read_trees, step_file, stored_steps
from arpo_megatron.monitor.tree_view import render_tree
from arpo_megatron.rollout.endpoints import connect_rollouts
from arpo_megatron.rollout.messages import RolloutSettings
from arpo_megatron.tasks.base import Task
from arpo_megatron.tree import RolloutTree, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def run_demo(config: JobConfig, *, resume: bool, restarts: int = 0) -> dict[str, Any]:
    """Run the demo and return the figures that the command line prints as its last line.

    Raises:
        UserError: there is nothing to resume.
        ProcessDiedError: a process of the job died; the message names its log.
    """
    started = time.monotonic()
    with open_job(config, resume=resume) as job:
        run, progress = job.run, job.progress
        run_with_restarts(job, run_job_phases, restarts)
        progress.phase("serve the export")
        tokenizer = load_tokenizer(run.export)
        task, tree = _answer_one(job, tokenizer)
        gap = _transformers_gap(run, tree.trajectory(tree.leaves()[0]))
        progress.note(f"transformers and SGLang agree on the export: log-probs differ by {gap:.1e} nats at most")
        _show(progress, tokenizer, task, tree)
        _draw(progress, tokenizer, run)
    return _figures(run, time.monotonic() - started)


def _answer_one(job: Job, tokenizer: "PreTrainedTokenizerFast") -> tuple[Task, RolloutTree]:
    """Answer one held-out question greedily with the exported model, through a new engine and the tools."""
    config, run = job.config, job.run
    held_out = load_data(config, tokenizer).held_out
    # Tasks of the kind "two" need both tools.
    task = next((task for task in held_out if task.id.endswith("-two")), held_out[0])
    with services(job, run.export) as ready:
        rollouts = connect_rollouts(config, run.export, ready)
        try:
            settings = RolloutSettings.evaluation(config, temperature=0.0)
            report = rollouts.grow_trees(
                [task],
                step=config.train.steps,
                version=0,
                settings=settings,
                progress=lambda _progress: job.supervisor.check(),
            )
        finally:
            rollouts.close()
    if not report.trees:
        raise UserError(f"the exported model could not answer {task.id}: {report.failed}; log: {run.logs}")
    return task, report.trees[0]


def _transformers_gap(run: RunDirectory, trajectory: Trajectory) -> float:
    """Return the largest gap between transformers' and the engine's log-probs of the answer, in nats."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    model = AutoModelForCausalLM.from_pretrained(run.export, local_files_only=True)
    ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))[None]
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].float().log_softmax(-1)
    ours = logprobs.gather(-1, ids[0, 1:, None])[:, 0].numpy()
    sampled = trajectory.loss_mask[1:] == 1
    return float(np.abs(ours - trajectory.logprobs[1:])[sampled].max())


def _show(progress: Progress, tokenizer: "PreTrainedTokenizerFast", task: Task, tree: RolloutTree) -> None:
    text = str(tokenizer.decode(tree.path_tokens(tree.leaves()[0]).tolist()))
    title = f"held-out question {task.id}: the right answer is {task.ground_truth}"
    progress.show(Panel(text, title=title, expand=False))


def _draw(progress: Progress, tokenizer: "PreTrainedTokenizerFast", run: RunDirectory) -> None:
    """Draw a tree of the first step, in which the agent still hesitates."""
    stored = rank_for_display(read_trees(step_file(run, stored_steps(run)[0])))[0]
    progress.show(render_tree(stored.tree, lambda ids: str(tokenizer.decode(ids)), stored.rewards))


def _figures(run: RunDirectory, seconds: float) -> dict[str, Any]:
    result = run.read_result()
    totals, success = result["totals"], result["success"]
    return {
        "success_before": success.get("before"),
        "success_after": success.get("after"),
        "seconds": round(seconds, 1),
        "steps": result["step"],
        "forks": int(totals["forks"]),
        "tool_calls_executed": int(totals["tool_calls_executed"]),
        "tool_calls_inherited": int(totals["tool_calls_inherited"]),
        "logprob_gap_max": result["logprob_gap_max"],
        "cached_prompt_share": round(totals["cached_tokens"] / totals["prompt_tokens"], 4),
        "predicted_cached_share": round(totals["predicted_cached_tokens"] / totals["predicted_prompt_tokens"], 4),
        "run_dir": str(run.path),
        "export_dir": str(run.export),
    }
