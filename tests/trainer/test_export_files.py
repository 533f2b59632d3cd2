"""An export has what others need: its template renders the training prompt, its config has the closing tags."""

import json
from pathlib import Path

import pytest

from arpo_megatron.config import JobConfig
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.inputs import load_tokenizer
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.models import tiny
from arpo_megatron.tasks.base import Message
from arpo_megatron.tasks.chat import chat_text
from arpo_megatron.tasks.synthetic.lookup import generated_task
from arpo_megatron.trainer.export_files import export_files

MESSAGES: list[Message] = [{"role": "system", "content": "Think."}, {"role": "user", "content": "1+1?"}]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    config = resolve.resolve("quickstart")
    tiny.make_model_directory(tmp_path / "model", config.model, tiny.generated_tokenizer())
    return tmp_path / "model"


def test_template_of_generated_tasks_renders_their_prompt(source: Path) -> None:
    task = generated_task("t", "12*3", 36, "math")
    assert chat_text(task.messages, load_tokenizer(source)) == task.prompt_text
    assert "chat_template.jinja" not in export_files(_config(), RunDirectory(source), source, 1, "commit 0")


def test_tokenizer_without_template_gets_that_of_training(source: Path) -> None:
    (source / "chat_template.jinja").unlink()
    before = chat_text(MESSAGES, load_tokenizer(source))
    for name, text in export_files(_config(), RunDirectory(source), source, 1, "commit 0").items():
        (source / name).write_text(text)
    assert chat_text(MESSAGES, load_tokenizer(source)) == before


def test_generation_config_has_sampling_and_closing_tags(source: Path, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.held_out.mkdir(parents=True)
    for step, success in ((0, 0.25), (3, 0.5)):
        (run.held_out / f"step_{step}.json").write_text(json.dumps({"success": success}))
    files = export_files(_config("evaluation.temperature=0.6"), run, source, 3, "commit 0123")
    values = json.loads(files["generation_config.json"])
    assert values["stop_strings"] == ["</search>", "</python>"] and values["temperature"] == 0.6
    assert values["eos_token_id"] == json.loads((source / "config.json").read_text())["eos_token_id"]
    for part in ("commit 0123", "3 steps", "before training 25.0%, after training 50.0%", "`</python>`"):
        assert part in files["README.md"]


def test_generation_config_of_an_environment_has_no_closing_tags(source: Path) -> None:
    config = _config("rollout.environment=sql", "reward.kind=environment")
    files = export_files(config, RunDirectory(source), source, 1, "commit 0")
    assert not json.loads(files["generation_config.json"]).get("stop_strings")


def _config(*overrides: str) -> JobConfig:
    return resolve.resolve("quickstart", overrides=overrides)
