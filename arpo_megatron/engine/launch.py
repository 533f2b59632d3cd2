"""Starting and ending SGLang servers, so that none can fail silently or be left behind.

A server runs in a session of its own. Whoever started it ends that whole process group; when the starting process dies
without doing so (even by kill -9), the server ends the group itself (see `sglang_main`).
"""

import contextlib
import os
import random
import socket
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
from arpo_megatron.engine.server.gate import ALIVE, ENGINE_TOKEN
from arpo_megatron.engine.server.main import LAUNCHER_PID_VARIABLE
from arpo_megatron.errors import UserError
from arpo_megatron.hardware.environment import process_environment, trainer_environment
from arpo_megatron.hardware.placement import ON_CPU, Placement
from arpo_megatron.utils.processes import last_lines, stop_groups
from arpo_megatron.utils.service_spec import ServiceSpec
from tools_sandbox.utils.temporary import TemporaryFolder

_FLAGS = ("--enable-metrics", "--skip-server-warmup")  # the health gate's own generation is the warm-up
_NO_OPTIONS: Mapping[str, object] = MappingProxyType({})
SCRATCH_PREFIX = "arpo-scratch-"
"""Of folders with sockets and other short-lived files, each locked by the process that started whoever uses it."""
_POLL_INTERVAL_S = 0.1
_CANDIDATES = 10000
"""Ports among which free ones are looked for."""
_ROUTER_STARTUP_S = 180.0
_ROUTER_HANG_S = 5.0
"""The router only forwards: nothing excuses a pause, and all engines wait for it."""
_ROUTER_OPTIONS: dict[str, object] = {
    "policy": "manual",
    "assignment-mode": "min_load",
    "health-check-endpoint": ALIVE,
    "health-check-interval-secs": 1,
    "health-check-timeout-secs": 5,
    "health-failure-threshold": 2,
    "health-success-threshold": 1,
    "worker-startup-check-interval": 1,
    "log-level": "error",
}


class EngineStartError(UserError):
    """The server ended, or was not healthy in time; the message holds the last lines of its log."""


@dataclass(frozen=True, slots=True)
class EngineHandle:
    """A running server. Also a context manager that stops it.

    Attributes:
        program: how it was started.
        process: the server's main process, leader of its session and process group.
        scratch: private temporary directory of the engine (its IPC sockets), removed by `stop`.
        startup_s: seconds from launch to healthy.
    """

    program: ServiceSpec
    process: "subprocess.Popen[bytes]"
    scratch: TemporaryFolder
    startup_s: float

    @property
    def url(self) -> str:
        """http://host:port."""
        return self.program.url

    def alive(self) -> bool:
        """Whether the server's main process still runs (the engine ends it when one of its workers fails)."""
        return self.process.poll() is None

    def stop(self) -> None:
        """End every process of the engine, within 5 seconds; a second call changes nothing.

        The group is killed outright: a server keeps nothing worth saving, and its orderly end waits 5 s or more.
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
    routes: bool = False,
    options: Mapping[str, object] = _NO_OPTIONS,
) -> EngineHandle:
    """Start SGLang on `model_path` and return when it has answered a generation.

    Args:
        model_path: Hugging Face directory with weights and tokenizer.
        engine: sizes and deadlines.
        dtype: "float32" or "bfloat16".
        seed: seed of the engine's own sampling.
        log_path: file for the engine's output; parent directories are made, an old file is continued.
        port: TCP port on 127.0.0.1; 0 picks a free one.
        placement: which GPUs to use, if any.
        routes: as in `engine_program`.
        options: likewise.

    Raises:
        UserError: no model at `model_path`.
        EngineStartError: the server ended or missed `engine.startup_timeout_s`. Nothing is left running.
    """
    scratch = TemporaryFolder(SCRATCH_PREFIX)
    process: subprocess.Popen[bytes] | None = None
    try:
        program = engine_program(
            model_path,
            engine,
            dtype=dtype,
            seed=seed,
            log_path=log_path,
            port=port or free_ports(1)[0],
            scratch=scratch.path,
            placement=placement,
            routes=routes,
            options=options,
        )
        started = time.monotonic()
        process = program.start()
        _wait_until_healthy(process, program)
    except BaseException:
        if process is not None:
            stop_groups([process], 0.0)
        scratch.remove()
        raise
    return EngineHandle(program, process, scratch, time.monotonic() - started)


def engine_program(
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
    routes: bool = False,
    host: str = "127.0.0.1",
    token: str | None = None,
    options: Mapping[str, object] = _NO_OPTIONS,
) -> ServiceSpec:
    """How to start one SGLang server; `launch_engine` says what the arguments are, besides these.

    Args:
        host: address of its machine, on which it listens.
        scratch: directory for its temporary files (IPC sockets: a short path).
        name: of the role.
        routes: of a mixture of experts: it can tell to which of them it sent each token.
        token: that requests must bear; None: whoever reaches it may do anything with it.
        options: SGLang's options (`engine_options`) that are to be others than the config says.

    Raises:
        UserError: no model at `model_path`.
    """
    if not (model_path / "config.json").is_file():
        raise UserError(f"{model_path} holds no Hugging Face model (config.json is missing)")
    words = engine_options(engine, placement, dtype)
    words |= {"model-path": model_path, "random-seed": seed, "host": host, "port": port}
    if routes:
        words["enable-return-routed-experts"] = None
    words |= options
    arguments = [str(word) for name, value in words.items() for word in (f"--{name}", value) if word is not None]
    return ServiceSpec(
        name=name,
        url=f"http://{host}:{port}",
        command=[sys.executable, "-m", "arpo_megatron.engine.server.main", *arguments, *_FLAGS],
        log=log_path,
        environment=_environment(scratch, placement, engine.replicas) | _with(token),
        startup_timeout_s=engine.startup_timeout_s,
        hang_timeout_s=engine.hang_timeout_s,
        alive=ALIVE,  # 7 ms on a CPU
        bound=False,
    )


def router_program(
    engine: EngineConfig,
    urls: Sequence[str],
    *,
    log_path: Path,
    ports: Sequence[int],
    routes: bool = False,
    host: str = "127.0.0.1",
    token: str | None = None,
) -> ServiceSpec | None:
    """SGLang's own router before the engines at `urls`; None where the config wants none or one engine needs none.

    Requests that bear the same routing key go to one engine, chosen when the key is first seen: the one with the fewest
    requests. (Its policy `cache_aware` goes by the load when that differs much between engines, within a tree too:
    siblings can come to an engine without their fork point.)

    Args:
        engine: `router` and deadlines.
        urls: of the engines.
        log_path: file for its output.
        ports: two free ones, for requests and for its metrics.
        host: address of its machine, on which it listens.
        routes: expert routes will be asked for. The router (0.3.2) drops those fields of a request: there is none then.
        token: of the engines, and its own.

    Raises:
        UserError: engine.router=sglang, but it is not installed.
    """
    installed = find_spec("sglang_router") is not None
    if engine.router == "sglang" and not installed:
        raise UserError("engine.router=sglang: pip install sglang-router==0.3.2")
    if engine.router == "none" or routes or not installed or (engine.router == "auto" and len(urls) == 1):
        return None
    where: dict[str, object] = {
        "host": host,
        "port": ports[0],
        "prometheus-host": "127.0.0.1",
        "prometheus-port": ports[1],
    }
    options = where | _ROUTER_OPTIONS | {"request-timeout-secs": round(engine.request_timeout_s)}
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    return ServiceSpec(
        name="router",
        url=f"http://{host}:{ports[0]}",
        # Repeating is the client's part. A circuit breaker would keep an engine out for long after a weight push.
        command=[
            *(sys.executable, "-m", "arpo_megatron.engine.server.router", *words),
            *("--disable-retries", "--disable-circuit-breaker", "--worker-urls", *urls),
        ],
        log=log_path,
        environment=dict(os.environ) | _with(token),
        startup_timeout_s=_ROUTER_STARTUP_S,
        hang_timeout_s=min(_ROUTER_HANG_S, engine.hang_timeout_s),
        ready="/readiness",
        alive="/liveness",
    )


def engine_options(engine: EngineConfig, placement: Placement, dtype: str) -> dict[str, object]:
    """SGLang's options that follow from the config and the machine; a value of None is an option without one.

    Pages of one token, because trajectories fork anywhere.
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
    if not placement.gpus:
        # An idle scheduler would otherwise spin on a core that the trainer needs.
        return options | {"device": "cpu", "attention-backend": "torch_native", "sleep-on-idle": None}
    # Every decoding batch is replayed as a CUDA graph, also the largest.
    options |= {"device": "cuda", "base-gpu-id": placement.engine_gpu, "cuda-graph-max-bs": engine.max_running_requests}
    if engine.attention_backend != "auto":
        options["attention-backend"] = engine.attention_backend
    elif dtype == "float32":
        options["attention-backend"] = "triton"  # the others know half precision only
    if engine.quantization != "none":
        # The load format that also quantizes what a push brings.
        options |= {"quantization": engine.quantization, "load-format": "flash_rl"}
    if placement.shared:
        options["enable-memory-saver"] = None  # memory can be given back and taken again
    if engine.deterministic:
        options["enable-deterministic-inference"] = None
    return options


def _with(token: str | None) -> dict[str, str]:
    """Also says that there is none: a job of which this process is a part may have one."""
    return {ENGINE_TOKEN: token or ""}


def _environment(scratch: Path, placement: Placement, replicas: int) -> dict[str, str]:
    # What a launcher has that is itself a trainer is not for the engine: its memory saver, for one, refuses segments
    # that grow.
    trainers = trainer_environment("auto" if placement.gpus else "cpu").items()
    environment = {name: value for name, value in os.environ.items() if (name, value) not in trainers}
    environment[LAUNCHER_PID_VARIABLE] = str(os.getpid())
    environment["TMPDIR"] = str(scratch)
    environment["PYTHONUNBUFFERED"] = "1"
    # An answer comes in one piece: sglang 0.5.12 keeps of additions, such as entropies, those of the last piece alone.
    environment["SGLANG_FORCE_STREAM_INTERVAL"] = str(2**31 - 1)
    environment.update(process_environment("auto" if placement.gpus else "cpu"))
    if not placement.gpus:
        # Freed memory is kept: the pages of a push's tensors would cost as much as the tensors themselves, every time.
        environment |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
        # SGLang compiles the repetition penalty, an element-wise product: on a CPU a minute of C++ in mid-request.
        environment["TORCH_COMPILE_DISABLE"] = "1"
    # Half the cores for the schedulers, which decode; the rest for servers, detokenizers and whoever trains.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // (2 * replicas))))
    # A launcher that is itself a torchrun rank: its rendezvous is not the engine's.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    return environment


def _wait_until_healthy(process: "subprocess.Popen[bytes]", program: ServiceSpec) -> None:
    """Poll /health, which answers 200 only after a generation has gone through the whole engine."""
    deadline = time.monotonic() + program.startup_timeout_s
    session = requests.Session()
    session.trust_env = False  # a cluster's HTTP_PROXY knows nothing of 127.0.0.1
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise EngineStartError(_with_log(program, f"SGLang ended with code {process.returncode} while starting"))
        with contextlib.suppress(requests.ConnectionError, requests.Timeout):  # not listening yet
            left_s = max(1.0, deadline - time.monotonic())
            if session.get(program.url + program.ready, timeout=left_s).status_code == 200:
                return
        time.sleep(_POLL_INTERVAL_S)
    text = f"SGLang was not healthy after {program.startup_timeout_s:g} s (engine.startup_timeout_s)"
    raise EngineStartError(_with_log(program, text))


def _with_log(program: ServiceSpec, text: str) -> str:
    return f"{text}; log {program.log}, last lines:\n{last_lines(program.log)}"


def free_ports(count: int, host: str = "127.0.0.1", among: tuple[int, int] | None = None) -> list[int]:
    """So many different TCP ports of this machine's address `host` that are free now, between the two of `among`.

    They lie below the range from which the kernel serves whoever names none: any connection on the machine could take
    one of those between this look and the service's own (seen: an engine that found its port in use).

    Raises:
        UserError: there are not so many.
    """
    found: list[int] = []
    end = _first_ephemeral_port()
    first, last = among or (end - _CANDIDATES, end - 1)
    for port in random.SystemRandom().sample(range(first, last + 1), last + 1 - first):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            found.append(port)
        if len(found) == count:
            return found
    raise UserError(f"of the TCP ports {first} to {last} not {count} are free on {host}")


def _first_ephemeral_port() -> int:
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        first = 0
    return first if first > 2 * _CANDIDATES else 32768  # Linux's own; a range that begins so low leaves no room below
