"""The service's configuration: a YAML file becomes strict, frozen dataclasses; an unknown key is an error."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import field, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from tools_sandbox.utils.faults import fault_text
from tools_sandbox.utils.yaml import NotYamlError, load_yaml

_STRICT = ConfigDict(extra="forbid")

TOKEN_VARIABLE = "TOOLS_SANDBOX_TOKEN"  # noqa: S105 - a name, not a token
"""Environment variable of the service that holds the bearer token of callers. Unset: no token is needed."""

Positive = Annotated[int, Field(gt=0, strict=True)]
NotNegative = Annotated[int, Field(ge=0, strict=True)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Mebibytes = Annotated[int, Field(gt=0, le=1 << 24, strict=True)]
"""A size of up to 16 TiB, which the kernel accepts wherever it takes a size."""
Flag = Annotated[bool, Field(strict=True)]


def _http_address(text: str) -> str:
    if not re.match(r"https?://[^/\s]", text):
        raise ValueError("must be an address such as http://127.0.0.1:8080")
    return text


HttpAddress = Annotated[str, AfterValidator(_http_address)]


class ConfigError(ValueError):
    """The configuration cannot be used. The message is one line that names the key and the problem."""


@dataclass(frozen=True, config=_STRICT)
class Limits:
    """Time limit of every call, and resource limits of a python call."""

    time_s: Annotated[Seconds, Field(le=1e6)] = 120.0
    """Longest wall-clock time of a call of any tool, in seconds. A longer `timeout_s` is cut to this value."""
    cpu_s: Annotated[Positive, Field(le=1_000_000)] = 120
    """CPU time in seconds, for one process (RLIMIT_CPU) and for the call as a whole."""
    memory_mib: Annotated[Mebibytes, Field(ge=16)] = 2048
    """Address space of a process in MiB (RLIMIT_AS), beyond the preloaded modules. With control groups, also the
    memory of all processes of the call together."""
    total_memory_mib: Mebibytes | None = None
    """Memory of all python calls of this service in MiB: only as many run at a time as fit with `memory_mib` each, at
    least one. null: `max_concurrency` of them."""
    file_mib: Mebibytes = 64
    """Size of the largest file that a process may write, in MiB (RLIMIT_FSIZE)."""
    disk_mib: Mebibytes = 256
    """Size of the private /tmp in MiB. Needs a mount namespace; the log reports at the start whether there is one."""
    processes: Annotated[Positive, Field(le=1 << 20)] = 64
    """Processes and threads of a call (RLIMIT_NPROC and the pids control group)."""
    open_files: Annotated[Positive, Field(ge=16, le=1 << 20)] = 256
    """Open descriptors of a process (RLIMIT_NOFILE)."""
    code_chars: Positive = 200_000
    """Longest code that is accepted, in characters."""
    output_chars: Positive = 20_000
    """Longest answer in characters. A longer one is cut, with a note."""
    output_mib: Mebibytes = 64
    """Largest output in MiB, shown or not. A call that writes more is ended."""
    state_mib: Annotated[Mebibytes, Field(le=1 << 12)] = 64
    """Largest state of a session in MiB: the serialized names and the files in the working directory."""


@dataclass(frozen=True, config=_STRICT)
class PythonConfig:
    """The python tool: its isolation, preloaded modules, cache and sessions."""

    preload: tuple[str, ...] = ("numpy", "sympy", "scipy.integrate", "scipy.optimize", "scipy.stats", "pandas")
    """Modules imported once, before the first call. Every call finds them loaded."""
    isolation: Literal["full", "contained", "process", "limits"] = "contained"
    """Lowest isolation level to start with. Stronger mechanisms are used wherever the machine permits them; the log
    lists them at the start.
    full: `contained`, and control groups bound memory, processes and CPU time of a call as a whole.
    contained: each call has its own network, process tree, files and user, and a system call filter.
    process: needs no namespaces; the filter (no sockets) and Landlock (files).
    limits: only resource limits of a process; code can do everything that the service's user can."""
    ahead: Annotated[NotNegative, Field(le=64)] = 2
    """Processes that are created ahead of the next calls and wait behind all walls, so that these calls begin at once.
    Each serves one call and costs some MiB. There are none if the kernel does not hide calls from each other and count
    them separately."""
    timeout_s: Annotated[Seconds, Field(le=1e6)] | None = None
    """Longest wall-clock time of a python call, in seconds. null: `limits.time_s`, which bounds every tool."""
    cache: Flag = False
    """Cache the answers of equal code. Off by default, since code may read the clock or draw random numbers."""
    session_dir: Path | None = None
    """Folder for the states of sessions, relative to the configuration file. Several services may share it. The states
    are in its folder `tools_sandbox_states`; nothing else in it is touched.
    None: the python tool has no sessions, and every call begins with an empty state."""
    sessions_mib: Positive = 4096
    """Size of all kept states in MiB. The least recently used ones are removed first."""


@dataclass(frozen=True, config=_STRICT)
class Source:
    """One file of the search corpus."""

    path: Path
    """Path of the file. A relative path is relative to the configuration file."""
    format: Literal["jsonl", "parquet", "arpo_cache"]
    """jsonl: one object per line, {"title"?, "text"}. parquet: columns with these names.
    arpo_cache: one JSON object, query -> "Page 1: ...\\nPage 2: ..."."""


@dataclass(frozen=True, config=_STRICT)
class DenseConfig:
    """A dense retriever behind HTTP: POST {"queries": [...], "topk": k} -> {"result": [[{"document": {...}}]]}."""

    url: HttpAddress
    """Full address of its endpoint, e.g. http://retriever:8000/retrieve."""
    timeout_s: Seconds = 20.0
    """Time limit of one attempt in seconds."""
    retries: NotNegative = 3
    """Attempts after the first failed one. The pauses between them double."""


@dataclass(frozen=True, config=_STRICT)
class WebConfig:
    """A web search engine: its provider, key, rate and retries."""

    provider: Literal["serper", "brave", "searxng"]
    """Provider, which decides the format of requests and answers."""
    url: HttpAddress | None = None
    """Address of its endpoint. None: the provider's public one (searxng has none)."""
    key_variable: str | None = None
    """Environment variable that holds the key, which serper and brave need; searxng gets it as a bearer token. No file
    contains the key itself."""
    requests_per_s: Rate = 5.0
    """Highest rate of requests that this service sends, including retries."""
    max_requests: Positive | None = None
    """Most requests in all, including retries. Beyond that every call that needs one is answered with an error. None:
    any number."""
    count_path: Path | None = None
    """File with the number of requests so far, relative to the configuration file. None: a restart begins at 0."""
    timeout_s: Seconds = 20.0
    """Time limit of one attempt in seconds."""
    retries: NotNegative = 3
    """Attempts after the first failed one (HTTP 429, 5xx, no connection). The pauses between them double."""


@dataclass(frozen=True, config=_STRICT)
class SummaryConfig:
    """A model that summarises pages, at an OpenAI-compatible endpoint. The tool returns its summary, not the page."""

    url: HttpAddress
    """Base address, e.g. http://127.0.0.1:30000/v1."""
    model: str
    """Name of the model at the endpoint."""
    key_variable: str | None = None
    """Environment variable that holds the key, if the endpoint needs one."""
    max_tokens: Positive = 512
    """Longest summary in tokens."""
    timeout_s: Seconds = 60.0
    """Time limit of one of two attempts, in seconds. A call without its summary has failed."""


@dataclass(frozen=True, config=_STRICT)
class PagesConfig:
    """Web search that reads the pages of its results (engine "web"). Section `browse` has the limits of reading."""

    results: Positive = 5
    """Number of results whose pages are read. Those without a readable page keep their snippets."""
    context_chars: Positive = 3000
    """Characters of a page before and after the sentence that is most like the snippet. Without such a sentence, the
    first `2 * context_chars` characters are taken."""
    summary: SummaryConfig | None = None
    """Model that answers the query from the pages. None: return their text."""


@dataclass(frozen=True, config=_STRICT)
class SearchConfig:
    """The search tool. It is not offered if `sources` is empty and `engine` is "local"."""

    engine: Literal["local", "dense", "web"] = "local"
    """Engine for queries that no arpo_cache source holds: BM25 over the sources, `dense` or `web`."""
    sources: tuple[Source, ...] = ()
    """Files of the corpus, indexed together. With an engine other than "local", only arpo_cache files."""
    index_path: Path | None = None
    """Folder of the index, relative to the configuration file. The first service that finds the index missing or out
    of date builds it. None: the index is built at every start, in a temporary folder."""
    dense: DenseConfig | None = None
    """Settings of engine "dense"."""
    web: WebConfig | None = None
    """Settings of engine "web"."""
    snippet_chars: Positive = 1000
    """Longest snippet of one result in characters. Longer documents are cut into passages of at most this length."""
    max_results: Positive = 10
    """Largest number of results of one query, and the number for a caller that asks for none."""
    pages: PagesConfig | None = None
    """Read the pages of the results. None: return their snippets."""


@dataclass(frozen=True, config=_STRICT)
class BrowseConfig:
    """The browse tool. Models can read the public web with it, so it is offered only if `enabled` is true."""

    enabled: Flag = False
    """Offer the tool."""
    base_url: HttpAddress | None = None
    """Address of a site, such as a mirror of an encyclopedia, that relative addresses of calls belong to."""
    allow_networks: tuple[str, ...] = ()
    """Networks in CIDR notation that may be read although they are not public, e.g. a mirror in an intranet."""
    deny_networks: tuple[str, ...] = ()
    """Networks that may not be read although they are public, e.g. a cluster's own. This machine never may be."""
    max_bytes: Positive = 5_000_000
    """Bytes of a body that are read, on the wire and after decompression. The rest is cut, with a note."""
    parse_mib: Annotated[Mebibytes, Field(ge=16)] = 1024
    """Memory in MiB for turning a page into text; each page has its own process for that, isolated like a python call.
    A page that needs more is answered with an error."""
    max_chars: Positive = 20_000
    """Longest answer in characters."""
    max_redirects: NotNegative = 5
    """Number of redirects that are followed. Each target is checked like the first address."""
    timeout_s: Seconds = 30.0
    """Longest wall-clock time of reading one page in seconds, even if the caller allows more."""
    robots: Flag = False
    """Ask the robots.txt of a site first and honour it."""
    user_agent: str = "arpo-tools-sandbox/1.0"
    """User-Agent header of the tool's requests."""
    summary: SummaryConfig | None = None
    """Model that summarises pages. None: return their text."""


@dataclass(frozen=True, config=_STRICT)
class McpServerConfig:
    """An MCP server (Model Context Protocol), which a worker process of its own starts and speaks to over stdio."""

    command: str
    """Program. A name is looked up in PATH."""
    args: tuple[str, ...] = ()
    """Arguments of the program."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables in addition to HOME, LOGNAME, PATH, SHELL, TERM and USER. It inherits no others."""
    env_from: tuple[str, ...] = ()
    """Names of variables that it inherits from the service's environment, such as a key. Each must be set."""
    tools: tuple[str, ...] | None = None
    """Names of its tools that are offered. None: all."""
    cache: Flag = False
    """Cache the answers of equal calls. Only for servers that merely read."""
    max_chars: Positive = 20_000
    """Longest answer in characters. A longer one is cut, with a note."""


@dataclass(frozen=True, config=_STRICT)
class PluginConfig:
    """A tool of an installed package, by its entry point in the group `tools_sandbox.tool`, or of a Python file."""

    name: str
    """Name of the entry point, or FILE.py:CLASS; a relative path is relative to the configuration file."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the tool's class."""


@dataclass(frozen=True, config=_STRICT)
class CacheConfig:
    """The cache of tool answers: its size and how long negative answers stay."""

    entries: Positive = 10_000
    """Number of answers kept in memory. The least recently used ones are removed first."""
    memory_mib: Positive = 256
    """Size of the answers kept in memory, in MiB. The least recently used ones are removed first."""
    sqlite_path: Path | None = None
    """SQLite file (WAL) that keeps answers over restarts, relative to the configuration file. Services on one machine
    may share it and read each other's answers (equal calls at the same time each execute). None: memory only."""
    sqlite_entries: Positive = 1_000_000
    """Number of answers kept in the file. The oldest ones are removed first."""
    sqlite_mib: Positive = 4096
    """Size of the file in MiB. The oldest answers are removed first."""
    negative_s: Seconds = 60.0
    """Seconds to keep a negative result: a search found nothing, or a page cannot be read."""


@dataclass(frozen=True, config=_STRICT)
class LogConfig:
    """Format and content of the log on standard error."""

    format: Literal["json", "text"] = "json"
    """json: one object per line."""
    calls: Flag = False
    """Log a line for every call: tool, status, seconds, trajectory, request id; never arguments or answers."""


@dataclass(frozen=True, config=_STRICT)
class ToolServiceConfig:
    """The configuration of the service: a section per tool, and limits of the whole."""

    limits: Limits = Limits()
    python: PythonConfig = PythonConfig()
    search: SearchConfig = SearchConfig()
    browse: BrowseConfig = BrowseConfig()
    mcp: dict[str, McpServerConfig] = field(default_factory=dict)
    """MCP servers by name."""
    plugins: tuple[PluginConfig, ...] = ()
    """Tools of installed packages or files."""
    cache: CacheConfig = CacheConfig()
    log: LogConfig = LogConfig()
    workers: Positive = min(4, os.cpu_count() or 1)
    """Processes that run search, browse and plug-in tools. (Python calls have their own processes.)"""
    max_concurrency: Positive = max(16, 2 * (os.cpu_count() or 1))
    """Executions of one tool at a time. Further calls wait; waiting does not count against their time limit."""
    max_waiting: Positive = 4096
    """Calls of one tool that may wait. Beyond that, the trajectory with the most waiting calls gets HTTP 429 with
    Retry-After."""
    queue_s: Seconds = 120.0
    """Longest wait for a free slot in seconds. After that the service answers 429 and the client asks again."""
    orphan_s: Seconds = 2.0
    """Seconds that a call keeps running after its connection broke, so that a retry with its request id finds it."""
    keep_answers_s: Seconds = 120.0
    """Seconds that an answer is kept for a retry with its request id (at most 4096 answers)."""
    drain_s: Seconds = 2.0
    """Seconds that calls in flight may keep running after SIGTERM. New calls get HTTP 503."""

    def slots(self, tool: str) -> int:
        """Return how many executions of a tool may run at a time."""
        total = self.limits.total_memory_mib
        if tool != "python" or total is None:
            return self.max_concurrency
        return max(1, min(self.max_concurrency, total // self.limits.memory_mib))


def load_config(path: Path | None) -> ToolServiceConfig:
    """Read a YAML file. None: return the defaults. Raises ConfigError."""
    if path is None:
        return ToolServiceConfig()
    try:
        data = load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (NotYamlError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    try:
        # An empty or fully commented file parses as None.
        config = TypeAdapter(ToolServiceConfig).validate_python({} if data is None else data)
    except ValidationError as error:
        raise ConfigError(f"{path}: {_first_problem(error)}") from error
    return _with_absolute_paths(config, path.resolve().parent)


def _with_absolute_paths(config: ToolServiceConfig, folder: Path) -> ToolServiceConfig:
    def absolute(path: Path | None) -> Path | None:
        return None if path is None else folder / path

    sources = tuple(replace(source, path=folder / source.path) for source in config.search.sources)
    session_dir, web = absolute(config.python.session_dir), config.search.web
    if web is not None:
        web = replace(web, count_path=absolute(web.count_path))
    plugins = tuple(
        replace(each, name=str(folder / each.name)) if ".py:" in each.name else each for each in config.plugins
    )
    return replace(
        config,
        plugins=plugins,
        python=replace(config.python, session_dir=session_dir),
        search=replace(config.search, sources=sources, index_path=absolute(config.search.index_path), web=web),
        cache=replace(config.cache, sqlite_path=absolute(config.cache.sqlite_path)),
    )


def _first_problem(error: ValidationError) -> str:
    """Return one line about the first problem. Unknown keys come first, since a typo also explains a missing key."""
    problems = error.errors(include_url=False)
    problem = next((p for p in problems if p["type"] == "unexpected_keyword_argument"), problems[0])
    where = ".".join(str(part) for part in problem["loc"]) or "top level"
    if problem["type"] != "unexpected_keyword_argument":
        return f"{where}: {fault_text(problem)} (got {str(problem['input'])[:80]!r})"
    known = _known_keys(problem["loc"][:-1])
    near = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
    return f"unknown key {where!r}; {hint}"


def _known_keys(parents: tuple[int | str, ...]) -> list[str]:
    """Return the field names of the dataclass at a path such as ("search", "sources", 0)."""
    kind: Any = ToolServiceConfig
    for part in parents:
        if is_dataclass(kind):
            kind = get_type_hints(kind)[str(part)]
        else:  # an element of a tuple, a value of a mapping
            kind = get_args(kind)[-1 if get_origin(kind) is dict else 0]
        if get_origin(kind) is UnionType:  # a section that may be absent
            kind = next(choice for choice in get_args(kind) if choice is not NoneType)
    return [each.name for each in fields(kind)] if is_dataclass(kind) else []
