"""What a run was started with, so that a resume notices what has changed under its config, and a replay a stranger.

The config names files; `inputs.json` holds what was in them: the model's shape, a digest of samples of its weights, and
digests of tokenizer and data.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.jobs.run_directory import RunDirectory, fixed_part, start_model
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.utils.atomic import write_json


def check_started_with(config: JobConfig, run: RunDirectory) -> None:
    """Record what a fresh run starts with; refuse to go on with one where that has changed.

    Raises:
        UserError: the model, its tokenizer or a data file is another one than when the run was started.
    """
    found = _digests(config, run)
    if not run.inputs.exists():
        write_json(run.inputs, {"model": _shape(config, run), **found})
        return
    check_model(config, run)
    recorded = json.loads(run.inputs.read_text(encoding="utf-8"))
    for name, value in found.items():
        if value != recorded.get(name, value):  # a run of an older version has not recorded all of them
            path = {"sft.data": config.sft.data, "data.path": config.data.path}.get(name)
            what = f"{_NAMES[name]} at {_model(config, run)}" if path is None else f"{name}={path}"
            raise UserError(f"{what} has changed since {run.path} was started: {_MEND}")


def check_model(config: JobConfig, run: RunDirectory) -> None:
    """Raises UserError where the model that a run was started with has another shape by now."""
    if not run.inputs.exists():
        return
    recorded = json.loads(run.inputs.read_text(encoding="utf-8"))["model"]
    for name, value in _shape(config, run).items():
        if value != recorded.get(name):
            raise UserError(
                f"the model at {_model(config, run)} has changed since {run.path} was started ({name} was "
                f"{recorded.get(name)}, now {value}): {_MEND}"
            )


def fingerprint(config: JobConfig, spec: ModelSpec) -> dict[str, str]:
    """Of the model's shape, and of what a resumed run may not change in its config."""
    return {"model": _digest_of(asdict(spec)), "config": _digest_of(fixed_part(config))}


_NAMES = {"tokenizer": "the tokenizer", "weights": "the content of the model"}
_MEND = "put the old one back, or start a new run"


def _model(config: JobConfig, run: RunDirectory) -> Path:
    return start_model(config, run, "sft")


def _shape(config: JobConfig, run: RunDirectory) -> dict[str, Any]:
    return asdict(ModelSpec.from_hf(_model(config, run)))


def _digests(config: JobConfig, run: RunDirectory) -> dict[str, str | None]:
    from arpo_megatron.models.safetensors import TensorFiles

    with TensorFiles(_model(config, run)) as weights:
        sampled = weights.sampled_digest()
    files = {
        "tokenizer": _model(config, run) / "tokenizer.json",
        "sft.data": config.sft.data,
        "data.path": config.data.path,
    }
    whole = {name: None if path is None or not path.is_file() else _digest(path) for name, path in files.items()}
    return {**whole, "weights": sampled}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()
