"""Where an evaluation writes, so that the same one goes on after a kill and another never mixes with it."""

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
from arpo_megatron.utils.atomic import write_json

IDENTITY = "evaluation.json"
"""What is evaluated, on what and how; whoever finds the same goes on."""

Identity = Mapping[str, Any]


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
    """All that the attempts depend on, JSON-safe. Reads samples of the model's weights."""
    values = dump_config(config)
    used = ("seed", "evaluation", "rollout", "reward", "data", "sandbox")
    return {
        "subject": target.url or str((target.model or Path(target.name)).resolve()),
        "model": _digest(target) if target.model is not None else target.name,
        "suite": suite,
        "files": {each.benchmark.name: each.sha256 for each in sets},
        "tools": tools.value,
        "tasks": tasks,
        "attempts": attempts,
        "system_prompt": None if system is None else hashlib.sha256(system.encode()).hexdigest(),
        "max_length": config.model.max_length,
        "judge": values["reward"].pop("judge")["model"],  # at whatever address
        "config": {name: values[name] for name in used},
    }


def open_output(identity: Identity, *, out: Path | None, target: EvalTarget) -> RunDirectory:
    """The directory of an evaluation: `out`, or the first of its series that holds the same or nothing yet.

    Raises:
        UserError: `out` holds another evaluation, or files of something else.
    """
    if out is not None:
        if found := _difference(out, identity):
            raise UserError(f"--out {out} holds {found}; name another directory")
        return _made(out, identity)
    base = _default(identity, target)
    number = 1
    while _difference(path := base if number == 1 else base.with_name(f"{base.name}-{number}"), identity):
        number += 1
    return _made(path, identity)


def _made(path: Path, identity: Identity) -> RunDirectory:
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
    """What makes the content of a directory another evaluation; empty where it is this one, or there is none."""
    if not (path / IDENTITY).is_file():
        return "files of something else" if path.is_dir() and any(path.iterdir()) else ""
    found = json.loads((path / IDENTITY).read_text(encoding="utf-8"))
    wanted = json.loads(json.dumps(identity))
    for name, value in wanted.items():
        if found.get(name) != value:
            return f"an evaluation with another {name.replace('_', ' ')} ({_differing(found.get(name), value)})"
    return ""


def _differing(there: Any, here: Any, name: str = "") -> str:
    """The values that differ, by dotted key where they are in a section; the first few of many."""
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
