"""The roles of a job: tool service, engines and trainer ranks, started in order, watched, and ended together."""

import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from arpo_megatron.config import JobConfig
from arpo_megatron.machine import trainer_environment
from arpo_megatron.processes import GRACE_S, Roles
from arpo_megatron.rollout.messages import ServiceSettings
from arpo_megatron.rollout.push_gate import ENGINE_TOKEN
from arpo_megatron.rollout.routes import RouteShape
from arpo_megatron.rollout.server import engine_program, router_program
from arpo_megatron.rollout.service import RolloutHandle, rollout_program, rollout_socket
from arpo_megatron.run_directory import RunDirectory
from arpo_megatron.site import Site, ThisMachine
from arpo_megatron.supervisor import Program, Supervisor
from arpo_megatron.weights.shape import ModelShape
from tools_sandbox.config import TOKEN_VARIABLE

SANDBOX_STARTUP_S = 180.0
ENGINE_URLS = "ARPO_ENGINE_URLS"
"""Environment variable of the trainer: where the engines serve, separated by spaces."""
ROUTER_URL = "ARPO_ROUTER_URL"
"""Environment variable of the trainer: where the router before them serves; not set where there is none."""
ROLLOUT_SOCKET = "ARPO_ROLLOUT_SOCKET"
"""Environment variable of the trainer: where the rollout process listens."""
SANDBOX_URL = "ARPO_SANDBOX_URL"
"""Environment variable of the trainer: where the tool service serves."""


@dataclass(frozen=True, slots=True)
class Services:
    """Where tool service, engines and rollout process answer, and the router before the engines if there is one.

    Requests to engines and router bear `engine_token`: whoever reaches them could replace the policy's weights.
    """

    sandbox_url: str
    engine_urls: tuple[str, ...]
    rollout_socket: Path
    router_url: str | None = None
    engine_token: str | None = field(default=None, repr=False)

    @property
    def environment(self) -> dict[str, str]:
        """The variables through which the trainer learns of them."""
        router = {} if self.router_url is None else {ROUTER_URL: self.router_url}
        return {
            SANDBOX_URL: self.sandbox_url,
            ENGINE_URLS: " ".join(self.engine_urls),
            ROLLOUT_SOCKET: str(self.rollout_socket),
            ENGINE_TOKEN: self.engine_token or "",
            **router,
        }

    @classmethod
    def from_environment(cls) -> "Services":
        """What `environment` said to this process."""
        return cls(
            sandbox_url=os.environ[SANDBOX_URL],
            engine_urls=tuple(os.environ[ENGINE_URLS].split()),
            rollout_socket=Path(os.environ[ROLLOUT_SOCKET]),
            router_url=os.environ.get(ROUTER_URL),
            engine_token=os.environ.get(ENGINE_TOKEN) or None,
        )


@contextmanager
def services(
    config: JobConfig, run: RunDirectory, roles: Roles, model: Path, site: Site | None = None
) -> Iterator[Services]:
    """Start the tool service, engines that serve `model`, and the rollout process; inside the block they are kept up.

    Args:
        config: of the job.
        run: its directory.
        roles: its other processes.
        model: Hugging Face directory.
        site: where they run; None: on this machine.

    Raises:
        UserError: no model at `model`, or the config wants a router that is not installed.
        RoleDiedError: one of them did not come up in time; the message names its log.
    """
    site, hang_timeout_s = site or ThisMachine(), config.engine.hang_timeout_s
    token = secrets.token_urlsafe(32)
    with site.scratch() as scratch:
        engines = [_engine(config, run, model, index, site, scratch, token) for index in range(config.engine.replicas)]
        (port,) = site.ports("sandbox", 1)
        sandbox = site.place(
            "sandbox", sandbox_program(run, port, hang_timeout_s=hang_timeout_s, host=site.host("sandbox"))
        )
        (port,) = site.ports("rollout", 1)
        log = run.logs / "rollout.log"
        rollout = site.place(
            "rollout",
            rollout_program(scratch, port, log_path=log, hang_timeout_s=hang_timeout_s),
        )
        urls = tuple(engine.url for engine in engines)
        router = router_program(
            config.engine,
            urls,
            log_path=run.logs / "router.log",
            ports=site.ports("router", 2),
            routes=_replays(config),
            host=site.host("router"),
            token=token,
        )
        with Supervisor(run, roles, restarts=config.engine.restarts) as supervisor:
            supervisor.start(sandbox, *engines, rollout)
            if router is not None:
                supervisor.start(site.place("router", router))
            router_url = router.url if router is not None else None
            yield Services(sandbox.url, urls, rollout_socket(scratch), router_url, token)
            supervisor.check()


@contextmanager
def tool_service(config: JobConfig, run: RunDirectory, roles: Roles) -> Iterator[str]:
    """The tool service alone, on this machine; inside the block it is kept up at the URL. Raises RoleDiedError."""
    (port,) = ThisMachine().ports("sandbox", 1)
    program = sandbox_program(run, port, hang_timeout_s=config.engine.hang_timeout_s)
    with Supervisor(run, roles, restarts=config.engine.restarts) as supervisor:
        supervisor.start(program)
        yield program.url
        supervisor.check()


def _engine(
    config: JobConfig, run: RunDirectory, model: Path, index: int, site: Site, scratch: Path, token: str
) -> Program:
    name = "engine" if config.engine.replicas == 1 else f"engine-{index}"
    role = f"engine-{index}"
    program = engine_program(
        model,
        config.engine,
        dtype=config.model.dtype,
        seed=(config.seed + index) % 2**32,  # SGLang seeds numpy, which takes 32 bits
        log_path=run.logs / f"{name}.log",
        port=site.ports(role, 1)[0],
        scratch=scratch,
        placement=site.placement(config, index),
        name=name,
        routes=_replays(config),
        host=site.host(role),
        token=token,
    )
    return replace(site.place(role, program), held_by=run.memory_lent)


def sandbox_program(run: RunDirectory, port: int, *, hang_timeout_s: float, host: str = "127.0.0.1") -> Program:
    """How to start the tool service; it takes its token, if any, from this process's environment."""
    where = ["--host", host, "--port", str(port), "--config", str(run.sandbox_config)]
    return Program(
        name="sandbox",
        url=f"http://{host}:{port}",
        command=[sys.executable, "-m", "tools_sandbox", *where],
        log=run.logs / "sandbox.log",
        environment=dict(os.environ),
        startup_timeout_s=SANDBOX_STARTUP_S,
        hang_timeout_s=hang_timeout_s,
        grace_s=GRACE_S,
    )


def connect_rollouts(config: JobConfig, model: Path, services: Services) -> RolloutHandle:
    """A hold on the job's rollout process, with the tokenizer of `model`."""
    settings = ServiceSettings(
        engine_urls=services.engine_urls,
        router_url=services.router_url,
        sandbox_url=services.sandbox_url,
        tokenizer_path=model,
        seed=config.seed,
        request_timeout_s=config.engine.request_timeout_s,
        retry_for_s=config.engine.retry_for_s,
        routes=_routes(config, model),
        sandbox_token=os.environ.get(TOKEN_VARIABLE) or None,
        engine_token=services.engine_token,
    )
    return RolloutHandle.connect(services.rollout_socket, settings, patience_s=config.engine.retry_for_s)


def _replays(config: JobConfig) -> bool:
    return config.algorithm.router_replay == "rollout"


def _routes(config: JobConfig, model: Path) -> RouteShape | None:
    if not _replays(config):
        return None
    shape = ModelShape.from_hf(model)
    assert shape.experts is not None  # checked with the job's inputs
    return RouteShape(shape.layers, shape.experts.top_k)


def run_trainer(
    module: str,
    config: JobConfig,
    run: RunDirectory,
    roles: Roles,
    *,
    arguments: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    poll: Callable[[], None] = lambda: None,
    site: Site | None = None,
) -> None:
    """Run `python -m module RUN_DIR arguments...` on every trainer rank of `site` and wait, calling `poll` meanwhile.

    Raises:
        RoleDiedError: a rank or a service died; the message names the log.
    """
    name = module.rpartition(".")[2]
    command, needed = (site or ThisMachine()).ranks(module, [str(run.path), *arguments], config)
    variables = {**trainer_environment(config.platform), **needed, **(env or {})}
    roles.wait(roles.start(name, command, env=variables), poll=poll)
