"""Fingerprint of a run's inputs, so that a resume notices files that changed.

The config has the paths of files. `inputs.json` has their content: the model's spec, digests of its tokenizer, of data
and of the user's Python files, and a digest of samples of its weights.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.jobs.run_directory import RunDirectory, start_model
from arpo_megatron.jobs.tool_file import read_tool_file
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.registry import in_file
from arpo_megatron.utils.atomic import read_json, write_json


def check_started_with(config: JobConfig, run: RunDirectory) -> list[str]:
    """Record the inputs of a new run, or check that those of an existing run have not changed.

    A changed Python file of the user is no error: the run may have stopped at the fault that the change corrects.

    Returns:
        Notes for the user, one for each changed Python file. The new content is recorded.

    Raises:
        UserError: the model, its tokenizer or a data file differs from the one at the start of the run.
    """
    found, code = _digests(config, run), {name: _digest(path) for name, path in _code(config, run).items()}
    if not run.inputs.exists():
        write_json(run.inputs, {"model": _spec(config, run), **found, **code})
        return []
    check_model(config, run)
    recorded = read_json(run.inputs, _DAMAGED)
    for name, value in found.items():
        if value != recorded.get(name, value):
            what = f"{_NAMES[name]} at {_model(config, run)}" if name in _NAMES else name
            raise UserError(f"{what} has changed since {run.path} was started: {_FIX}")
    changed = [name for name, value in code.items() if value != recorded.get(name, value)]
    if changed:
        write_json(run.inputs, {**recorded, **code})
    return [f"{name} has changed since the run last started: earlier steps ran with other code" for name in changed]


def check_model(config: JobConfig, run: RunDirectory) -> None:
    """Check that the model has the spec that it had at the start of the run. Raises UserError if it differs."""
    if not run.inputs.exists():
        return
    recorded = read_json(run.inputs, _DAMAGED)["model"]
    for name, value in _spec(config, run).items():
        if value != recorded.get(name):
            raise UserError(
                f"the model at {_model(config, run)} has changed since {run.path} was started ({name} was "
                f"{recorded.get(name)}, now {value}): {_FIX}"
            )


_NAMES = {"tokenizer": "the tokenizer", "weights": "the content of the model"}
_DAMAGED = "delete it if the inputs are those of the run's start; --resume writes it again"
_FIX = "restore it, or start a new run"


def _model(config: JobConfig, run: RunDirectory) -> Path:
    return start_model(config, run, "sft")


def _spec(config: JobConfig, run: RunDirectory) -> dict[str, Any]:
    return asdict(ModelSpec.from_hf(_model(config, run)))


def _digests(config: JobConfig, run: RunDirectory) -> dict[str, str | None]:
    from arpo_megatron.models.safetensors import TensorFiles

    with TensorFiles(_model(config, run)) as weights:
        sampled = weights.sampled_digest()
    files = {
        "tokenizer": _model(config, run) / "tokenizer.json",
        **{f"sft.data={path}": path for path in (config.sft.data,) if path is not None},
        **{f"data.path={path}": path for path, _ in config.data.sources},
    }
    whole = {name: _digest(path) for name, path in files.items()}
    return {**whole, "weights": sampled}


def _code(config: JobConfig, run: RunDirectory) -> dict[str, Path]:
    """Return the Python files that a config names as `FILE.py:ATTRIBUTE`, by key and name; tools of its file, too."""
    named = dict(_texts(asdict(config)))
    if config.sandbox.file is not None:
        plugins = read_tool_file(config.sandbox.file, config.sandbox, run).get("plugins") or []
        named |= {f"sandbox.file: plugins[{number}]": str(each["name"]) for number, each in enumerate(plugins)}
    places = {f"{key}={name}": in_file(name) for key, name in named.items()}
    return {key: place[0] for key, place in places.items() if place is not None}


def _texts(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the texts in nested values with their dotted keys."""
    for key, value in values.items():
        if isinstance(value, str):
            yield prefix + key, value
        elif isinstance(value, Mapping):
            yield from _texts(value, f"{prefix}{key}.")


def _digest(path: Path) -> str | None:
    """Return the digest of a file, or of the files of a directory; None if there is nothing."""
    if path.is_dir():
        parts = (f"{file.relative_to(path)} {_digest(file)}" for file in sorted(path.rglob("*")) if file.is_file())
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
