"""Choose the run directory of a config: create a fresh one, or find the run to resume."""

import re
from contextlib import suppress
from pathlib import Path

from arpo_megatron.config import JobConfig
from arpo_megatron.config.io import dump_config, save_config
from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.run_directory import PRIVATE, RUNS, SUBMIT_LOCK, RunDirectory

CHANGEABLE = (
    "run_dir",
    "train.steps",
    "train.save_every",
    "train.keep_checkpoints",
    "train.keep_every",
    "train.keep_best",
    "parallel",
    "optimizer.offload",
    "optimizer.offload_fraction",
    "engine",
    "sync",
    "monitor",
    "sandbox.urls",
    "rollout.journal_every_s",
)
"""Config keys and sections that a resumed run may change: a longer run, another machine, another layout (checkpoints
can be loaded in any). `run_dir` is among them because a directory can have several paths."""
REUSABLE = frozenset({"initial_model", "sft", ".lock", SUBMIT_LOCK})
"""Entries that a fresh run may find in its directory. It reuses the initial model and the cold start."""


def fresh(config: JobConfig) -> RunDirectory:
    """Create a run directory with the config: `run_dir`, or the next free runs/NAME-ALGORITHM-seedN[-K].

    Raises:
        UserError: `run_dir` already holds a run, or cannot be written.
    """
    try:
        check_fresh(config)
        path = config.run_dir or _chosen(config)
        path.mkdir(PRIVATE, parents=True, exist_ok=True)
        run = RunDirectory(path)
        save_config(config, run.config)
    except OSError as error:
        raise UserError(f"cannot create the run directory {next_path(config)}: {error.strerror}") from None
    return run


def _chosen(config: JobConfig) -> Path:
    """Create the next free directory. If several commands choose the same path, one can create it."""
    while True:
        path = next_path(config)
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.mkdir(mode=PRIVATE)
            return path


def check_fresh(config: JobConfig) -> None:
    """Raise UserError if `run_dir` holds a run or other files."""
    if (path := config.run_dir) is None:
        return
    if (path / "config.yaml").exists():
        raise UserError(
            f"{path} already holds a run: continue it (--resume, or arpo resume if submitted), or set another run_dir"
        )
    others = sorted({item.name for item in path.iterdir()} - REUSABLE) if path.is_dir() else []
    if others:
        raise UserError(f"run_dir={path} holds other files ({others[0]}, ...): set a new directory")


def next_path(config: JobConfig, base: Path = RUNS) -> Path:
    """Return the path of a fresh run of this config: `run_dir`, or the next free one in `base`."""
    return config.run_dir or _next_free(_default(config, base))


def existing(config: JobConfig, base: Path = RUNS) -> RunDirectory:
    """Return the newest run directory of this config, whose `CHANGEABLE` values may differ.

    Raises:
        UserError: there is none; the message has the first key that differs from the newest run of its name.
    """
    place = config.run_dir or _default(config, base)
    paths = [place] if config.run_dir else [path for _, path in reversed(_series(place))]
    runs = [RunDirectory(path) for path in paths if (path / "config.yaml").exists()]
    if not runs:
        raise UserError(f"nothing to resume at {place}: there is no run. Start one, or set run_dir to an existing run")
    differences = []
    for run in runs:
        difference = _difference(fixed_part(resolve.read(run.config)), fixed_part(config))
        if not difference:
            return run
        differences.append(difference)
    raise UserError(
        f"{runs[0].path} was started with another config: {differences[0]}. Use the same overrides, name another run "
        "with run_dir=, or start a new run"
    )


def _default(config: JobConfig, base: Path) -> Path:
    return base / f"{config.name}-{config.algorithm.name}-seed{config.seed}"


def _series(base: Path) -> list[tuple[int, Path]]:
    """Return number and path of NAME, NAME-2, ... in order."""
    found = []
    for path in base.parent.glob(f"{base.name}*"):
        if match := re.fullmatch(rf"{re.escape(base.name)}(?:-(\d+))?", path.name):
            found.append((int(match[1] or 1), path))
    return sorted(found)


def _next_free(base: Path) -> Path:
    series = _series(base)
    return base.with_name(f"{base.name}-{series[-1][0] + 1}") if series else base


def fixed_part(config: JobConfig) -> resolve.Tree:
    """Return the config values that a run cannot change: all but `CHANGEABLE`."""
    return _without_changeable(dump_config(config))


def _without_changeable(values: resolve.Tree, prefix: str = "") -> resolve.Tree:
    return {
        key: _without_changeable(value, f"{prefix}{key}.") if isinstance(value, dict) else value
        for key, value in values.items()
        if prefix + key not in CHANGEABLE
    }


def _difference(old: resolve.Tree, new: resolve.Tree, prefix: str = "") -> str:
    for key in new:
        if isinstance(new[key], dict) and isinstance(old.get(key), dict):
            if inner := _difference(old[key], new[key], f"{prefix}{key}."):
                return inner
        elif old.get(key) != new[key]:
            return f"{prefix}{key} was {old.get(key)!r}, now {new[key]!r}"
    return ""
