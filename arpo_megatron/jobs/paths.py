"""The paths in a config, listed once: they are made absolute, mapped into a container, or mounted there.

A later command or another node may have another working directory, so a job's config has absolute paths.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from arpo_megatron import registry
from arpo_megatron.config import JobConfig

PATHS = ("model.path", "data.search_cache", "sft.data", "sandbox.file", "reward.judge.cache", "sync.directory")
"""Keys with the path of a file or directory. (`data.path` may have several, and `run_dir` is the job's own.)"""
COMPONENTS = (
    *("data.reader", "reward.kind", "rollout.protocol", "rollout.environment", "algorithm.selector"),
    *("algorithm.branching", "algorithm.advantage", "algorithm.loss", "algorithm.replay"),
)
"""Keys with the name of a component, which may be `FILE.py:ATTRIBUTE`."""
_PARAMS = ("algorithm.params", "rollout.environment_params")
"""Keys with parameters, whose texts may name files."""


def paths_of(config: JobConfig) -> dict[str, Path]:
    """Return the files and directories of `PATHS` and `data.path`, by key."""
    named = {key: path for key in PATHS if (path := attrgetter(key)(config)) is not None}
    questions = [path for path, _ in config.data.sources]
    keys = ["data.path"] if len(questions) == 1 else [f"data.path ({path})" for path in questions]
    return {**named, **dict(zip(keys, questions, strict=True))}


def with_paths(config: JobConfig, change: Callable[[Path], Path]) -> JobConfig:
    """Return the config with each of `paths_of` changed."""
    config = replace(config, data=config.data.with_paths(change))
    return _changed(config, PATHS, lambda path: None if path is None else change(path))


def files_of(config: JobConfig) -> dict[str, Path]:
    """Return the Python files of components, and the files that parameters and the system prompt name, by key."""
    named = {key: registry.in_file(attrgetter(key)(config) or "") for key in COMPONENTS}
    texts = {f"{key}.{name}": text for key in _PARAMS for name, text in attrgetter(key)(config).items()}
    texts["rollout.system_prompt"] = config.rollout.system_prompt
    files = {key: _file(text) for key, text in texts.items() if isinstance(text, str)}
    return {
        **{key: place[0] for key, place in named.items() if place is not None},
        **{key: path for key, path in files.items() if path is not None},
    }


def with_absolute_paths(config: JobConfig) -> JobConfig:
    """Return the config with absolute paths in all of `paths_of` and `files_of`."""
    config = with_paths(config, _absolute)
    config = _changed(config, COMPONENTS, _absolute_component)
    config = _changed(config, _PARAMS, lambda params: {name: _absolute_text(value) for name, value in params.items()})
    return _changed(config, ["rollout.system_prompt"], _absolute_text)


def _changed(config: JobConfig, keys: Sequence[str], change: Callable[[Any], Any]) -> JobConfig:
    for key in keys:
        config = _with_value(config, key.split("."), change(attrgetter(key)(config)))
    return config


def _with_value(section: Any, names: Sequence[str], value: object) -> Any:
    first, *rest = names
    return replace(section, **{first: _with_value(getattr(section, first), rest, value) if rest else value})


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


def _absolute_component(name: str | None) -> str | None:
    """Return `FILE.py:ATTRIBUTE` with an absolute path, and any other name as it is."""
    if name is None or (found := registry.in_file(name)) is None:
        return name
    return f"{_absolute(found[0])}:{found[1]}"


def _absolute_text(value: object) -> object:
    """Return the absolute path of a file, and any other value as it is."""
    path = _file(value) if isinstance(value, str) else None
    return value if path is None else str(path)


def _file(text: str) -> Path | None:
    """Return the absolute path if the text names a file here."""
    try:
        return _absolute(path) if (path := Path(text).expanduser()).is_file() else None
    except OSError:  # a text too long to be a name
        return None
