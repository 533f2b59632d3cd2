"""A job on one machine: tool service, engine and trainer ranks, started in order, watched, and ended together."""

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from arpo_megatron.config import JobConfig
from arpo_megatron.machine import placement, trainer_environment
from arpo_megatron.processes import Role, RoleDiedError, Roles, last_lines
from arpo_megatron.rollout.server import EngineHandle, launch_engine
from arpo_megatron.rollout.service import RolloutHandle, ServiceSettings
from arpo_megatron.run_directory import RunDirectory

SANDBOX_STARTUP_S = 60.0
ENGINE_URLS = "ARPO_ENGINE_URLS"
"""Environment variable of the trainer: where the engines serve, separated by spaces."""
ROUTER_URL = "ARPO_ROUTER_URL"
"""Environment variable of the trainer: where the router before them serves; not set where there is none."""
SANDBOX_URL = "ARPO_SANDBOX_URL"
"""Environment variable of the trainer: where the tool service serves."""


@dataclass(frozen=True, slots=True)
class Services:
    """Where the tool service and the engines answer, and the router before these if there is one."""

    sandbox_url: str
    engine_urls: tuple[str, ...]
    router_url: str | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The variables through which the trainer learns of them."""
        router = {} if self.router_url is None else {ROUTER_URL: self.router_url}
        return {SANDBOX_URL: self.sandbox_url, ENGINE_URLS: " ".join(self.engine_urls), **router}

    @classmethod
    def from_environment(cls) -> "Services":
        """What `environment` said to this process."""
        return cls(os.environ[SANDBOX_URL], tuple(os.environ[ENGINE_URLS].split()), os.environ.get(ROUTER_URL))


@contextmanager
def services(config: JobConfig, run: RunDirectory, roles: Roles, model: Path) -> Iterator[Services]:
    """Start the tool service and an engine that serves `model`; both are healthy inside the `with` block.

    Raises:
        RoleDiedError: one of them did not come up in time; the message names its log.
    """
    sandbox = start_sandbox(run, roles)
    engine: EngineHandle | None = None
    try:
        engine = launch_engine(
            model,
            config.engine,
            dtype=config.model.dtype,
            seed=config.seed,
            log_path=run.logs / "engine.log",
            placement=placement(config),
        )
        roles.adopt("engine", engine.process, run.logs / "engine.log")
        yield Services(sandbox, (engine.url,))
    finally:
        if engine is not None:
            roles.forget("engine")
            engine.stop()


def start_sandbox(run: RunDirectory, roles: Roles) -> str:
    """Start the tool service and return its URL once it serves."""
    command = [sys.executable, "-m", "tools_sandbox", "--port", "0", "--config", str(run.sandbox_config)]
    role = roles.start("sandbox", command, stdout=subprocess.PIPE)
    line = _first_line(role, SANDBOX_STARTUP_S)
    if not line.startswith("ready "):
        raise RoleDiedError(f"the tool service did not start; log: {role.log}\n{last_lines(role.log)}")
    return line.removeprefix("ready ").strip()


def start_rollouts(config: JobConfig, model: Path, log: Path, services: Services) -> RolloutHandle:
    """The rollout service in a process of its own, with the tokenizer of `model`."""
    settings = ServiceSettings(
        engine_urls=services.engine_urls,
        router_url=services.router_url,
        sandbox_url=services.sandbox_url,
        tokenizer_path=model,
        seed=config.seed,
        request_timeout_s=config.engine.request_timeout_s,
    )
    return RolloutHandle.start(settings, log_path=log)


def run_trainer(
    module: str,
    config: JobConfig,
    run: RunDirectory,
    roles: Roles,
    *,
    arguments: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    poll: Callable[[], None] = lambda: None,
) -> None:
    """Run `python -m module RUN_DIR arguments...` on every trainer rank and wait, calling `poll` meanwhile.

    Raises:
        RoleDiedError: a rank or a service died; the message names the log.
    """
    name = module.rpartition(".")[2]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
    command = [
        *torchrun,
        f"--nproc-per-node={config.parallel.world_size}",
        *(sys.executable, "-m", module, str(run.path), *arguments),
    ]
    roles.wait(roles.start(name, command, env={**trainer_environment(config.platform), **(env or {})}), poll=poll)


def _first_line(role: Role, timeout_s: float) -> str:
    """The first line that `role` prints, or "" when it ends or `timeout_s` seconds pass before."""
    stdout = role.process.stdout
    if stdout is None:
        raise ValueError(f"{role.name} was not started with stdout=PIPE")
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if select.select([stdout], [], [], 0.1)[0]:
            return str(stdout.readline())
        if role.process.poll() is not None:
            return ""
    return ""
