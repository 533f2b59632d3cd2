"""The services and ranks of a job: tool service, engines, rollout process, router, trainer ranks."""

import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from arpo_megatron.config import EngineConfig, JobConfig
from arpo_megatron.engine.launch import engine_service, router_service
from arpo_megatron.engine.options import age_options
from arpo_megatron.engine.version import streams_entropies
from arpo_megatron.errors import UserError
from arpo_megatron.hardware.environment import trainer_environment
from arpo_megatron.hardware.placement import emulates_te
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.backend import Backend, LocalBackend
from arpo_megatron.launch.hangs import watched_ranks
from arpo_megatron.launch.supervisor import Supervisor
from arpo_megatron.launch.tool_check import token_of_services
from arpo_megatron.launch.trainer_metrics import trainer_metrics
from arpo_megatron.monitor.events import EventReader
from arpo_megatron.monitor.progress import Progress
from arpo_megatron.rollout.endpoints import ServiceEndpoints, uses_expert_routes
from arpo_megatron.rollout.service import rollout_service, rollout_socket
from arpo_megatron.utils.processes import GRACE_S
from arpo_megatron.utils.service_spec import ServiceSpec
from tools_sandbox.config import TOKEN_VARIABLE

SANDBOX_STARTUP_S = 180.0
_NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


@dataclass(slots=True)
class Job:
    """A run that this process holds, and everything needed to start its processes."""

    config: JobConfig
    run: RunDirectory
    supervisor: Supervisor
    progress: Progress = field(default_factory=Progress)
    backend: Backend = field(default_factory=LocalBackend)
    """Where the processes run."""
    events: EventReader = field(init=False)
    """Events that the display has not shown yet."""
    on_event: Callable[[Mapping[str, Any]], None] = lambda _event: None
    """Called with each event."""

    def __post_init__(self) -> None:
        self.events = EventReader(self.run.events)

    def check(self) -> None:
        """Show new events. Raises ProcessDiedError if a service has failed for good, and as `show_events` does."""
        self.show_events()
        self.supervisor.check()

    def show_events(self) -> None:
        """Show the events since the last call. Raises UserError if a rank has logged one."""
        for event in self.events.new():
            if event["kind"] == "user_error":
                raise UserError(event["text"])
            self.on_event(event)
            self.progress.event(event)


@contextmanager
def running_services(
    job: Job, model: Path, *, rollouts: bool = True, pushes: bool = False
) -> Iterator[ServiceEndpoints]:
    """Start the tool service, engines that serve `model`, and the rollout process; keep them up inside the block.

    Args:
        job: the job.
        model: Hugging Face directory.
        rollouts: start the rollout process, too.
        pushes: a trainer will push weights. Otherwise engines serve the files of `model` and quantize nothing.

    Raises:
        UserError: no model at `model`, or the config wants a router that is not installed.
        ProcessDiedError: a service did not come up in time; the message names its log.
    """
    config, run, supervisor, backend = job.config, job.run, job.supervisor, job.backend
    hang_timeout_s, token = config.engine.hang_timeout_s, secrets.token_urlsafe(32)
    with ExitStack() as stack:
        scratch = stack.enter_context(backend.scratch())
        trainer = ""
        if pushes:
            (port,) = backend.ports("trainer", 1)
            trainer = stack.enter_context(trainer_metrics(run.metrics, backend.host("trainer"), port))
        stack.enter_context(supervisor.serving(run, restarts=config.engine.restarts, trainer=trainer))
        sizes = config.engine if pushes else replace(config.engine, quantization="none")
        engines = [_engine(job, model, sizes, index, scratch, token) for index in range(sizes.replicas)]
        given = config.sandbox.urls
        sandbox_token = token_of_services() if given else _sandbox_token()
        sandboxes = [] if given else [_sandbox(job, each, sandbox_token) for each in range(config.sandbox.replicas)]
        (port,) = backend.ports("rollout", 1)
        rollout = rollout_service(scratch, port, log_path=run.logs / "rollout.log", hang_timeout_s=hang_timeout_s)
        growing = [backend.wrap_service("rollout", rollout)] if rollouts else []
        # The first tool service builds the index that the others read.
        supervisor.serve(*sandboxes[:1], *engines, *growing)
        supervisor.serve(*sandboxes[1:])
        urls = tuple(engine.url for engine in engines)
        router = router_service(
            config.engine,
            urls,
            log_path=run.logs / "router.log",
            ports=backend.ports("router", 2),
            expert_routes=uses_expert_routes(config),
            streams=rollouts and streams_entropies(),
            host=backend.host("router"),
            token=token,
        )
        if router is not None:
            supervisor.serve(backend.wrap_service("router", router))
        yield ServiceEndpoints(
            " ".join(given or (sandbox.url for sandbox in sandboxes)),
            urls,
            rollout_socket(scratch),
            router_url=router.url if router is not None else None,
            engine_token=token,
            sandbox_token=sandbox_token,
        )
        supervisor.check()


@contextmanager
def tool_service(job: Job) -> Iterator[tuple[str, str]]:
    """Start the tool service alone, on this machine, and yield its URL and token; or those of `sandbox.urls`.

    Raises ProcessDiedError, or UserError if a token is missing.
    """
    if job.config.sandbox.urls:
        yield " ".join(job.config.sandbox.urls), token_of_services()
        return
    (port,) = job.backend.ports("sandbox", 1)
    token = _sandbox_token()
    sandbox = sandbox_service(job.run, port, token, hang_timeout_s=job.config.engine.hang_timeout_s)
    with job.supervisor.serving(job.run, restarts=job.config.engine.restarts):
        job.supervisor.serve(sandbox)
        yield sandbox.url, token
        job.supervisor.check()


def _sandbox_token() -> str:
    """Return the token of the tool service: the user's, who may want to read its /metrics, or a new one."""
    return os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(32)


def _engine(job: Job, model: Path, sizes: EngineConfig, index: int, scratch: Path, token: str) -> ServiceSpec:
    config, backend, service = job.config, job.backend, f"engine-{index}"
    name = "engine" if config.engine.replicas == 1 else service
    options: dict[str, object] = {"enable-fp32-lm-head": None} if config.model.fp32_head else {}
    if config.rollout.priority == "age":
        options |= age_options(config.engine.options)
    spec = engine_service(
        model,
        sizes,
        dtype=config.model.dtype,
        seed=(config.seed + index) % 2**32,  # SGLang seeds numpy, which takes 32 bits
        log_path=job.run.logs / f"{name}.log",
        port=backend.ports(service, 1)[0],
        scratch=scratch,
        placement=backend.placement(config, index),
        name=name,
        expert_routes=uses_expert_routes(config),
        keeps_kv=config.rollout.across_push == "keep_kv",
        host=backend.host(service),
        token=token,
        options=options,
    )
    return replace(backend.wrap_service(service, spec), held_by=job.run.memory_lent)


def _sandbox(job: Job, index: int, token: str) -> ServiceSpec:
    backend, service = job.backend, f"sandbox-{index}"
    spec = sandbox_service(
        job.run,
        backend.ports(service, 1)[0],
        token,
        hang_timeout_s=job.config.engine.hang_timeout_s,
        host=backend.host(service),
        name="sandbox" if job.config.sandbox.replicas == 1 else service,
    )
    return backend.wrap_service(service, spec)


def sandbox_service(
    run: RunDirectory,
    port: int,
    token: str,
    *,
    hang_timeout_s: float,
    host: str = "127.0.0.1",
    name: str = "sandbox",
) -> ServiceSpec:
    """Return how to start the tool service. Its token is in its environment: all users can read its arguments."""
    options = ["--host", host, "--port", str(port), "--config", str(run.sandbox_config)]
    return ServiceSpec(
        name=name,
        url=f"http://{host}:{port}",
        command=[sys.executable, "-m", "tools_sandbox", *options],
        log=run.logs / f"{name}.log",
        environment={**os.environ, TOKEN_VARIABLE: token},
        startup_timeout_s=SANDBOX_STARTUP_S,
        hang_timeout_s=hang_timeout_s,
        grace_s=GRACE_S,
    )


def run_trainer(job: Job, module: str, *arguments: str, env: Mapping[str, str] = _NO_VARIABLES) -> None:
    """Run `python -m module RUN_DIR arguments...` on every trainer rank and wait for its end.

    Raises:
        ProcessDiedError: a rank or a service died; the message names the log.
    """
    command, needed = job.backend.ranks(module, [str(job.run.path), *arguments], job.config)
    environment = trainer_environment(job.config.platform, emulate_te=emulates_te(job.config))
    variables = {**environment, **needed, **env}
    parallel = job.config.parallel
    with watched_ranks(job.supervisor, job.run, parallel.world_size, parallel.collective_timeout_s):
        process = job.supervisor.start(module.rpartition(".")[2], command, env=variables)
        job.supervisor.wait(process, poll=job.show_events)
