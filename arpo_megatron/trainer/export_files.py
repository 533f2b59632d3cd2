"""The files of an export that others need to use the agent: chat template, generation config, system prompt, card."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arpo_megatron.config import JobConfig
from arpo_megatron.jobs.prompts import job_system_prompt
from arpo_megatron.jobs.run_directory import SYSTEM_PROMPT, RunDirectory
from arpo_megatron.tasks.protocols.build import reading_protocol
from arpo_megatron.tasks.tags.calls import ANSWER_STOP
from arpo_megatron.utils.atomic import read_json

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The template of `tasks.chat.chat_text` for a tokenizer that has none."""


def export_files(config: JobConfig, run: RunDirectory, source: Path, step: int, code: str) -> dict[str, str]:
    """Return the contents of the files by name.

    Args:
        config: config of the run.
        run: the run.
        source: Hugging Face directory that the training began from.
        step: finished steps of the exported weights.
        code: the commit of the code.
    """
    stops = [*reading_protocol(config.rollout).stops]
    stops += [ANSWER_STOP] if config.rollout.stop_at_answer else []
    system = job_system_prompt(config, run)
    files = {
        "generation_config.json": json.dumps(_generation(config, source, stops), indent=2) + "\n",
        "README.md": _card(config, run, step, code, stops, system),
    }
    if system is not None:
        files[SYSTEM_PROMPT] = system + "\n"
    if not _has_template(source):
        files["chat_template.jinja"] = CHATML
    return files


def _generation(config: JobConfig, source: Path, stops: list[str]) -> Mapping[str, Any]:
    """Return the source's generation config with the run's sampling and the closing tags of its tools."""
    path, own = source / "generation_config.json", config.evaluation
    values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    sampling = {
        "do_sample": own.temperature > 0,
        "temperature": own.temperature or 1.0,
        "top_p": own.top_p,
        "top_k": own.top_k or None,
        "repetition_penalty": own.penalty,
        "stop_strings": stops or None,
    }
    return {key: value for key, value in {**values, **sampling}.items() if value is not None}


def _has_template(source: Path) -> bool:
    if (source / "chat_template.jinja").is_file() or (source / "chat_template.json").is_file():
        return True
    path = source / "tokenizer_config.json"
    return path.is_file() and "chat_template" in json.loads(path.read_text(encoding="utf-8"))


def _card(config: JobConfig, run: RunDirectory, step: int, code: str, stops: list[str], system: str | None) -> str:
    model, data = config.model, config.data
    named = model.hub_id or (model.path.name if model.path else None)
    base = f"{named}. Its licence applies to these weights" if named else "random weights, made for the run"
    files = ", ".join(path.name for path, _ in data.sources)
    success = [f"{moment} training {value:.1%}" for moment, value in _success(run).items()]
    lines = [
        "---",
        *([f"base_model: {model.hub_id}"] if model.hub_id else []),
        "library_name: transformers",
        "tags: [arpo, reinforcement-learning, tool-use]",
        "---",
        "",
        f"# {config.name}",
        "",
        f"A tool-using agent, trained with `{config.algorithm.name}` by arpo-megatron ({code}).",
        "",
        f"- Base model: {base}.",
        f"- Data: {files or f'generated tasks ({data.kind})'}; seed {config.seed}.",
        f"- Training: {step} steps of {config.train.tasks_per_step} questions with {config.algorithm.group_size} "
        f"trajectories, learning rate {config.optimizer.lr:g}.",
        *([f"- Held-out success: {', '.join(success)}."] if success else []),
        "",
        "## Use",
        "",
        "`arpo serve DIR` answers chats with OpenAI's protocol and runs the tools.",
        *_without_us(config, stops),
        *(["", f"`{SYSTEM_PROMPT}` has the system prompt of the training data."] if system is not None else []),
        "",
    ]
    return "\n".join(lines)


def _without_us(config: JobConfig, stops: list[str]) -> list[str]:
    """Return how to run the tools in another program."""
    lines = [f"Tools are called in the form `{config.rollout.protocol}` (`rollout.protocol` of the run)."]
    if config.rollout.protocol == "tags":
        lines += [
            f"Without it, a turn ends at one of {', '.join(f'`{stop}`' for stop in stops)}. Run the call before that",
            "tag, append ` <result>\\n` + its output + `\\n</result>` to the turn, and continue it. The answer is in",
            "`<answer>...</answer>`.",
        ]
    if stops:
        lines += ["", "`generation_config.json` has the stop strings, so transformers' `model.generate` needs"]
        lines += ["`tokenizer=tokenizer`."]
    return lines


def _success(run: RunDirectory) -> Mapping[str, float]:
    """Return the measured held-out success by moment ("before", "after")."""
    found: dict[str, float] = {}
    for path in sorted(run.held_out.glob("step_*.json"), key=lambda path: int(path.stem.removeprefix("step_"))):
        found["before" if not found else "after"] = float(read_json(path, "delete it")["success"])
    return found
