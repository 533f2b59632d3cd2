"""The tool service's config of a run: the user's file (`sandbox.file`) merged with what the job sets itself."""

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from arpo_megatron.config import JobConfig, SandboxConfig
from arpo_megatron.errors import UserError
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.utils.atomic import atomic_write
from tools_sandbox.config import ConfigError, Limits, load_config
from tools_sandbox.utils.yaml import NotYamlError, load_yaml, yaml_text

Values = dict[str, Any]

_OWN_KEYS = (
    ("limits", "memory_mib", "python_memory_mib"),
    ("limits", "total_memory_mib", "python_total_memory_mib"),
    ("python", "timeout_s", "python_timeout_s"),
    ("python", "preload", "preload"),
    ("python", "isolation", "isolation"),
    ("search", "max_results", "search_results"),
)
"""Section and key of the service that a key of section `sandbox` sets."""
_PATHS = (("search", "index_path"), ("python", "session_dir"), ("cache", "sqlite_path"))
_CACHE_FILE, _COUNT_FILE = "tool_answers.sqlite", "paid_requests"
"""Names in the run directory: a resumed run continues with them."""
_SECRET = re.compile(r"(^|[-_.])(api_?key|key|token|secret|password|passwd)$", re.IGNORECASE)
_NO_SECRET = re.compile(
    r"(^|[-_.])((bos|cls|end|eos|mask|pad|sep|start|stop|unk)[-_]?token"
    r"|(cache|foreign|group|order|primary|public|sort)[-_]?key)$",
    re.IGNORECASE,
)
"""Names of usual options that `_SECRET` would match."""
_ARGUMENT = re.compile(r"-{0,2}([\w.-]+)=.+", re.DOTALL)
"""An argument that sets an option: --NAME=VALUE."""
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://\S+", re.IGNORECASE)
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
_WITH_KEY_VARIABLE = ("search.web", "search.pages.summary", "browse.summary")
_WITHOUT_KEY = ("search.dense.url", "browse.base_url")
_RELATIVE = ("./", "../")


def write_tool_config(
    sandbox: SandboxConfig,
    run: RunDirectory,
    sources: Sequence[Mapping[str, str]],
    trained: RunDirectory | None = None,
    *,
    timeout_s: float = 0.0,
) -> list[str]:
    """Write the service's config and a copy of the user's file, unless both exist and the user's file is the same.

    Args:
        sandbox: the section of the job's config.
        run: the run directory.
        sources: the job's files to search; relative paths are relative to the run directory.
        trained: the run whose copy of the user's file is read if the file is gone; None: `run`.
        timeout_s: the longest time limit of the job's tool calls, in seconds.

    Returns:
        Notes for the user.

    Raises:
        UserError: the user's file cannot be used.
    """
    resumed, user, gone, text = run.sandbox_config.exists(), Values(), list[str](), None
    if sandbox.file is None:
        if resumed:
            return []
    else:
        source, copy = _file_or_copy(sandbox.file, trained or run), run.sandbox_user_file
        gone = [] if source == sandbox.file else [f"sandbox.file={sandbox.file} is gone: its copy {source} is used"]
        text = _read_text(source)
        if resumed and copy.exists() and copy.read_text(encoding="utf-8") == text:
            return gone
        user = read_tool_file(sandbox.file, sandbox, trained or run)
    with atomic_write(run.sandbox_config) as partial:
        partial.write_text(yaml_text(_merged(user, sandbox, sources, timeout_s)), encoding="utf-8")
    if text is not None:  # last: the copy marks the config as written from it
        with atomic_write(run.sandbox_user_file) as partial:
            partial.write_text(text, encoding="utf-8")
    if sandbox.file is None or not resumed:
        return gone
    return [*gone, f"sandbox.file={sandbox.file} has changed: {run.sandbox_config} was written again"]


def read_tool_file(path: Path, sandbox: SandboxConfig, run: RunDirectory | None = None) -> Values:
    """Return the values of a user's file, with absolute paths.

    Args:
        path: the file; relative paths in it are relative to its folder.
        sandbox: the section of the job's config.
        run: the run whose copy is read if the file is gone.

    Raises:
        UserError: the service refuses the file, it contains a secret, or it contradicts section `sandbox`.
    """
    source = path if run is None else _file_or_copy(path, run)
    try:
        values = load_yaml(_read_text(source))
    except NotYamlError:
        values = None  # `load_config` raises the message
    for where, name in _secrets(values):
        raise UserError(f"sandbox.file={path}: {where} is a secret, which no file may hold. {_fix(where, name)}")
    try:
        load_config(source)
    except ConfigError as error:
        raise UserError(f"sandbox.file={error}") from None
    _check_agreement(values or {}, path, sandbox)
    if sandbox.replicas > 1:
        _check_replicas(values or {}, path)
    return _with_absolute_paths(values or {}, path.resolve().parent)


def mcp_servers(path: Path) -> Values:
    """Return section `mcp` of a file that the service accepts, with absolute paths."""
    section = (load_yaml(_read_text(path)) or {}).get("mcp") or {}
    return _with_absolute_paths({"mcp": section}, path.resolve().parent)


def with_tool_file(config: JobConfig, run: RunDirectory) -> JobConfig:
    """Return a config to check, whose `sandbox.file` is the run's copy if the user's file is gone."""
    if (file := config.sandbox.file) is None:
        return config
    return replace(config, sandbox=replace(config.sandbox, file=_file_or_copy(file, run)))


def _file_or_copy(path: Path, run: RunDirectory) -> Path:
    return run.sandbox_user_file if not path.exists() and run.sandbox_user_file.exists() else path


def searches_per_s(sandbox: SandboxConfig) -> float | None:
    """Return the highest rate of requests of the job's tool services to a web search engine; None without one.

    Raises:
        UserError: `sandbox.file` cannot be used.
    """
    if sandbox.file is None:
        return None
    read_tool_file(sandbox.file, sandbox)
    search = load_config(sandbox.file).search
    return search.web.requests_per_s * sandbox.replicas if search.engine == "web" and search.web else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"sandbox.file={path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"sandbox.file={path}: not UTF-8 text") from None


def _secrets(value: object, where: str = "", name: str = "") -> Iterator[tuple[str, str]]:
    """Yield position and name of each value that is a secret in plain text."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _secrets(each, f"{where}.{key}" if where else str(key), str(key))
    elif isinstance(value, list):
        for number, each in enumerate(value):
            option = str(value[number - 1]) if number else ""  # as in [--token, VALUE]
            takes_value = option.startswith("-") and not str(each).startswith("-")
            yield from _secrets(each, f"{where}.{number}", option if takes_value else "")
    elif value not in (None, ""):
        if name == "key_variable":
            if not _VARIABLE.fullmatch(str(value)):
                yield where, name
        elif _is_secret(name):
            yield where, name.lstrip("-")
        elif (argument := _ARGUMENT.fullmatch(str(value))) and _is_secret(argument[1]):
            yield where, argument[1]
        elif _has_password(str(value)):
            yield where, "address"
        elif parameter := _secret_parameter(str(value)):
            yield where, parameter


def _is_secret(name: str) -> bool:
    return _SECRET.search(name) is not None and _NO_SECRET.search(name) is None


def _secret_parameter(text: str) -> str | None:
    """Return the name of the first secret in the query of a web address (https://host/search?apikey=SECRET)."""
    if (address := _ADDRESS.search(text)) is None:
        return None
    found = parse_qsl(urlsplit(address[0]).query)
    return next((name for name, _ in found if _is_secret(name)), None)


def _has_password(text: str) -> bool:
    """Return whether a text is a web address with a password (https://user:password@host), or --NAME= with one."""
    return re.match(r"(-{0,2}[\w.-]+=)?[a-z][a-z0-9+.-]*://[^/?#]*:[^/?#@]+@", text, re.IGNORECASE) is not None


def _fix(where: str, name: str) -> str:
    """Return how to pass the secret instead, given its position and name."""
    section = where.rpartition(".")[0]
    if section in _WITH_KEY_VARIABLE:
        variable = f"{section.rpartition('.')[2].upper()}_API_KEY"
        return f"Put it into the environment as {variable}, and write {section}.key_variable: {variable}"
    if where.startswith("mcp."):
        return f"Put it into the environment, and name its variable in {'.'.join(where.split('.')[:2])}.env_from"
    if name == "address":
        return "Write the address without the password"
    if where in _WITHOUT_KEY:
        return f"Write the address without it: only {' and '.join(_WITH_KEY_VARIABLE)} read a key from the environment"
    return f"Let the tool read the environment variable {name.upper().replace('-', '_')}"


def _check_agreement(user: Values, path: Path, sandbox: SandboxConfig) -> None:
    """Raise UserError for a key that the file and section `sandbox` set differently."""
    for section, name, key in _OWN_KEYS:
        own = _plain(getattr(sandbox, key))
        theirs = user.get(section, {}).get(name, own)
        if theirs != own:
            raise UserError(
                f"sandbox.file={path} sets {section}.{name} to {theirs}, but sandbox.{key} is {own}: remove it from "
                f"the file, and set sandbox.{key}"
            )
    if not sandbox.sessions and user.get("python", {}).get("session_dir") is not None:
        raise UserError(
            f"sandbox.file={path} sets python.session_dir, but sandbox.sessions is false: set sandbox.sessions=true"
        )


def _check_replicas(user: Values, path: Path) -> None:
    """Raise UserError for what several tool services, which may be on several nodes, cannot share."""
    if (user.get("search", {}).get("web") or {}).get("max_requests") is not None:
        raise UserError(
            f"sandbox.file={path} sets search.web.max_requests, which one tool service counts: set sandbox.replicas=1"
        )
    if user.get("cache", {}).get("sqlite_path") is not None:
        raise UserError(
            f"sandbox.file={path} sets cache.sqlite_path, which services on several nodes cannot share: remove it, or "
            "set sandbox.replicas=1"
        )


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _with_absolute_paths(values: Values, folder: Path) -> Values:
    """Return the values with paths relative to `folder` made absolute."""
    values = deepcopy(values)
    for section, name in _PATHS:
        if values.get(section, {}).get(name) is not None:
            values[section][name] = str(folder / values[section][name])
    web = values.get("search", {}).get("web") or {}
    if web.get("count_path") is not None:
        web["count_path"] = str(folder / web["count_path"])
    for source in values.get("search", {}).get("sources", ()):
        source["path"] = str(folder / source["path"])

    def absolute(word: str) -> str:
        return str((folder / word).resolve()) if word.startswith(_RELATIVE) else word

    for plugin in values.get("plugins", ()):
        if ".py:" in plugin["name"]:
            plugin["name"] = str(folder / plugin["name"])
    for server in values.get("mcp", {}).values():
        server["command"] = absolute(server["command"])
        server["args"] = [absolute(word) for word in server.get("args", ())]
    return values


def _merged(user: Values, sandbox: SandboxConfig, sources: Sequence[Mapping[str, str]], timeout_s: float) -> Values:
    """Return the service's config: the user's values, and those of the job."""
    values = deepcopy(user)
    for section, name, key in _OWN_KEYS:
        values.setdefault(section, {})[name] = _plain(getattr(sandbox, key))
    # The limit of every tool must not cut the calls that the job allows.
    values["limits"].setdefault("time_s", max(Limits().time_s, sandbox.python_timeout_s, timeout_s))
    # Relative to the config, so in the run directory. A restarted service finds index and states there.
    values["python"].setdefault("session_dir", "sandbox_states" if sandbox.sessions else None)
    search = values["search"]
    search.setdefault("index_path", "search/index")
    own = list(search.get("sources", ()))
    if search.get("engine", "local") != "local":  # such an engine searches no corpus
        sources = [source for source in sources if source["format"] == "arpo_cache"]
    search["sources"] = [*own, *(dict(source) for source in sources if dict(source) not in own)]
    web = search.get("web") or {}
    if web.get("max_requests") is not None:
        web.setdefault("count_path", _COUNT_FILE)
    # Several services may be on several nodes, which cannot share such a file: each remembers for itself.
    if sandbox.replicas == 1 and (web or values.get("browse", {}).get("enabled")):
        values.setdefault("cache", {}).setdefault("sqlite_path", _CACHE_FILE)
    return values
