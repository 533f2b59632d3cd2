"""Paths of a config on the nodes and in the container, where a mount's two sides differ (`mounts` in the profile).

The config of a submitted run has the paths of the container, which its processes read.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from arpo_megatron.cluster.profile import ClusterProfile
from arpo_megatron.config import JobConfig


def in_container(config: JobConfig, profile: ClusterProfile) -> JobConfig:
    """Return the config with the paths that the job's processes see."""
    return _mapped(config, _sides(profile))


def on_host(config: JobConfig, profile: ClusterProfile) -> JobConfig:
    """Return the config with the paths outside the container."""
    return _mapped(config, [(inside, outside) for outside, inside in _sides(profile)])


def inputs_of(config: JobConfig) -> dict[str, Path]:
    """Return the files and directories that the config names, by key."""
    paths = {
        "model.path": config.model.path,
        "data.search_cache": config.data.search_cache,
        "sft.data": config.sft.data,
        "sandbox.file": config.sandbox.file,
    }
    named = {key: path for key, path in paths.items() if path is not None}
    questions = [path for path, _ in config.data.sources]
    keys = ["data.path"] if len(questions) == 1 else [f"data.path ({path})" for path in questions]
    return {**named, **dict(zip(keys, questions, strict=True))}


def outside_of_mounts(config: JobConfig, profile: ClusterProfile) -> list[str]:
    """Return the keys whose paths, on the host, the container does not see."""
    if profile.container is None:
        return []
    roots = [outside for outside, _ in _sides(profile)]
    return [key for key, path in inputs_of(config).items() if not any(path.is_relative_to(root) for root in roots)]


def _sides(profile: ClusterProfile) -> list[tuple[Path, Path]]:
    """Return host and container side of each mount, the deepest host side first."""
    if profile.container is None:
        return []
    pairs = [mount.split(":")[:2] for mount in profile.mounts]
    return sorted(((Path(a), Path(b)) for a, b in pairs), key=lambda pair: -len(pair[0].parts))


def _mapped(config: JobConfig, sides: Sequence[tuple[Path, Path]]) -> JobConfig:
    def moved(path: Path) -> Path:
        for before, after in sides:
            # A path that is under the other side already came from a submitted run.
            if path.is_relative_to(before) and not (before != after and path.is_relative_to(after)):
                return after / path.relative_to(before)
        return path

    def mapped(path: Path | None) -> Path | None:
        return None if path is None else moved(path)

    return replace(
        config,
        model=replace(config.model, path=mapped(config.model.path)),
        data=replace(config.data.with_paths(moved), search_cache=mapped(config.data.search_cache)),
        sft=replace(config.sft, data=mapped(config.sft.data)),
        sandbox=replace(config.sandbox, file=mapped(config.sandbox.file)),
    )
