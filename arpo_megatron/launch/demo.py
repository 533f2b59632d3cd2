"""`arpo demo`: train the quickstart recipe, then show an answer of the trained agent and one of its trees."""

import time
from typing import TYPE_CHECKING, Any

from rich.panel import Panel

from arpo_megatron.config import JobConfig
from arpo_megatron.jobs.inputs import load_tokenizer
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.job import open_job, run_job_phases, run_with_restarts
from arpo_megatron.launch.verify_export import answer_and_compare
from arpo_megatron.monitor.progress import Progress
from arpo_megatron.monitor.tree_store import rank_for_display, read_trees, step_file, stored_steps
from arpo_megatron.monitor.tree_view import render_tree
from arpo_megatron.tasks.base import Task
from arpo_megatron.tree import RolloutTree

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
        verified = answer_and_compare(job, run.export)
        progress.note(verified.line)
        _show(progress, tokenizer, verified.task, verified.tree)
        _draw(progress, tokenizer, run)
    return _figures(run, time.monotonic() - started)


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
