"""Starting and ending one SGLang server, so that it can neither fail silently nor be left behind.

The server runs in a session of its own. `EngineHandle.stop` ends that whole process group; when the launching process
dies without calling it (even by kill -9), the server ends the group itself (see `sglang_main`).
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import requests

from arpo_megatron.config import EngineConfig
from arpo_megatron.errors import UserError
from arpo_megatron.machine import ON_CPU, Placement, role_environment
from arpo_megatron.rollout.sglang_main import LAUNCHER_PID_VARIABLE

_FLAGS = ("--enable-metrics", "--skip-server-warmup")  # the health gate's own generation is the warm-up
_POLL_INTERVAL_S = 0.1
_LOG_LINES_IN_ERRORS = 15
_REAP_DEADLINE_S = 4.0


class EngineStartError(UserError):
    """The server ended, or was not healthy in time; the message holds the last lines of its log."""


@dataclass(frozen=True, slots=True)
class EngineHandle:
    """A running server. Also a context manager that stops it.

    Attributes:
        url: http://host:port.
        process: the server's main process, leader of its session and process group.
        log_path: stdout and stderr of all of the engine's processes.
        scratch: private temporary directory of the engine (its IPC sockets), removed by `stop`.
        startup_s: seconds from launch to healthy.
    """

    url: str
    process: "subprocess.Popen[bytes]"
    log_path: Path
    scratch: Path
    startup_s: float

    def alive(self) -> bool:
        """Whether the server's main process still runs (the engine ends it when one of its workers fails)."""
        return self.process.poll() is None

    def stop(self) -> None:
        """End every process of the engine, within 5 seconds; a second call changes nothing.

        The group is killed outright: a server keeps nothing worth saving, and its orderly end waits 5 s or more.
        """
        _kill_group(self.process)
        shutil.rmtree(self.scratch, ignore_errors=True)

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
    context_length: int | None = None,
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
        context_length: longest request in tokens; None: what the model's config says.

    Raises:
        UserError: no model at `model_path`.
        EngineStartError: the server ended or missed `engine.startup_timeout_s`. Nothing is left running.
    """
    if not (model_path / "config.json").is_file():
        raise UserError(f"{model_path} holds no Hugging Face model (config.json is missing)")
    port = port or _free_port()
    url = f"http://127.0.0.1:{port}"
    options = engine_options(engine, placement, dtype)
    options |= {"model-path": model_path, "random-seed": seed, "port": port}
    if context_length is not None:
        options["context-length"] = context_length
    arguments = [word for name, value in options.items() for word in (f"--{name}", value) if word is not None]
    scratch = Path(tempfile.mkdtemp(prefix="arpo-engine-"))
    log_path.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "arpo_megatron.rollout.sglang_main", *map(str, arguments), *_FLAGS],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(scratch, placement),
            start_new_session=True,
        )
    try:
        _wait_until_healthy(process, url, engine.startup_timeout_s, log_path)
    except BaseException:
        _kill_group(process)
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return EngineHandle(url, process, log_path, scratch, time.monotonic() - started)


def engine_options(engine: EngineConfig, placement: Placement, dtype: str) -> dict[str, object]:
    """SGLang's options that follow from the config and the machine; a value of None is an option without one.

    Pages of one token, because trajectories fork anywhere.
    """
    options: dict[str, object] = {
        "host": "127.0.0.1",
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
    if engine.deterministic:
        options["enable-deterministic-inference"] = None
    return options


def _environment(scratch: Path, placement: Placement) -> Mapping[str, str]:
    environment = dict(os.environ)
    environment[LAUNCHER_PID_VARIABLE] = str(os.getpid())
    environment["TMPDIR"] = str(scratch)
    environment["PYTHONUNBUFFERED"] = "1"
    environment.update(role_environment("auto" if placement.gpus else "cpu"))
    # Half the cores for the scheduler, which decodes; the rest for the server, the detokenizer and whoever trains.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 2)))
    # A launcher that is itself a torchrun rank: its rendezvous is not the engine's.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    return environment


def _wait_until_healthy(process: "subprocess.Popen[bytes]", url: str, timeout_s: float, log_path: Path) -> None:
    """Poll /health, which answers 200 only after a generation has gone through the whole engine."""
    deadline = time.monotonic() + timeout_s
    session = requests.Session()
    session.trust_env = False  # a cluster's HTTP_PROXY knows nothing of 127.0.0.1
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise EngineStartError(
                f"SGLang ended with code {process.returncode} while starting{_log_excerpt(log_path)}"
            )
        with contextlib.suppress(requests.ConnectionError, requests.Timeout):  # not listening yet
            if session.get(f"{url}/health", timeout=max(1.0, deadline - time.monotonic())).status_code == 200:
                return
        time.sleep(_POLL_INTERVAL_S)
    raise EngineStartError(
        f"SGLang was not healthy after {timeout_s:g} s (engine.startup_timeout_s){_log_excerpt(log_path)}"
    )


def _log_excerpt(log_path: Path) -> str:
    lines = log_path.read_text(errors="replace").splitlines()[-_LOG_LINES_IN_ERRORS:]
    return f"; log {log_path}, last lines:\n" + "\n".join(f"  {line}" for line in lines)


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill the group that `process` leads and wait until no member is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + _REAP_DEADLINE_S
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
