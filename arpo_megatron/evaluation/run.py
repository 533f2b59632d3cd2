"""`arpo eval`: the held-out tasks of a run, answered by one of its models."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from arpo_megatron import resolve
from arpo_megatron.errors import UserError
from arpo_megatron.evaluation.score import evaluation_of
from arpo_megatron.launch import connect_rollouts, services
from arpo_megatron.preparation import load_data, load_tokenizer, write_tool_files
from arpo_megatron.processes import Roles
from arpo_megatron.rewards import make_reward
from arpo_megatron.rollout.messages import GrowSettings
from arpo_megatron.run_directory import RunDirectory


def evaluate_run(run: RunDirectory, *, model: Path | None, tasks: int | None) -> dict[str, Any]:
    """Answer held-out tasks with `model` (None: the run's export), one trajectory each.

    Returns:
        success, accuracy and format shares in [0, 1], tool calls, the number of tasks and of those not answered.

    Raises:
        UserError: the run has no such model.
        RoleDiedError: the engine or the tool service did not start.
    """
    config = resolve.load(run.config)
    model = model or run.export
    if not (model / "config.json").is_file():
        raise UserError(f"{model} is no Hugging Face model; name one with --model")
    with run.locked(), Roles(run.logs) as roles:
        tokenizer = load_tokenizer(model)
        data = load_data(config, tokenizer)
        held_out = data.held_out
        if tasks is not None and tasks > len(held_out):
            raise UserError(f"--tasks {tasks}: the run has {len(held_out)} held-out tasks")
        write_tool_files(config, run, data)
        chosen = held_out[: tasks or config.evaluation.tasks]
        with services(config, run, roles, model) as ready:
            rollouts = connect_rollouts(config, model, ready)
            try:
                settings = GrowSettings.evaluation(config)
                report = rollouts.grow(
                    chosen, step=0, version=0, settings=settings, progress=lambda _progress: roles.check()
                )
            finally:
                rollouts.close()
    found = evaluation_of(
        report,
        chosen,
        make_reward(config.reward),
        lambda ids: str(tokenizer.decode(list(ids))),
        config.reward.success_threshold,
    )
    return {"model": str(model), **asdict(found)}
