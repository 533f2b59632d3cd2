"""The service's configuration: a YAML file becomes strict, frozen dataclasses; an unknown key is an error."""

from __future__ import annotations

import difflib
import os
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

_STRICT = ConfigDict(extra="forbid")

TOKEN_VARIABLE = "TOOLS_SANDBOX_TOKEN"  # noqa: S105 - a name, not a token
"""Environment variable of the service: the bearer token that callers must have, if any."""

Positive = Annotated[int, Field(gt=0, strict=True)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]


class ConfigError(ValueError):
    """The configuration cannot be used; the message is one line that says what and where."""


@dataclass(frozen=True, config=_STRICT)
class Limits:
    """What one python call may use."""

    time_s: Seconds = 120.0
    """Longest wall-clock time in seconds that a caller can ask for; a longer `timeout_s` is cut to this."""
    cpu_s: Positive = 120
    """CPU time in seconds, of a process (RLIMIT_CPU) and of all of the call together."""
    memory_mb: Positive = 2048
    """Address space of a process in MiB (RLIMIT_AS) beyond what preloaded modules take; where there are control groups
    also the memory of all processes of the call together."""
    file_mb: Positive = 64
    """Largest file a process may write, in MiB (RLIMIT_FSIZE)."""
    disk_mb: Positive = 256
    """Size in MiB of the private /tmp, where there is a mount namespace (the start says so)."""
    processes: Positive = 64
    """Processes and threads of a call (RLIMIT_NPROC, pids control group)."""
    open_files: Positive = 256
    """Open descriptors of a process (RLIMIT_NOFILE)."""
    code_chars: Positive = 200_000
    """Longest code accepted, in characters."""
    output_chars: Positive = 20_000
    """Longest answer in characters; more is cut, with a note that says so."""
    output_mb: Positive = 64
    """Most output in MiB, shown or not; a call that writes more is ended."""
    state_mb: Positive = 64
    """Largest state of a session in MiB: what its names and the files in its working directory take as bytes."""


@dataclass(frozen=True, config=_STRICT)
class PythonConfig:
    """The python tool."""

    preload: tuple[str, ...] = ("numpy", "sympy", "scipy.integrate", "scipy.optimize", "scipy.stats", "pandas")
    """Modules imported once, before the first call: a call finds them already loaded."""
    isolation: Literal["full", "contained", "process", "limits"] = "contained"
    """Refuse to start below this level. Whatever else the machine permits is used as well; the start says what that is.
    full: contained, and control groups bound memory, processes and CPU time of a call as a whole.
    contained: own network, process tree, files and user for each call, and a system call filter.
    process: no namespaces are needed; the filter (no sockets) and Landlock (files).
    limits: resource limits of a process and no more; code can do what the service's user can."""
    cache: Flag = False
    """Keep answers of equal code. Off, since code may read the clock or draw random numbers."""
    session_dir: Path | None = None
    """Folder for the states of sessions, relative to the configuration file; several services may share it. None: the
    python tool has no sessions, every call begins afresh."""
    sessions_mb: Positive = 4096
    """Size in MiB of all states kept there; the least recently used goes first."""


@dataclass(frozen=True, config=_STRICT)
class Source:
    """One file of the search corpus."""

    path: Path
    """File; a relative path is relative to the configuration file."""
    format: Literal["jsonl", "arpo_cache"]
    """jsonl: one object a line, {"title"?, "text"}.
    arpo_cache: one JSON object, query -> "Page 1: ...\\nPage 2: ..."."""


@dataclass(frozen=True, config=_STRICT)
class SearchConfig:
    """The search tool; without sources it is not offered."""

    sources: tuple[Source, ...] = ()
    """Files of the corpus, indexed together."""
    snippet_chars: Positive = 1000
    """Longest snippet of one result in characters; longer documents are cut into passages of at most this length."""
    max_results: Positive = 10
    """Most results of one query, and the number when the caller names none."""


@dataclass(frozen=True, config=_STRICT)
class CacheConfig:
    """The cache of tool answers."""

    entries: Positive = 10_000
    """Answers kept in memory; the least recently used goes first."""
    sqlite_path: Path | None = None
    """SQLite file (WAL) that keeps answers over restarts, relative to the configuration file; none: memory only."""
    sqlite_entries: Positive = 1_000_000
    """Answers kept in that file; the oldest goes first."""


@dataclass(frozen=True, config=_STRICT)
class SandboxConfig:
    """Everything the service can be told."""

    limits: Limits = Limits()
    python: PythonConfig = PythonConfig()
    search: SearchConfig = SearchConfig()
    cache: CacheConfig = CacheConfig()
    max_concurrency: Positive = max(16, 2 * (os.cpu_count() or 1))
    """Executions of one tool at a time; further calls wait, and waiting does not count against their time."""
    queue_s: Seconds = 120.0
    """Longest wait in seconds for a free place; after that the service says 503 and the client asks again."""


def load_config(path: Path | None) -> SandboxConfig:
    """Read a YAML file, or take the defaults if there is none. ConfigError: see its message."""
    if path is None:
        return SandboxConfig()
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    try:
        # `None` is what an empty or fully commented file holds.
        config = TypeAdapter(SandboxConfig).validate_python({} if data is None else data)
    except ValidationError as error:
        raise ConfigError(f"{path}: {_first_problem(error)}") from error
    return _with_absolute_paths(config, path.resolve().parent)


def _with_absolute_paths(config: SandboxConfig, folder: Path) -> SandboxConfig:
    sources = tuple(replace(source, path=folder / source.path) for source in config.search.sources)
    sqlite_path, session_dir = config.cache.sqlite_path, config.python.session_dir
    return replace(
        config,
        python=replace(config.python, session_dir=None if session_dir is None else folder / session_dir),
        search=replace(config.search, sources=sources),
        cache=replace(config.cache, sqlite_path=None if sqlite_path is None else folder / sqlite_path),
    )


def _first_problem(error: ValidationError) -> str:
    """One line for the first complaint; unknown keys first, since a typo also explains what is missing."""
    problems = error.errors(include_url=False)
    problem = next((p for p in problems if p["type"] == "unexpected_keyword_argument"), problems[0])
    where = ".".join(str(part) for part in problem["loc"]) or "top level"
    if problem["type"] != "unexpected_keyword_argument":
        return f"{where}: {problem['msg']} (got {str(problem['input'])[:80]!r})"
    known = _known_keys(problem["loc"][:-1])
    near = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
    return f"unknown key {where!r}; {hint}"


def _known_keys(parents: tuple[int | str, ...]) -> list[str]:
    """Names of the fields of the dataclass that sits at a path such as ("search", "sources", 0)."""
    kind: Any = SandboxConfig
    for part in parents:
        kind = get_args(kind)[0] if isinstance(part, int) else get_type_hints(kind)[part]
    return [field.name for field in fields(kind)] if is_dataclass(kind) else []
