"""The services and ranks of a job: tool service, engines, rollout process, router, trainer ranks."""

import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from arpo_megatron.config import JobConfig
from arpo_megatron.engine.launch import engine_service, router_service
from arpo_megatron.hardware.environment import trainer_environment
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.backend import Backend, LocalBackend
from arpo_megatron.launch.supervisor import Supervisor
from arpo_megatron.rollout.endpoints import Services, uses_expert_routes
from arpo_megatron.rollout.handle import rollout_service, rollout_socket
from arpo_megatron.utils.processes import GRACE_S
from arpo_megatron.utils.service_spec import ServiceSpec
from tools_sandbox.config import TOKEN_VARIABLE

SANDBOX_STARTUP_S = 180.0


@contextmanager
def services(
    config: JobConfig, run: RunDirectory, supervisor: Supervisor, model: Path, backend: Backend | None = None
) -> Iterator[Services]:
    """Start the tool service, engines that serve `model`, and the rollout process; keep them up inside the block.

    Args:
        config: config of the job.
        run: its directory.
        supervisor: its processes.
        model: Hugging Face directory.
        backend: where the services run; None: on this machine.

    Raises:
        UserError: no model at `model`, or the config wants a router that is not installed.
        ProcessDiedError: a service did not come up in time; the message names its log.
    """
    backend, hang_timeout_s = backend or LocalBackend(), config.engine.hang_timeout_s
    token = secrets.token_urlsafe(32)
    with backend.scratch() as scratch, supervisor.serving(run, restarts=config.engine.restarts):
        engines = [
            _engine(config, run, model, index, backend, scratch, token) for index in range(config.engine.replicas)
        ]
        (port,) = backend.ports("sandbox", 1)
        sandbox_token = _sandbox_token()
        sandbox = sandbox_service(run, port, sandbox_token, hang_timeout_s=hang_timeout_s, host=backend.host("sandbox"))
        (port,) = backend.ports("rollout", 1)
        rollout = rollout_service(scratch, port, log_path=run.logs / "rollout.log", hang_timeout_s=hang_timeout_s)
        supervisor.serve(backend.place("sandbox", sandbox), *engines, backend.place("rollout", rollout))
        urls = tuple(engine.url for engine in engines)
        router = router_service(
            config.engine,
            urls,
            log_path=run.logs / "router.log",
            ports=backend.ports("router", 2),
            expert_routes=uses_expert_routes(config),
            host=backend.host("router"),
            token=token,
        )
        if router is not None:
            supervisor.serve(backend.place("router", router))
        yield Services(
            sandbox.url,
            urls,
            rollout_socket(scratch),
            router_url=router.url if router is not None else None,
            engine_token=token,
            sandbox_token=sandbox_token,
        )
        supervisor.check()


@contextmanager
def tool_service(config: JobConfig, run: RunDirectory, supervisor: Supervisor) -> Iterator[tuple[str, str]]:
    """Start the tool service alone, on this machine, and yield its URL and token. Raises ProcessDiedError."""
    (port,) = LocalBackend().ports("sandbox", 1)
    token = _sandbox_token()
    sandbox = sandbox_service(run, port, token, hang_timeout_s=config.engine.hang_timeout_s)
    with supervisor.serving(run, restarts=config.engine.restarts):
        supervisor.serve(sandbox)
        yield sandbox.url, token
        supervisor.check()


def _sandbox_token() -> str:
    """Return the token of the tool service: the user's, who may want to read its /metrics, or a new one."""
    return os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(32)


def _engine(
    config: JobConfig, run: RunDirectory, model: Path, index: int, backend: Backend, scratch: Path, token: str
) -> ServiceSpec:
    name = "engine" if config.engine.replicas == 1 else f"engine-{index}"
    role = f"engine-{index}"
    spec = engine_service(
        model,
        config.engine,
        dtype=config.model.dtype,
        seed=(config.seed + index) % 2**32,  # SGLang seeds numpy, which takes 32 bits
        log_path=run.logs / f"{name}.log",
        port=backend.ports(role, 1)[0],
        scratch=scratch,
        placement=backend.placement(config, index),
        name=name,
        expert_routes=uses_expert_routes(config),
        host=backend.host(role),
        token=token,
    )
    return replace(backend.place(role, spec), held_by=run.memory_lent)


def sandbox_service(
    run: RunDirectory, port: int, token: str, *, hang_timeout_s: float, host: str = "127.0.0.1"
) -> ServiceSpec:
    """Return how to start the tool service. Its token is in its environment: all users can read its arguments."""
    options = ["--host", host, "--port", str(port), "--config", str(run.sandbox_config)]
    return ServiceSpec(
        name="sandbox",
        url=f"http://{host}:{port}",
        command=[sys.executable, "-m", "tools_sandbox", *options],
        log=run.logs / "sandbox.log",
        environment={**os.environ, TOKEN_VARIABLE: token},
        startup_timeout_s=SANDBOX_STARTUP_S,
        hang_timeout_s=hang_timeout_s,
        grace_s=GRACE_S,
    )


def run_trainer(
    module: str,
    config: JobConfig,
    run: RunDirectory,
    supervisor: Supervisor,
    *,
    arguments: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    poll: Callable[[], None] = lambda: None,
    backend: Backend | None = None,
) -> None:
    """Run `python -m module RUN_DIR arguments...` on every trainer rank and wait, calling `poll` meanwhile.

    Raises:
        ProcessDiedError: a rank or a service died; the message names the log.
    """
    name = module.rpartition(".")[2]
    command, needed = (backend or LocalBackend()).ranks(module, [str(run.path), *arguments], config)
    variables = {**trainer_environment(config.platform), **needed, **(env or {})}
    supervisor.wait(supervisor.start(name, command, env=variables), poll=poll)
