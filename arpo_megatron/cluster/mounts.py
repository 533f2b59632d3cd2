"""Paths of a config on the nodes and in the container, where a mount's two sides differ (`mounts` in the profile).

The config of a submitted run has the paths of the container, which its processes read. Files of components, and files
that parameters name, are mounted at their own paths: the supervisor reads them outside the container.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from arpo_megatron.cluster.profile import ClusterProfile
from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.jobs.paths import files_of, paths_of, with_paths


def in_container(config: JobConfig, profile: ClusterProfile) -> JobConfig:
    """Return the config with the paths that the job's processes see."""
    return _mapped(config, _sides(profile))


def on_host(config: JobConfig, profile: ClusterProfile) -> JobConfig:
    """Return the config with the paths outside the container."""
    return _mapped(config, [(inside, outside) for outside, inside in _sides(profile)])


def with_files_mounted(config: JobConfig, profile: ClusterProfile) -> ClusterProfile:
    """Return the profile with a mount of each of `files_of` that the container does not show at the same path.

    Raises:
        UserError: the name of a file has a separator of mounts in it.
    """
    if profile.container is None:
        return profile
    sides = _sides(profile)
    hidden = [path for path in dict.fromkeys(files_of(config).values()) if not _is_shown(path, sides)]
    if odd := [path for path in hidden if set(str(path)) & set(",:")]:
        raise UserError(f"{odd[0]} cannot be mounted in the container: rename it without ',' and ':'")
    return replace(profile, mounts=(*profile.mounts, *(f"{path}:{path}" for path in hidden)))


def outside_of_mounts(config: JobConfig, profile: ClusterProfile) -> dict[str, Path]:
    """Return the paths on the host that the container does not see, by key."""
    if profile.container is None:
        return {}
    roots = [outside for outside, _ in _sides(profile)] + ([config.run_dir] if config.run_dir else [])
    return {key: path for key, path in paths_of(config).items() if not any(map(path.is_relative_to, roots))}


def _is_shown(path: Path, sides: Sequence[tuple[Path, Path]]) -> bool:
    """Return whether the innermost mount at this path of the container has the file of this path of the host."""
    over = [(outside, inside) for outside, inside in sides if path.is_relative_to(inside)]
    outside, inside = max(over, key=lambda pair: len(pair[1].parts), default=(None, None))
    return outside is not None and outside == inside


def _sides(profile: ClusterProfile) -> list[tuple[Path, Path]]:
    """Return host and container side of each mount."""
    if profile.container is None:
        return []
    pairs = [mount.split(":")[:2] for mount in profile.mounts]
    return [(Path(outside), Path(inside)) for outside, inside in pairs]


def _mapped(config: JobConfig, sides: Sequence[tuple[Path, Path]]) -> JobConfig:
    def moved(path: Path) -> Path:
        for before, after in sorted(sides, key=lambda pair: -len(pair[0].parts)):
            # A path that is under the other side already came from a submitted run.
            if path.is_relative_to(before) and not (before != after and path.is_relative_to(after)):
                return after / path.relative_to(before)
        return path

    return with_paths(config, moved)
