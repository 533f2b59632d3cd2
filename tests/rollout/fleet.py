"""Real engines, the router, the tool service and the rollout process, supervised as in a job, with proxies between."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from arpo_megatron.config import EngineConfig
from arpo_megatron.engine.launch import engine_service, router_service
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.health import read_health
from arpo_megatron.launch.services import sandbox_service
from arpo_megatron.launch.supervisor import Supervisor
from arpo_megatron.rollout.handle import RolloutHandle
from arpo_megatron.rollout.messages import ServiceSettings
from arpo_megatron.rollout.service import rollout_service, rollout_socket
from arpo_megatron.utils.ports import free_ports
from arpo_megatron.utils.service_spec import ServiceSpec
from tests.faults import CutProxy, Proxies, ToolProxy

TOKEN = secrets.token_urlsafe(16)


ENGINES = 2


ENGINE = EngineConfig(
    replicas=ENGINES,
    router="sglang",
    max_total_tokens=65536,
    memory_fraction=0.1,
    max_running_requests=64,
    startup_timeout_s=400,
    hang_timeout_s=20,  # a machine that runs all tests at once answers late
    retry_for_s=300,
)


@dataclass
class Fleet:
    """The services of a job."""

    run: RunDirectory
    supervisor: Supervisor
    engines: list[ServiceSpec]
    sandbox: ServiceSpec
    router: ServiceSpec
    scratch: Path
    model: Path

    def pid(self, name: str) -> int | None:
        """Return the process id of a service; None if it is down."""
        return {role.name: role.pid for role in read_health(self.run) if role.up}.get(name)

    def restarts(self) -> int:
        """Return the number of restarts of all services."""
        return sum(process.restarts for process in read_health(self.run))

    @contextmanager
    def rollouts(self, *, routed: bool, seed: int) -> Iterator[tuple[RolloutHandle, list[CutProxy], ToolProxy]]:
        """Connect to the rollout process, which reaches all services through proxies."""
        with Proxies() as proxies:
            tools = proxies.tools(self.sandbox.url, seed=seed)
            targets = [self.router] if routed else self.engines
            cuts = [proxies.cutting(program.url) for program in targets]
            engine_urls = tuple(engine.url for engine in self.engines) if routed else tuple(cut.url for cut in cuts)
            settings = ServiceSettings(
                engine_urls=engine_urls,
                router_url=cuts[0].url if routed else None,
                engine_token=TOKEN,
                sandbox_url=tools.url,
                sandbox_token=TOKEN,
                tokenizer_path=self.model,
                seed=4,
                retry_for_s=ENGINE.retry_for_s,
            )
            with RolloutHandle.connect(rollout_socket(self.scratch), settings) as handle:
                yield handle, cuts, tools


@contextmanager
def started_fleet(model: Path, folder: Path) -> Iterator[Fleet]:
    run, scratch = RunDirectory(folder), folder / "s"
    scratch.mkdir()
    run.sandbox_config.write_text("{}")
    ports = free_ports(ENGINES + 4)
    engines = [
        engine_service(
            model,
            ENGINE,
            dtype="float32",
            seed=1,
            log_path=run.logs / f"engine-{index}.log",
            port=ports[index],
            scratch=scratch,
            name=f"engine-{index}",
            token=TOKEN,
        )
        for index in range(ENGINES)
    ]
    sandbox = sandbox_service(run, ports[-1], TOKEN, hang_timeout_s=ENGINE.hang_timeout_s)
    rollout = rollout_service(
        scratch, ports[-2], log_path=run.logs / "rollout.log", hang_timeout_s=ENGINE.hang_timeout_s
    )
    urls = [engine.url for engine in engines]
    router = router_service(ENGINE, urls, log_path=run.logs / "router.log", ports=ports[ENGINES:-2], token=TOKEN)
    assert router is not None
    with Supervisor(run.logs) as supervisor, supervisor.serving(run, restarts=100):
        supervisor.serve(sandbox, *engines, rollout)
        supervisor.serve(router)
        yield Fleet(run, supervisor, engines, sandbox, router, scratch, model)
