"""Where the services of a job answer, and a connection to the rollout process."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from arpo_megatron.config import JobConfig
from arpo_megatron.engine.expert_routes import ExpertRouteSpec
from arpo_megatron.engine.wire.endpoints import ENGINE_TOKEN_VARIABLE
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.rollout.handle import RolloutHandle
from arpo_megatron.rollout.messages import ServiceSettings
from tools_sandbox.config import TOKEN_VARIABLE

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
            ENGINE_TOKEN_VARIABLE: self.engine_token or "",
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
            engine_token=os.environ.get(ENGINE_TOKEN_VARIABLE) or None,
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
        expert_routes=_expert_routes(config, model),
        sandbox_token=os.environ.get(TOKEN_VARIABLE) or None,
        engine_token=services.engine_token,
    )
    return RolloutHandle.connect(services.rollout_socket, settings, patience_s=config.engine.retry_for_s)


def _replays(config: JobConfig) -> bool:
    return config.algorithm.router_replay == "rollout"


def _expert_routes(config: JobConfig, model: Path) -> ExpertRouteSpec | None:
    if not _replays(config):
        return None
    spec = ModelSpec.from_hf(model)
    assert spec.experts is not None  # checked with the job's inputs
    return ExpertRouteSpec(spec.layers, spec.experts.top_k)
