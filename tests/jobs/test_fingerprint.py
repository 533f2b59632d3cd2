"""A resume needs the inputs of the run; otherwise a one-line error."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from arpo_megatron.config import JobConfig, ModelConfig
from arpo_megatron.errors import UserError
from arpo_megatron.jobs import choose_run, resolve
from arpo_megatron.jobs.fingerprint import check_started_with
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.job import export_checkpoint
from arpo_megatron.models.random_init import save_random_weights
from arpo_megatron.models.tiny import generated_tokenizer, make_model_directory

SIZES = ModelConfig(hidden_size=16, layers=1, heads=2, kv_heads=2, ffn_size=32)


@pytest.fixture
def config(tmp_path: Path) -> JobConfig:
    """Config of a run with a model directory and conversations."""
    make_model_directory(tmp_path / "model", SIZES, generated_tokenizer())
    save_random_weights(tmp_path / "model", seed=1)
    (tmp_path / "talks.jsonl").write_text("{}\n{}\n")
    overrides = [
        f"model.path={tmp_path / 'model'}",
        f"sft.data={tmp_path / 'talks.jsonl'}",
        f"run_dir={tmp_path / 'run'}",
    ]
    return resolve.resolve("quickstart", overrides=[*overrides, "sft.steps=3"])


@pytest.fixture
def run(config: JobConfig) -> RunDirectory:
    made = choose_run.fresh(config)
    check_started_with(config, made)
    return made


def change_shape(config: JobConfig) -> None:
    file = Path(str(config.model.path)) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "intermediate_size": 48}))


def test_run_with_unchanged_inputs_resumes(config: JobConfig, run: RunDirectory) -> None:
    check_started_with(config, run)


def test_changed_model_is_reported(config: JobConfig, run: RunDirectory) -> None:
    change_shape(config)
    with pytest.raises(UserError, match=r"model has changed since .*run was started \(ffn was 32, now 48\): restore"):
        check_started_with(config, run)
    (run.checkpoints / "step_1").mkdir(parents=True)
    with pytest.raises(UserError, match="model has changed since"):
        export_checkpoint(run, run.path / "out", None)


def test_changed_data_and_tokenizer_are_reported(config: JobConfig, run: RunDirectory) -> None:
    talks = Path(str(config.sft.data))
    talks.write_text("{}\n")
    with pytest.raises(UserError, match=r"sft\.data=.*talks\.jsonl has changed since .*: restore it, or start"):
        check_started_with(config, run)
    talks.write_text("{}\n{}\n")
    with (Path(str(config.model.path)) / "tokenizer.json").open("a") as file:
        file.write(" ")
    with pytest.raises(UserError, match=r"the tokenizer at .* has changed"):
        check_started_with(config, run)


def test_changed_weights_are_reported_with_equal_size_and_time(config: JobConfig, run: RunDirectory) -> None:
    file = Path(str(config.model.path)) / "model.safetensors"
    before = file.stat()
    save_random_weights(file.parent, seed=2)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    with pytest.raises(UserError, match=r"the content of the model at .*model has changed since .*: restore it"):
        check_started_with(config, run)
    save_random_weights(file.parent, seed=1)
    check_started_with(config, run)


def test_changed_python_files_are_noted_once_and_do_not_end_the_run(config: JobConfig, tmp_path: Path) -> None:
    code, tool, tools = tmp_path / "mine.py", tmp_path / "tool.py", tmp_path / "tools.yaml"
    code.write_text("def score(question, answer, trajectory):\n    return 1.0\n")
    tool.write_text("class Convert: ...\n")
    tools.write_text(f"plugins: [{{name: {tool}:Convert}}]\n")
    config = replace(config, reward=replace(config.reward, kind=f"{code}:score"))
    config = replace(config, sandbox=replace(config.sandbox, file=tools))
    run = choose_run.fresh(config)
    assert check_started_with(config, run) == []
    assert check_started_with(config, run) == []
    code.write_text("def score(question, answer, trajectory):\n    return 0.5\n")
    tool.write_text("class Convert:\n    pass\n")
    notes = check_started_with(config, run)
    assert [note.partition(" has changed since")[0] for note in notes] == [
        f"reward.kind={code}:score",
        f"sandbox.file: plugins[0]={tool}:Convert",
    ]
    run.sandbox_user_file.write_text(tools.read_text())
    tools.unlink()
    assert check_started_with(config, run) == [], "the run's copy names the same files"
