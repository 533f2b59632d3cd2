"""The service's configuration: a YAML file becomes strict, frozen dataclasses; an unknown key is an error."""

from __future__ import annotations

import difflib
import os
from dataclasses import field, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

_STRICT = ConfigDict(extra="forbid")

TOKEN_VARIABLE = "TOOLS_SANDBOX_TOKEN"  # noqa: S105 - a name, not a token
"""Environment variable of the service: the bearer token that callers must have, if any."""

Positive = Annotated[int, Field(gt=0, strict=True)]
NotNegative = Annotated[int, Field(ge=0, strict=True)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Mebibytes = Annotated[int, Field(gt=0, le=1 << 24, strict=True)]
"""Up to 16 TiB, which the kernel takes wherever it takes a size."""
Flag = Annotated[bool, Field(strict=True)]


class ConfigError(ValueError):
    """The configuration cannot be used; the message is one line that says what and where."""


@dataclass(frozen=True, config=_STRICT)
class Limits:
    """What one python call may use."""

    time_s: Annotated[Seconds, Field(le=1e6)] = 120.0
    """Longest wall-clock time of a call of any tool in seconds; a longer `timeout_s` is cut to this."""
    cpu_s: Annotated[Positive, Field(le=1_000_000)] = 120
    """CPU time in seconds, of a process (RLIMIT_CPU) and of all of the call together."""
    memory_mb: Annotated[Mebibytes, Field(ge=16)] = 2048
    """Address space of a process in MiB (RLIMIT_AS) beyond what preloaded modules take; where there are control groups
    also the memory of all processes of the call together."""
    file_mb: Mebibytes = 64
    """Largest file a process may write, in MiB (RLIMIT_FSIZE)."""
    disk_mb: Mebibytes = 256
    """Size in MiB of the private /tmp, where there is a mount namespace (the start says so)."""
    processes: Annotated[Positive, Field(le=1 << 20)] = 64
    """Processes and threads of a call (RLIMIT_NPROC, pids control group)."""
    open_files: Annotated[Positive, Field(ge=16, le=1 << 20)] = 256
    """Open descriptors of a process (RLIMIT_NOFILE)."""
    code_chars: Positive = 200_000
    """Longest code accepted, in characters."""
    output_chars: Positive = 20_000
    """Longest answer in characters; more is cut, with a note that says so."""
    output_mb: Mebibytes = 64
    """Most output in MiB, shown or not; a call that writes more is ended."""
    state_mb: Annotated[Mebibytes, Field(le=1 << 12)] = 64
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
    ahead: Annotated[NotNegative, Field(le=64)] = 2
    """So many processes wait behind all walls for the next calls, which then begin at once; each is used for one call
    and costs some MiB. Where calls are not counted and hidden from each other by the kernel there are none."""
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
    format: Literal["jsonl", "parquet", "arpo_cache"]
    """jsonl: one object a line, {"title"?, "text"}. parquet: columns of these names.
    arpo_cache: one JSON object, query -> "Page 1: ...\\nPage 2: ..."."""


@dataclass(frozen=True, config=_STRICT)
class DenseConfig:
    """A dense retriever behind HTTP: POST {"queries": [...], "topk": k} -> {"result": [[{"document": {...}}]]}."""

    url: str
    """The whole address of its endpoint, e.g. http://retriever:8000/retrieve."""
    timeout_s: Seconds = 20.0
    """One attempt may take this long."""
    retries: NotNegative = 3
    """Attempts after the first that failed, with pauses that double."""


@dataclass(frozen=True, config=_STRICT)
class WebConfig:
    """A web search engine."""

    provider: Literal["serper", "brave", "searxng"]
    """Which engine's request and answer format is spoken."""
    url: str | None = None
    """Its endpoint; none: the provider's public one (searxng has none)."""
    key_variable: str | None = None
    """Environment variable that holds the key; serper and brave need one. The key itself stands in no file."""
    requests_per_s: Rate = 5.0
    """Most requests a second that this service sends, retries included."""
    timeout_s: Seconds = 20.0
    """One attempt may take this long."""
    retries: NotNegative = 3
    """Attempts after the first that failed (HTTP 429, 5xx, no connection), with pauses that double."""


@dataclass(frozen=True, config=_STRICT)
class SearchConfig:
    """The search tool; without sources and with engine "local" it is not offered."""

    engine: Literal["local", "dense", "web"] = "local"
    """What answers a query that no arpo_cache source remembers: BM25 over the sources, `dense` or `web`."""
    sources: tuple[Source, ...] = ()
    """Files of the corpus, indexed together. Beside another engine than "local", arpo_cache files only."""
    index_path: Path | None = None
    """Folder that keeps the index, relative to the configuration file: built once, by the first service that finds it
    missing or out of date. None: built at every start, in a temporary folder."""
    dense: DenseConfig | None = None
    """For engine "dense"."""
    web: WebConfig | None = None
    """For engine "web"."""
    snippet_chars: Positive = 1000
    """Longest snippet of one result in characters; longer documents are cut into passages of at most this length."""
    max_results: Positive = 10
    """Most results of one query, and the number when the caller names none."""


@dataclass(frozen=True, config=_STRICT)
class SummaryConfig:
    """Pages are summarised by a model behind an OpenAI-compatible endpoint before they are returned."""

    url: str
    """Base address, e.g. http://127.0.0.1:30000/v1."""
    model: str
    """Its name there."""
    key_variable: str | None = None
    """Environment variable that holds the key, if it needs one."""
    max_tokens: Positive = 512
    """Longest summary in tokens."""
    timeout_s: Seconds = 60.0
    """The request may take this long; a page whose summary fails is returned as it is, with a note."""


@dataclass(frozen=True, config=_STRICT)
class BrowseConfig:
    """The browse tool: it lets a model read the public web, so it is offered only where this says so."""

    enabled: Flag = False
    """Offer the tool."""
    allow_networks: tuple[str, ...] = ()
    """Networks in CIDR notation that may be read although they are not public, e.g. an intranet's mirror."""
    deny_networks: tuple[str, ...] = ()
    """Networks that may not be read although they are public, e.g. a cluster's own. This machine's never may."""
    max_bytes: Positive = 5_000_000
    """Bytes of a body that are read, on the wire and after decompression each; the rest is cut, with a note."""
    parse_mb: Positive = 1024
    """Memory in MiB that turning a page into text may take; each page has a process of its own for it. A page that
    needs more is answered with an error."""
    max_chars: Positive = 20_000
    """Longest answer in characters."""
    max_redirects: NotNegative = 5
    """Redirects followed; each target is checked like the first address."""
    timeout_s: Seconds = 30.0
    """Longest wall-clock time of one call in seconds, also if the caller allows more."""
    robots: Flag = False
    """Ask a site's robots.txt first and honour it."""
    user_agent: str = "arpo-tools-sandbox/1.0"
    """What the tool calls itself."""
    summary: SummaryConfig | None = None
    """Summarise pages by a model; none: return their text."""


@dataclass(frozen=True, config=_STRICT)
class McpServerConfig:
    """An MCP server (Model Context Protocol) that the service starts and speaks to over stdio."""

    command: str
    """Program; a name is looked up in PATH."""
    args: tuple[str, ...] = ()
    """Its arguments."""
    env: dict[str, str] = field(default_factory=dict)
    """Added to the few variables it gets (HOME, LOGNAME, PATH, SHELL, TERM, USER); the service's own stay here."""
    tools: tuple[str, ...] | None = None
    """Which of its tools are offered; none: all."""
    cache: Flag = False
    """Keep answers of equal calls: only for servers that merely read."""
    max_chars: Positive = 20_000
    """Longest answer in characters; more is cut, with a note that says so."""


@dataclass(frozen=True, config=_STRICT)
class PluginConfig:
    """One tool of an installed package, named by its entry point in the group `tools_sandbox.tool`."""

    name: str
    """Name of the entry point."""
    options: dict[str, Any] = field(default_factory=dict)
    """Given to the tool's class as keyword arguments."""


@dataclass(frozen=True, config=_STRICT)
class CacheConfig:
    """The cache of tool answers."""

    entries: Positive = 10_000
    """Answers kept in memory; the least recently used goes first."""
    memory_mb: Positive = 256
    """Size of their texts in MiB; likewise."""
    sqlite_path: Path | None = None
    """SQLite file (WAL) that keeps answers over restarts, relative to the configuration file; services of one machine
    may share it, and read what another has found (equal calls at the same time each execute). None: memory only."""
    sqlite_entries: Positive = 1_000_000
    """Answers kept in that file; the oldest goes first."""
    sqlite_mb: Positive = 4096
    """Size of that file in MiB; the oldest answers go first."""
    negative_s: Seconds = 60.0
    """How long it is remembered that a search found nothing or a page cannot be read."""


@dataclass(frozen=True, config=_STRICT)
class LogConfig:
    """What is written to standard error."""

    format: Literal["json", "text"] = "json"
    """json: one object a line."""
    calls: Flag = False
    """A line for every call: tool, status, seconds, trajectory, request id; never arguments or answers."""


@dataclass(frozen=True, config=_STRICT)
class SandboxConfig:
    """Everything the service can be told."""

    limits: Limits = Limits()
    python: PythonConfig = PythonConfig()
    search: SearchConfig = SearchConfig()
    browse: BrowseConfig = BrowseConfig()
    mcp: dict[str, McpServerConfig] = field(default_factory=dict)
    """MCP servers by name."""
    plugins: tuple[PluginConfig, ...] = ()
    """Tools of installed packages."""
    cache: CacheConfig = CacheConfig()
    log: LogConfig = LogConfig()
    workers: Positive = min(4, os.cpu_count() or 1)
    """Processes that run search, browse and plug-in tools. (Python calls have processes of their own.)"""
    max_concurrency: Positive = max(16, 2 * (os.cpu_count() or 1))
    """Executions of one tool at a time; further calls wait, and waiting does not count against their time."""
    max_waiting: Positive = 4096
    """Calls of one tool that may wait. Beyond that the trajectory with most of them is told 429 with Retry-After."""
    queue_s: Seconds = 120.0
    """Longest wait in seconds for a free place; after that the service says 429 and the client asks again."""
    orphan_s: Seconds = 2.0
    """How long a call whose connection broke goes on, so that a retry with its request id finds it; then it ends."""
    replay_s: Seconds = 120.0
    """How long an answer is kept for a retry with its request id (at most 4096 answers)."""
    drain_s: Seconds = 2.0
    """After SIGTERM, how long calls in flight may go on; new ones are told 503."""


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
    def absolute(path: Path | None) -> Path | None:
        return None if path is None else folder / path

    sources = tuple(replace(source, path=folder / source.path) for source in config.search.sources)
    session_dir = absolute(config.python.session_dir)
    return replace(
        config,
        python=replace(config.python, session_dir=session_dir),
        search=replace(config.search, sources=sources, index_path=absolute(config.search.index_path)),
        cache=replace(config.cache, sqlite_path=absolute(config.cache.sqlite_path)),
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
        if is_dataclass(kind):
            kind = get_type_hints(kind)[str(part)]
        else:  # an element of a tuple, a value of a mapping
            kind = get_args(kind)[-1 if get_origin(kind) is dict else 0]
        if get_origin(kind) is UnionType:  # a section that may be absent
            kind = next(choice for choice in get_args(kind) if choice is not NoneType)
    return [each.name for each in fields(kind)] if is_dataclass(kind) else []
