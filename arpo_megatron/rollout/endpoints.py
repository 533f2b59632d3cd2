"""Addresses of a job's services, and the trainer's connection to the rollout process."""

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
"""Environment variable of the trainer: URLs of the engines, separated by spaces."""

ROUTER_URL = "ARPO_ROUTER_URL"
"""Environment variable of the trainer: URL of SGLang's router; not set if there is none."""

ROLLOUT_SOCKET = "ARPO_ROLLOUT_SOCKET"
"""Environment variable of the trainer: socket of the rollout process."""

SANDBOX_URL = "ARPO_SANDBOX_URL"
"""Environment variable of the trainer: URLs of the tool services, separated by spaces."""


@dataclass(frozen=True, slots=True)
class ServiceEndpoints:
    """Addresses of tool service, engines, rollout process and router."""

    sandbox_url: str
    """URLs of the tool services, separated by spaces."""
    engine_urls: tuple[str, ...]
    rollout_socket: Path
    router_url: str | None = None
    """None if there is no router."""
    engine_token: str | None = field(default=None, repr=False)
    """Bearer token of engines and router. Without it anyone who can reach them could replace the policy's weights."""
    sandbox_token: str | None = field(default=None, repr=False)
    """Bearer token of the tool service."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that pass the addresses and tokens to the trainer."""
        router = {} if self.router_url is None else {ROUTER_URL: self.router_url}
        return {
            SANDBOX_URL: self.sandbox_url,
            ENGINE_URLS: " ".join(self.engine_urls),
            ROLLOUT_SOCKET: str(self.rollout_socket),
            ENGINE_TOKEN_VARIABLE: self.engine_token or "",
            TOKEN_VARIABLE: self.sandbox_token or "",
            **router,
        }

    @classmethod
    def from_environment(cls) -> "ServiceEndpoints":
        """Read the variables of `environment` in the trainer. Raises KeyError if one is missing."""
        return cls(
            sandbox_url=os.environ[SANDBOX_URL],
            engine_urls=tuple(os.environ[ENGINE_URLS].split()),
            rollout_socket=Path(os.environ[ROLLOUT_SOCKET]),
            router_url=os.environ.get(ROUTER_URL),
            engine_token=os.environ.get(ENGINE_TOKEN_VARIABLE) or None,
            sandbox_token=os.environ.get(TOKEN_VARIABLE) or None,
        )


def connect_rollouts(config: JobConfig, model: Path, services: ServiceEndpoints) -> RolloutHandle:
    """Connect to the job's rollout process, which will use the tokenizer of `model`."""
    settings = ServiceSettings(
        engine_urls=services.engine_urls,
        router_url=services.router_url,
        sandbox_url=services.sandbox_url,
        tokenizer_path=model,
        seed=config.seed,
        request_timeout_s=config.engine.request_timeout_s,
        retry_for_s=config.engine.retry_for_s,
        expert_routes=_expert_routes(config, model),
        sandbox_token=services.sandbox_token,
        engine_token=services.engine_token,
        tools=config.rollout.tools,
        protocol=config.rollout.protocol,
        tool_call_parser=config.rollout.tool_call_parser,
        admission=config.rollout.admission,
        priority=config.rollout.priority,
        keeps_kv=config.rollout.across_push == "keep_kv",
        environment=config.rollout.environment,
        environment_params=config.rollout.environment_params,
    )
    return RolloutHandle.connect(services.rollout_socket, settings, patience_s=config.engine.retry_for_s)


def uses_expert_routes(config: JobConfig) -> bool:
    """Return whether the trainer replays the expert routes of rollouts, so engines must return them."""
    return config.algorithm.router_replay == "rollout"


def _expert_routes(config: JobConfig, model: Path) -> ExpertRouteSpec | None:
    if not uses_expert_routes(config):
        return None
    spec = ModelSpec.from_hf(model)
    assert spec.experts is not None  # checked with the job's inputs
    return ExpertRouteSpec(spec.layers, spec.experts.top_k)
