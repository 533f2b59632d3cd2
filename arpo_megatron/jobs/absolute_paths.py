"""Absolute paths of a job's input files: a later command or another node may have another working directory."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from arpo_megatron import registry
from arpo_megatron.config import JobConfig
from arpo_megatron.config.algorithm import AlgorithmConfig


def with_absolute_paths(config: JobConfig) -> JobConfig:
    """Return the config with absolute paths of inputs, of components in files, and of files that parameters name."""

    def absolute(path: Path | None) -> Path | None:
        return None if path is None else path.expanduser().absolute()

    data = config.data.with_paths(lambda path: path.expanduser().absolute())
    data = replace(data, search_cache=absolute(data.search_cache))
    data = replace(data, reader=_absolute_component(data.reader))
    model, sft = replace(config.model, path=absolute(config.model.path)), config.sft
    reward = replace(config.reward, kind=_absolute_component(config.reward.kind))
    rollout = config.rollout
    rollout = replace(
        rollout,
        protocol=_absolute_component(rollout.protocol),
        environment=None if rollout.environment is None else _absolute_component(rollout.environment),
        environment_params=_with_absolute_files(rollout.environment_params),
        system_prompt=None if rollout.system_prompt is None else _absolute_file(rollout.system_prompt),
    )
    sft, sandbox = replace(sft, data=absolute(sft.data)), replace(config.sandbox, file=absolute(config.sandbox.file))
    return replace(
        config,
        data=data,
        model=model,
        algorithm=_algorithm_with_absolute_paths(config.algorithm),
        sft=sft,
        reward=reward,
        rollout=rollout,
        sandbox=sandbox,
    )


def _algorithm_with_absolute_paths(config: AlgorithmConfig) -> AlgorithmConfig:
    return replace(
        config,
        selector=_absolute_component(config.selector),
        branching=_absolute_component(config.branching),
        advantage=_absolute_component(config.advantage),
        loss=_absolute_component(config.loss),
        replay=None if config.replay is None else _absolute_component(config.replay),
        params=_with_absolute_files(config.params),
    )


def _absolute_component(name: str) -> str:
    """Return `FILE.py:ATTRIBUTE` with an absolute path, and any other name as it is."""
    if (found := registry.in_file(name)) is None:
        return name
    return f"{found[0].expanduser().absolute()}:{found[1]}"


def _with_absolute_files(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters of components; those that name a file get its absolute path."""
    return {name: _absolute_file(value) if isinstance(value, str) else value for name, value in params.items()}


def _absolute_file(name: str) -> str:
    """Return the absolute path of a file, and any other name as it is."""
    path = Path(name).expanduser()
    try:
        return str(path.absolute()) if path.is_file() else name
    except OSError:  # a text too long to be a name
        return name
