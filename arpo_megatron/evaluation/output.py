"""Output directory of an evaluation: the same evaluation resumes in it, and another one never mixes with it."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arpo_megatron.config import JobConfig
from arpo_megatron.config.io import dump_config
from arpo_megatron.errors import UserError
from arpo_megatron.evaluation.prompts import Tools
from arpo_megatron.evaluation.questions import TestSet
from arpo_megatron.evaluation.target import EvalTarget
from arpo_megatron.jobs.run_directory import RUNS, RunDirectory
from arpo_megatron.utils.atomic import read_json, write_json

IDENTITY = "evaluation.json"
"""File with the identity of the evaluation; the same identity resumes."""

Identity = Mapping[str, Any]
"""Everything that the attempts depend on, JSON-safe."""


def eval_identity(
    target: EvalTarget,
    config: JobConfig,
    sets: list[TestSet],
    *,
    suite: str,
    tools: Tools,
    tasks: int | None,
    attempts: int,
    system: str | None,
) -> Identity:
    """Return the identity of an evaluation. Reads samples of the model's weights."""
    values = dump_config(config)
    used = ("seed", "evaluation", "rollout", "reward", "data", "sandbox")
    return {
        "subject": target.url or str((target.model or Path(target.name)).resolve()),
        "model": _digest(target) if target.model is not None else target.name,
        "suite": suite,
        "judged": [each.benchmark.name for each in sets if each.benchmark.metric == "judge"],
        "files": {each.benchmark.name: each.sha256 for each in sets},
        "tools": tools.value,
        "tasks": tasks,
        "attempts": attempts,
        "system_prompt": None if system is None else hashlib.sha256(system.encode()).hexdigest(),
        "max_length": config.model.max_length,
        "judge": values["reward"].pop("judge")["model"],  # its address may change
        "config": {name: values[name] for name in used},
    }


def find_output(identity: Identity, *, out: Path | None, target: EvalTarget) -> Path:
    """Return the directory of an evaluation: `out`, or the first of its series that is empty or has the same identity.

    Raises:
        UserError: `out` contains another evaluation or other files.
    """
    if out is not None:
        if found := _difference(out, identity):
            raise UserError(f"--out {out} contains {found}; name another directory")
        return out
    base = _default(identity, target)
    number = 1
    while _difference(path := base if number == 1 else base.with_name(f"{base.name}-{number}"), identity):
        number += 1
    return path


def create_output(path: Path, identity: Identity) -> RunDirectory:
    """Create the directory of an evaluation unless it exists. Raises UserError if it cannot be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not (path / IDENTITY).exists():
            write_json(path / IDENTITY, identity)
    except OSError as error:
        raise UserError(f"cannot write to {path}: {error.strerror or error}; name a directory with --out") from None
    return RunDirectory(path)


def _default(identity: Identity, target: EvalTarget) -> Path:
    kind = re.sub(r"[^\w.-]+", "_", f"{identity['suite']}-{identity['tools']}")
    if target.run is not None:
        return target.run.path / "evaluation" / kind
    name = re.sub(r"[^\w.-]+", "_", target.name)
    return RUNS / "evaluation" / name / kind


def _difference(path: Path, identity: Identity) -> str:
    """Describe how a directory differs from this evaluation; empty if it is the same one, or empty."""
    if not (path / IDENTITY).is_file():
        return "other files" if path.is_dir() and any(path.iterdir()) else ""
    found = read_json(path / IDENTITY, "delete it if the directory is this evaluation's, or name another with --out")
    for name, value in json.loads(json.dumps(identity)).items():
        if found.get(name) != value:
            return f"an evaluation with another {name.replace('_', ' ')} ({_differing(found.get(name), value)})"
    return ""


def _differing(there: Any, here: Any, name: str = "") -> str:
    """List the values that differ, by dotted key in sections: the first three."""
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        keys = [key for key in sorted({*there, *here}) if there.get(key) != here.get(key)]
        found = [_differing(there.get(key), here.get(key), f"{name}.{key}" if name else key) for key in keys[:3]]
        return ", ".join(found) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
    return f"{name} {there}, not {here}".strip()


def _digest(target: EvalTarget) -> str:
    from arpo_megatron.models.safetensors import TensorFiles

    assert target.model is not None
    with TensorFiles(target.model) as weights:
        return weights.sampled_digest()
