"""Checks of the tool service before any engine starts.

This machine isolates python calls as the job wants, and the service accepts the job's config and offers its tools.
"""

import os
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.jobs.inputs import JobData, write_tool_files
from arpo_megatron.jobs.prompts import save_definitions
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.jobs.tool_file import mcp_servers
from arpo_megatron.launch.preflight.machine import check_isolation
from arpo_megatron.tasks.environments.verifiers.process import VerifiersError, check_loads
from arpo_megatron.tasks.protocols.tools import DEFAULT_NAMES, DEFAULT_TOOLS, PYTHON, select_tools
from arpo_megatron.tasks.synthetic.families import FAMILIES
from arpo_megatron.utils.processes import bind_to_parent, stop_groups
from arpo_megatron.utils.signals import run_in_loop
from tools_sandbox.client import AsyncSandboxClient, SandboxDenied, SandboxError, ToolAnswer
from tools_sandbox.config import TOKEN_VARIABLE
from tools_sandbox.utils.yaml import yaml_text

_OWN_PREFIX = "tools_sandbox: "
"""Start of the line in which the service names the reason why it cannot start."""
_START_S = 120.0
"""Seconds that the service, or a verifiers environment, may take until it is ready."""


def require_isolation(config: JobConfig) -> list[str]:
    """Return a note for the user if this machine isolates python calls less than at level `contained`.

    Raises:
        UserError: the isolation is weaker than the job accepts.
    """
    if config.sandbox.urls:  # no tool runs on this machine
        return []
    found = check_isolation(config)
    text = f"{found.text}: {found.fix}"
    if found.level == "failure":
        raise UserError(text)
    return [text] if found.level == "warning" else []


def check_tools_of(config: JobConfig, resumed: RunDirectory | None = None) -> list[str]:
    """Check the tools of a job before it runs, as `check_tools` does. Nothing is left on the disk."""
    if config.rollout.environment != "verifiers" and not _has_own_tools(config):
        return []
    data = config.data
    facts = FAMILIES[data.kind].generate(config.seed, data.tasks, data.held_out).facts if data.is_generated else {}
    with tempfile.TemporaryDirectory(prefix="arpo-tool-check-") as folder:
        run = RunDirectory(Path(folder))
        write_tool_files(config, run, JobData((), (), facts), resumed)
        return check_tools(config, run, names_log=False)


def check_tools(config: JobConfig, run: RunDirectory, *, names_log: bool = True) -> list[str]:
    """Start the service of a job that has tools of its own, ask for its tools, and end it; or ask those that run.

    Their definitions are written to the run directory, for prompts that contain them.

    Args:
        config: config of the job.
        run: its directory, which has the service's config.
        names_log: the log outlives the check, so that a message can name it.

    Returns:
        Notes for the user.

    Raises:
        UserError: the service does not start or answer, or lacks a tool that the job uses; or the environment of
            rollout.environment=verifiers cannot be loaded.
    """
    if config.rollout.environment == "verifiers":
        python, block = (Path(config.rollout.environment_params[name]).expanduser() for name in ("python", "config"))
        try:
            check_loads(python.absolute(), block.absolute(), _START_S)
        except VerifiersError as error:
            raise UserError(f"rollout.environment=verifiers: {error}") from None
    named = config.rollout.tools
    if named is None:
        save_definitions(run, DEFAULT_TOOLS)
    if config.sandbox.urls:
        chosen = select_tools(DEFAULT_NAMES if named is None else named, _offered_by(config.sandbox.urls))
        if config.sandbox.sessions and PYTHON in (tool.name for tool in chosen):
            _check_sessions(config.sandbox.urls)
        if named is not None:
            save_definitions(run, chosen)
        return []
    if not _has_own_tools(config):
        return []
    run.logs.mkdir(parents=True, exist_ok=True)
    log = run.logs / "sandbox_check.log"
    source = "this job" if config.sandbox.file is None else f"sandbox.file={config.sandbox.file}"
    offered = _offered(run.sandbox_config, log, source, f" (log: {log})" if names_log else "")
    if named is not None:
        save_definitions(run, select_tools(named, offered))
        return []
    unused = sorted(set(offered) - set(DEFAULT_NAMES))
    return [f"rollout.tools is not set, so the policy cannot call {', '.join(unused)}"] if unused else []


def _has_own_tools(config: JobConfig) -> bool:
    return config.rollout.tools is not None or config.sandbox.file is not None or bool(config.sandbox.urls)


def token_of_services() -> str:
    """Return the token of the services of `sandbox.urls`. Raises UserError if it is not set."""
    if not (token := os.environ.get(TOKEN_VARIABLE)):
        raise UserError(
            f"sandbox.urls: the token of the services is missing: export {TOKEN_VARIABLE}=..., on a cluster as one of "
            "the profile's `secrets`"
        )
    return token


def _offered_by(urls: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the tools that all these services offer, by name. Raises UserError if one differs or does not answer."""
    token, found = token_of_services(), []
    for url in urls:
        try:
            found.append(run_in_loop(_listed(url, token)))
        except SandboxError as error:
            fix = f"compare {TOKEN_VARIABLE} and the port" if isinstance(error, SandboxDenied) else "start it"
            raise UserError(f"sandbox.urls: {error}: {fix}") from None
        if found[-1] != found[0]:
            raise UserError(f"sandbox.urls: {url} offers other tools than {urls[0]}: start all with the same file")
    return found[0]


def _check_sessions(urls: Sequence[str]) -> None:
    """Raise UserError if a service keeps no interpreter states, which each python call would report to the model."""
    for url in urls:
        answer = run_in_loop(_kept(url, token_of_services()))
        if answer.status != "ok":
            raise UserError(f"sandbox.sessions, for {url}: {answer.text}")


def mcp_tools(file: Path) -> dict[str, dict[str, Any]]:
    """Start the MCP servers of a file, and return their tools by name. Raises UserError if one does not start."""
    with tempfile.TemporaryDirectory(prefix="arpo-tools-") as folder:
        config = Path(folder) / "tools.yaml"
        values = {**mcp_servers(file), "python": {"isolation": "limits", "preload": []}}  # no python call is made
        config.write_text(yaml_text(values), encoding="utf-8")
        offered = _offered(config, Path(folder) / "log", f"--file {file}", "")
    return {name: tool for name, tool in offered.items() if name not in DEFAULT_NAMES}


def _offered(file: Path, log: Path, source: str, where: str) -> dict[str, dict[str, Any]]:
    """Return the service's tools by name (`AsyncSandboxClient.tools`); an error names `source` and `where`."""
    token = secrets.token_hex(16)
    command = [sys.executable, "-m", "tools_sandbox", "--config", str(file)]
    with log.open("wb") as errors:
        service = subprocess.Popen(
            command,
            env={**os.environ, TOKEN_VARIABLE: token},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            preexec_fn=partial(bind_to_parent, os.getpid()),  # noqa: PLW1509  (prctl and getppid only)
        )
    deadline = threading.Timer(_START_S, stop_groups, [[service]])
    deadline.start()
    try:
        assert service.stdout is not None
        with service.stdout:
            ready = service.stdout.readline().split()
            if len(ready) == 2:
                return run_in_loop(_listed(ready[1], token))
    finally:
        deadline.cancel()
        stop_groups([service])
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    reasons = [line.removeprefix(_OWN_PREFIX) for line in lines if line.startswith(_OWN_PREFIX)]
    reason = (reasons or lines or ["it has ended without a message"])[-1]
    raise UserError(f"the tool service does not start with {source}: {reason}{where}")


async def _listed(url: str, token: str) -> dict[str, dict[str, Any]]:
    async with AsyncSandboxClient(url, token) as client:
        return await client.tools()


async def _kept(url: str, token: str) -> ToolAnswer:
    async with AsyncSandboxClient(url, token) as client:
        return await client.call(PYTHON, {"code": "1", "keep": "0"}, trajectory_id="tool-check")
