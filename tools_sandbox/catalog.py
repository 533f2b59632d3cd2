"""The catalog of tools: which tools a configuration offers, including those of installed packages."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from tools_sandbox.config import ConfigError, PluginConfig, ToolServiceConfig
from tools_sandbox.python_tool.tool import PythonTool
from tools_sandbox.tool import Tool

ENTRY_POINTS = "tools_sandbox.tool"
"""Entry point group in which packages offer tools."""


def build_tools(config: ToolServiceConfig) -> dict[str, Tool]:
    """Return the tools of a configuration by name, without those of MCP servers.

    MCP tools are known only after their servers have started. Raises ConfigError.
    """
    return tools_by_name([*_tools_except_python(config), PythonTool(config)])


def worker_tools(config: ToolServiceConfig) -> list[Tool]:
    """Return the tools that worker processes run."""
    return [tool for tool in _tools_except_python(config) if tool.in_worker]


def tools_by_name(tools: list[Tool]) -> dict[str, Tool]:
    """Return tools by name. Raises ConfigError for a duplicate name or an invalid argument schema."""
    for tool in tools:
        if isinstance(tool.arguments, Mapping):
            _check_schema_is_valid(tool.name, tool.arguments)
    named = {tool.name: tool for tool in tools}
    duplicates = [tool.name for tool in tools if named[tool.name] is not tool]
    if duplicates:
        raise ConfigError(f'two tools are called "{duplicates[0]}": rename one, or remove it from the tool file')
    return named


def _check_schema_is_valid(name: str, schema: Mapping[str, Any]) -> None:
    import jsonschema

    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        where = ".".join(map(str, error.absolute_path)) or "top level"
        reason = " ".join(error.message.split())[:200]
        raise ConfigError(
            f'the arguments of tool "{name}" are no JSON schema: {where}: {reason}; fix it, or leave the tool out'
        ) from error


def _tools_except_python(config: ToolServiceConfig) -> list[Tool]:
    # Imported late: a service without search or browse should not load their dependencies.
    tools: list[Tool] = []
    if config.search.sources or config.search.engine != "local":
        if config.search.pages is not None:
            from tools_sandbox.deep_search import DeepSearchTool

            tools.append(DeepSearchTool(config))
        else:
            from tools_sandbox.search.tool import SearchTool

            tools.append(SearchTool(config.search))
    if config.browse.enabled:
        from tools_sandbox.browse.parser import PageParser
        from tools_sandbox.browse.tool import BrowseTool

        tools.append(BrowseTool(config.browse, PageParser(config.browse, config.python)))
    return [*tools, *(_load_plugin(plugin) for plugin in config.plugins)]


def _load_plugin(plugin: PluginConfig) -> Tool:
    try:
        component, code = _plugin_class(plugin.name)
        tool = component(**plugin.options)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f'plugins: "{plugin.name}" cannot be created: {type(error).__name__}: {error}') from error
    if not isinstance(tool, Tool):
        raise ConfigError(f'plugins: "{plugin.name}" is not a tools_sandbox.tool.Tool')
    tool.fingerprint = json.dumps([tool.fingerprint, code, plugin.options], sort_keys=True, default=str)
    return tool


def _plugin_class(name: str) -> tuple[Any, str]:
    """Import the class of an entry point, or of a file for a name like `/path/my.py:MyTool`.

    Returns:
        the class, and what changes with its code: the digest of the file, or the version of the package.
    """
    path, colon, attribute = name.rpartition(":")
    if colon and path.endswith(".py"):
        code = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        place = hashlib.sha256(path.encode()).hexdigest()[:8]  # files of one name, or of the name of a module
        spec = importlib.util.spec_from_file_location(f"{Path(path).stem}_{place}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # pydantic looks annotations up in their module
        spec.loader.exec_module(module)
        return getattr(module, attribute), code
    offered = {entry.name: entry for entry in metadata.entry_points(group=ENTRY_POINTS)}
    if name not in offered:
        known = ", ".join(sorted(offered)) or "none"
        raise ConfigError(f'plugins: no installed package offers "{name}" in {ENTRY_POINTS} (installed: {known})')
    package = offered[name].dist
    return offered[name].load(), "" if package is None else f"{package.name} {package.version}"
