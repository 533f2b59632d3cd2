"""Starting and stopping SGLang servers and SGLang's router.

A server runs in its own session. The process that starts it also kills the whole process group. If that process dies
first, even by kill -9, the server kills the group itself (see `engine.server.main`).
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Self

import requests

from arpo_megatron.config import EngineConfig
from arpo_megatron.engine.options import extra_options
from arpo_megatron.engine.wire.endpoints import (
    AWAIT_PUSH_VARIABLE,
    ENGINE_TOKEN_VARIABLE,
    HEALTH_PATH,
    KEEP_KV_VARIABLE,
    LAUNCHER_PID_VARIABLE,
)
from arpo_megatron.errors import UserError
from arpo_megatron.hardware.environment import LOOPBACK_ENVIRONMENT, process_environment, trainer_environment
from arpo_megatron.hardware.fp8 import BLOCK
from arpo_megatron.hardware.placement import ON_CPU, Placement
from arpo_megatron.utils.ports import free_ports, is_loopback
from arpo_megatron.utils.processes import last_lines, stop_groups
from arpo_megatron.utils.service_spec import ServiceSpec
from arpo_megatron.utils.temporary import temporary_folder
from tools_sandbox.utils.temporary import TemporaryFolder

SCRATCH_PREFIX = "arpo-scratch-"
"""Name prefix of folders with sockets and other short-lived files. The process that starts their user locks them."""

FP8_OPTIONS: Mapping[str, object] = MappingProxyType(
    {
        "quantization": "fp8",
        "json-model-override-args": json.dumps(
            {
                "quantization_config": {
                    "quant_method": "fp8",
                    "activation_scheme": "dynamic",
                    "weight_block_size": [BLOCK, BLOCK],
                }
            }
        ),
    }
)
"""SGLang's options for parameters in FP8 with a scale for each block, as if the model's files were quantized."""

_FLAGS = ("--enable-metrics", "--skip-server-warmup")  # the first generation is the warm-up
_NO_OPTIONS: Mapping[str, object] = MappingProxyType({})
_POLL_INTERVAL_S = 0.1
_ROUTER_STARTUP_S = 180.0
_ROUTER_HANG_S = 5.0
"""The router only forwards requests, so a pause means that it hangs; all engines wait for it."""
_ROUTER_OPTIONS: dict[str, object] = {
    "policy": "manual",
    "assignment-mode": "min_load",
    "health-check-endpoint": HEALTH_PATH,
    "health-check-interval-secs": 1,
    "health-check-timeout-secs": 5,
    "health-failure-threshold": 2,
    "health-success-threshold": 1,
    "worker-startup-check-interval": 1,
    "log-level": "error",
}


class EngineStartError(UserError):
    """The server ended or was not healthy in time; the message has the last lines of its log."""


@dataclass(frozen=True, slots=True)
class EngineHandle:
    """A running server. Also a context manager that stops it."""

    spec: ServiceSpec
    """How it was started."""
    process: "subprocess.Popen[bytes]"
    """The server's main process, which leads its session and process group."""
    scratch: TemporaryFolder
    """The engine's private temporary directory (its IPC sockets), removed by `stop`."""
    startup_s: float
    """Seconds from launch to healthy."""

    @property
    def url(self) -> str:
        """Base address of the server's HTTP interface, http://host:port."""
        return self.spec.url

    def alive(self) -> bool:
        """Return whether the server's main process is running; it ends if one of its workers fails."""
        return self.process.poll() is None

    def stop(self) -> None:
        """Kill the engine's process group; a second call changes nothing.

        There is no graceful shutdown: it would take 5 s or more, and a server has nothing to save.
        """
        stop_groups([self.process], 0.0)
        self.scratch.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.stop()


def launch_engine(
    model_path: Path,
    engine: EngineConfig,
    *,
    dtype: str,
    seed: int,
    log_path: Path,
    port: int = 0,
    placement: Placement = ON_CPU,
    expert_routes: bool = False,
    keeps_kv: bool = False,
    options: Mapping[str, object] = _NO_OPTIONS,
) -> EngineHandle:
    """Start SGLang on `model_path` and return when it has answered a generation; an FP8 engine, an empty batch.

    Args:
        model_path: Hugging Face directory with weights and tokenizer.
        engine: sizes and deadlines.
        dtype: "float32" or "bfloat16".
        seed: seed of the engine's sampling.
        log_path: file to which the engine's output is appended; parent directories are created.
        port: TCP port on 127.0.0.1; 0 picks a free one.
        placement: the GPUs to use, if any.
        expert_routes: see `engine_service`.
        keeps_kv: see `engine_service`.
        options: see `engine_service`.

    Raises:
        UserError: no model at `model_path`, or no temporary folder.
        EngineStartError: the server ended or missed `engine.startup_timeout_s`. Nothing is left running.
    """
    scratch = temporary_folder(SCRATCH_PREFIX)
    process: subprocess.Popen[bytes] | None = None
    try:
        spec = engine_service(
            model_path,
            engine,
            dtype=dtype,
            seed=seed,
            log_path=log_path,
            port=port or free_ports(1)[0],
            scratch=scratch.path,
            placement=placement,
            expert_routes=expert_routes,
            keeps_kv=keeps_kv,
            options=options,
        )
        started = time.monotonic()
        process = spec.start()
        _wait_until_healthy(process, spec)
    except BaseException:
        if process is not None:
            stop_groups([process], 0.0)
        scratch.remove()
        raise
    return EngineHandle(spec, process, scratch, time.monotonic() - started)


def engine_service(
    model_path: Path,
    engine: EngineConfig,
    *,
    dtype: str,
    seed: int,
    log_path: Path,
    port: int,
    scratch: Path,
    placement: Placement = ON_CPU,
    name: str = "engine",
    expert_routes: bool = False,
    keeps_kv: bool = False,
    host: str = "127.0.0.1",
    token: str | None = None,
    options: Mapping[str, object] = _NO_OPTIONS,
) -> ServiceSpec:
    """Return how to start one SGLang server. `launch_engine` documents the other arguments.

    Args:
        host: address on which it listens.
        scratch: directory for its temporary files; the path must be short (IPC sockets).
        name: name of the service.
        expert_routes: let requests ask for the experts that each token was sent to.
        keeps_kv: a push does not empty the KV cache.
        token: bearer token that requests must have; None: anyone who can reach the server may use it.
        options: SGLang options that override `engine_options`.

    Raises:
        UserError: no model at `model_path`.
    """
    if not (model_path / "config.json").is_file():
        raise UserError(f"{model_path} holds no Hugging Face model (config.json is missing)")
    sglang_options = engine_options(engine, placement, dtype)
    sglang_options |= {"model-path": model_path, "random-seed": seed, "host": host, "port": port}
    if expert_routes:
        sglang_options["enable-return-routed-experts"] = None
    sglang_options |= extra_options(engine.options)
    sglang_options |= options
    return ServiceSpec(
        name=name,
        url=f"http://{host}:{port}",
        command=[sys.executable, "-m", "arpo_megatron.engine.server.main", *_arguments(sglang_options), *_FLAGS],
        log=log_path,
        environment={
            **_environment(scratch, placement, engine, host),
            **_token_variable(token),
            KEEP_KV_VARIABLE: "1" if keeps_kv else "",
        },
        startup_timeout_s=engine.startup_timeout_s,
        hang_timeout_s=engine.hang_timeout_s,
        alive=HEALTH_PATH,  # 7 ms on a CPU
        bound=False,
    )


def router_service(
    engine: EngineConfig,
    urls: Sequence[str],
    *,
    log_path: Path,
    ports: Sequence[int],
    expert_routes: bool = False,
    streams: bool = False,
    host: str = "127.0.0.1",
    token: str | None = None,
) -> ServiceSpec | None:
    """Return how to start SGLang's router in front of the engines; None if the job has none.

    Requests with the same routing key go to one engine, chosen at the key's first request: the engine with the fewest
    requests. The router's policy `cache_aware` would also balance load within a tree, so siblings could reach an engine
    that does not have their fork point in its cache.

    Args:
        engine: router and deadlines.
        urls: URLs of the engines.
        log_path: file for its output.
        ports: two free ones, for requests and for its metrics.
        host: address on which it listens.
        expert_routes: requests will ask for expert routes. There is no router then: version 0.3.2 drops those fields.
        streams: rollouts will stream entropies. `engine.router=auto` then has no router, because version 0.3.2 drops
            the interval of a stream, and rollouts would send two requests per segment.
        token: bearer token of the engines, and of the router itself.

    Raises:
        UserError: engine.router=sglang, but it is not installed.
    """
    installed = find_spec("sglang_router") is not None
    if engine.router == "sglang" and not installed:
        raise UserError("engine.router=sglang: pip install sglang-router==0.3.2")
    unneeded = engine.router == "auto" and (streams or len(urls) == 1)
    if engine.router == "none" or expert_routes or not installed or unneeded:
        return None
    addresses: dict[str, object] = {
        "host": host,
        "port": ports[0],
        "prometheus-host": "127.0.0.1",
        "prometheus-port": ports[1],
    }
    options = addresses | _ROUTER_OPTIONS | {"request-timeout-secs": round(engine.request_timeout_s)}
    return ServiceSpec(
        name="router",
        url=f"http://{host}:{ports[0]}",
        # Clients retry. A circuit breaker would exclude an engine for a long time after a weight push.
        command=[
            *(sys.executable, "-m", "arpo_megatron.engine.server.router", *_arguments(options)),
            *("--disable-retries", "--disable-circuit-breaker", "--worker-urls", *urls),
        ],
        log=log_path,
        environment=dict(os.environ) | _token_variable(token),
        startup_timeout_s=_ROUTER_STARTUP_S,
        hang_timeout_s=min(_ROUTER_HANG_S, engine.hang_timeout_s),
        ready="/readiness",
        alive="/liveness",
    )


def engine_options(engine: EngineConfig, placement: Placement, dtype: str) -> dict[str, object]:
    """Return the SGLang options for a config on a machine; a value of None stands for a flag.

    Pages hold one token, because trajectories fork anywhere.
    """
    options: dict[str, object] = {
        "weight-version": 0,
        "tp-size": engine.tensor,
        "max-running-requests": engine.max_running_requests,
        "mem-fraction-static": placement.memory_fraction(engine),
        "page-size": 1,
        "dtype": dtype,
        "log-level": "info",
        "log-level-http": "warning",
    }
    if engine.max_total_tokens is not None:
        options["max-total-tokens"] = engine.max_total_tokens
    if engine.expert > 1:
        options["ep-size"] = engine.expert
    if engine.quantization == "fp8":
        # SGLang cannot quantize by blocks itself. The weights, bytes and scales, come with the first push; the gate
        # stays closed until then.
        options |= {**FP8_OPTIONS, "load-format": "dummy"}
    if not placement.gpus:
        # Without sleep-on-idle, an idle scheduler spins on a core that the trainer needs.
        return options | {"device": "cpu", "attention-backend": "torch_native", "sleep-on-idle": None}
    # CUDA graphs for every batch size, up to the largest.
    options |= {"device": "cuda", "base-gpu-id": placement.engine_gpu, "cuda-graph-max-bs": engine.max_running_requests}
    if engine.attention_backend != "auto":
        options["attention-backend"] = engine.attention_backend
    elif dtype == "float32":
        options["attention-backend"] = "triton"  # the other backends support half precision only
    if placement.colocated:
        options["enable-memory-saver"] = None  # lets the trainer borrow the memory
    if engine.deterministic:
        options["enable-deterministic-inference"] = None
    return options


def _arguments(options: Mapping[str, object]) -> list[str]:
    return [str(word) for name, value in options.items() for word in (f"--{name}", value) if word is not None]


def _token_variable(token: str | None) -> dict[str, str]:
    """Return the variable also for None: this process may have inherited the token of a surrounding job."""
    return {ENGINE_TOKEN_VARIABLE: token or ""}


def _environment(scratch: Path, placement: Placement, engine: EngineConfig, host: str) -> dict[str, str]:
    # If the launcher is itself a trainer, its settings are not for the engine. Its CUDA memory saver, for example,
    # rejects segments that grow.
    trainers = trainer_environment("auto" if placement.gpus else "cpu").items()
    environment = {name: value for name, value in os.environ.items() if (name, value) not in trainers}
    environment[LAUNCHER_PID_VARIABLE] = str(os.getpid())
    environment["TMPDIR"] = str(scratch)
    environment["PYTHONUNBUFFERED"] = "1"
    environment[AWAIT_PUSH_VARIABLE] = "1" if engine.quantization != "none" else ""
    # Requests that do not stream are answered in one piece: of customized_info (entropies) sglang 0.5.12 keeps only
    # the last piece's values.
    environment["SGLANG_FORCE_STREAM_INTERVAL"] = str(2**31 - 1)
    environment.update(process_environment("auto" if placement.gpus else "cpu"))
    if is_loopback(host):
        environment.update(LOOPBACK_ENVIRONMENT)
    if not placement.gpus:
        # Keep freed memory: mapping pages for a push's tensors would cost as much as the tensors themselves, each time.
        environment |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
        # SGLang compiles the repetition penalty, an element-wise product. On a CPU that is a minute of C++ compilation
        # during a request.
        environment["TORCH_COMPILE_DISABLE"] = "1"
        if engine.tensor > 1:  # SGLang's default is one rank per NUMA node, and it refuses more ranks than nodes
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = _cores_per_rank(sorted(os.sched_getaffinity(0)), engine.tensor)
    # Half of the cores for the schedulers, which decode; the rest for servers, detokenizers and the trainer.
    ranks = engine.replicas * engine.tensor
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // (2 * ranks))))
    # If this process is a trainer rank, its rendezvous is not the engine's. A second server, of gRPC, would answer
    # without the job's token.
    rendezvous = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in (*rendezvous, "SGLANG_GRPC_PORT"):
        environment.pop(name, None)
    return environment


def _cores_per_rank(cores: Sequence[int], ranks: int) -> str:
    """Divide cores among an engine's ranks in SGLang's notation, `0,1|2,3`; ranks share cores if there are too few."""
    share = max(1, len(cores) // ranks)
    starts = (rank * share % len(cores) for rank in range(ranks))
    return "|".join(",".join(map(str, cores[start : start + share])) for start in starts)


def _wait_until_healthy(process: "subprocess.Popen[bytes]", spec: ServiceSpec) -> None:
    """Poll /health, which answers 200 after a generation, or after an empty batch if the gate is closed (FP8)."""
    deadline = time.monotonic() + spec.startup_timeout_s
    session = requests.Session()
    session.trust_env = False  # a cluster's HTTP_PROXY cannot reach 127.0.0.1
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise EngineStartError(_with_log(spec, f"SGLang ended with code {process.returncode} while starting"))
        with contextlib.suppress(requests.ConnectionError, requests.Timeout):  # not listening yet
            left_s = max(1.0, deadline - time.monotonic())
            if session.get(spec.url + spec.ready, timeout=left_s).status_code == 200:
                return
        time.sleep(_POLL_INTERVAL_S)
    text = f"SGLang was not healthy after {spec.startup_timeout_s:g} s (engine.startup_timeout_s)"
    raise EngineStartError(_with_log(spec, text))


def _with_log(spec: ServiceSpec, text: str) -> str:
    return f"{text}; last lines of {spec.log}:\n{last_lines(spec.log)}"
