"""What one machine must have for a job: Python, pins, GPUs, disk, model files, isolation."""

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from arpo_megatron.config import JobConfig, SandboxConfig
from arpo_megatron.engine.server.cpu import SGLANG_VERSION
from arpo_megatron.errors import UserError
from arpo_megatron.hardware.placement import gpu_count
from arpo_megatron.jobs.checkpoint_dirs import COLD_START_KEPT, checkpoint_directories, kept, step_of
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.preflight.check import CheckResult, failure, ok, warning
from arpo_megatron.models.known import load_spec
from arpo_megatron.plan.memory import checkpoint_bytes

ROUTER_PIN = "0.3.2"
TE_VERSIONS = ((2, 9), (2, 12))
"""Of Transformer Engine: from the first, and below the second (Megatron-Core 0.16.1)."""
PINS = {"torch": "2.13.0", "megatron-core": "0.16.1", "sglang": SGLANG_VERSION, "transformers": "5.12.1"}
"""What this project is checked against; another version may work on a GPU, whose image has its own pins."""
_SPARE_BYTES = 2**30

PORTS = 32
"""Free ports that a machine offers to its services."""
CLOCK_SKEW_S = 5.0
"""Clocks further apart than this make logs, deadlines and wandb's curves lie."""

Check = tuple[str, Callable[[], CheckResult]]


def machine_checks(*, gpus: int, on_gpus: bool, config: JobConfig | None = None) -> list[Check]:
    """Of a machine or of a container image.

    Args:
        gpus: that it is to have for the job.
        on_gpus: the job computes on GPUs, so it wants their packages, whether or not any is here.
        config: of the job; None: of any.
    """
    seen: list[Check] = [("gpu", lambda: check_gpus(gpus)), ("rdma", check_rdma)] if gpus else [("gpu", _no_gpus)]
    packages = ("packages", lambda: check_packages(config, on_gpus))
    installed: list[Check] = [("python", check_python), ("pins", lambda: check_pins(on_gpus)), packages]
    tools: list[Check] = [("sandbox", lambda: check_isolation(config))] if _calls_tools(config) else []
    return [*installed, *(seen if on_gpus else ()), *tools]


def _calls_tools(config: JobConfig | None) -> bool:
    """A cold start alone starts no tool service; nothing that is missing for one keeps it from its nodes."""
    return config is None or not config.sft_only


def job_checks(config: JobConfig, run: RunDirectory, secrets: Mapping[str, str] = MappingProxyType({})) -> list[Check]:
    """Of the files and services that a recipe wants.

    Args:
        config: of the job.
        run: its directory, which need not be there yet.
        secrets: of the cluster profile, where they are not yet in the environment.
    """
    return [
        ("model", lambda: check_model_files(config)),
        ("disk", lambda: check_disk(config, run)),
        ("wandb", lambda: check_wandb(config, secrets)),
    ]


def check_python() -> CheckResult:
    """3.11 or 3.12."""
    text = f"Python {platform.python_version()} at {sys.executable}"
    if (3, 11) <= sys.version_info[:2] <= (3, 12):
        return ok("python", text)
    return failure("python", text, "Python 3.11 or 3.12 is wanted")


def check_pins(on_gpus: bool) -> CheckResult:
    """The packages of a role; on GPUs another version is a warning."""
    found, odd = [], []
    for package, pin in PINS.items():
        try:
            have = version(package).split("+")[0]
        except PackageNotFoundError:
            return failure("pins", f"{package} is not installed", f"pip install {package}=={pin}, or another image")
        found.append(f"{package} {have}")
        if have != pin:
            odd.append(f"{package} {have} instead of {pin}")
    if not odd:
        return ok("pins", ", ".join(found))
    level = warning if on_gpus else failure
    return level("pins", ", ".join(odd), "install the pinned versions (requirements.lock), or know why not")


def check_packages(config: JobConfig | None, on_gpus: bool) -> CheckResult:
    """What this recipe, or on GPUs any, wants besides the pins: an image lacks nothing that is first missed later."""
    modules = list(config.sandbox.preload) if config is not None and _calls_tools(config) else []
    missing = []
    engines = not config.sft_only if config else on_gpus
    if on_gpus:
        missing += _lacking("transformer-engine", lambda found: TE_VERSIONS[0] <= found < TE_VERSIONS[1])
        modules += ["sgl_kernel"] * engines
    if engines and (config is None or config.engine.router == "sglang"):
        missing += _lacking("sglang-router", lambda found: found == _numbers(ROUTER_PIN))
    if config is not None and config.monitor.wandb != "disabled":
        modules.append("wandb")
    missing += [name for name in modules if find_spec(name) is None]
    who = config.name if config else "a job on GPUs" if on_gpus else "a job"
    if missing:
        return failure(
            "packages", f"{who} wants {', '.join(missing)}, not installed here", "slurm/container/Dockerfile"
        )
    return ok("packages", f"all that {who} wants")


def _lacking(package: str, fits: Callable[[tuple[int, ...]], bool]) -> list[str]:
    """Its name, where it is not installed or has another version."""
    try:
        have = version(package)
    except PackageNotFoundError:
        return [package]
    return [] if fits(_numbers(have)) else [f"another {package} than {have}"]


def _numbers(text: str) -> tuple[int, ...]:
    """2.11.0+abc -> (2, 11, 0)."""
    return tuple(int(part) for part in text.split("+", maxsplit=1)[0].split(".") if part.isdecimal())


def check_gpus(wanted: int) -> CheckResult:
    """nvidia-smi lists as many as the job wants, and torch can use them."""
    if shutil.which("nvidia-smi") is None:
        return failure("gpu", "nvidia-smi is not there", "the node has no NVIDIA driver, or the container hides it")
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    asked = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    if asked.returncode:  # it tells its errors on standard output, a line each, as it does GPUs
        said = " ".join((asked.stdout + asked.stderr).split())[:200]
        return failure("gpu", f"nvidia-smi ended with exit code {asked.returncode}: {said}", "fix the driver")
    lines = asked.stdout.splitlines()
    if len(lines) < wanted:
        return failure("gpu", f"{len(lines)} GPUs, the profile says {wanted}", "fix gpus_per_node or gpu_request")
    if (usable := gpu_count("auto")) < wanted:
        text = f"nvidia-smi lists {len(lines)} GPUs, torch can use {usable} of the {wanted} that are wanted"
        return failure("gpu", text, "install a torch for this driver's CUDA, and look at CUDA_VISIBLE_DEVICES")
    return ok("gpu", f"{len(lines)} x {lines[0]}")


def _no_gpus() -> CheckResult:
    return warning("gpu", "torch sees none here", "look where the job will run, or give platform=cpu")


def check_rdma() -> CheckResult:
    """InfiniBand or RoCE devices, without which NCCL between nodes is slow."""
    devices = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    if devices:
        return ok("rdma", ", ".join(devices))
    return warning(
        "rdma", "no RDMA device", "between nodes NCCL will use TCP; inside a container mount /dev/infiniband"
    )


def check_isolation(config: JobConfig | None) -> CheckResult:
    """What holds the code that the model writes, tried for real, and whether the recipe puts up with it."""
    from tools_sandbox.config import Limits, PythonConfig
    from tools_sandbox.python_tool.pool import PythonPool
    from tools_sandbox.python_tool.walls import Level

    wanted = Level[(config.sandbox if config is not None else SandboxConfig()).isolation.upper()]
    pool = PythonPool(PythonConfig(preload=(), isolation="limits"), Limits())
    try:
        pool.start()
        walls = pool.walls
    finally:
        pool.close()
    if walls is None:
        raise AssertionError("a pool that has started knows its walls")
    if (reached := walls.level()) < wanted:
        missing = walls.missing_for(wanted)
        text = f"level {reached.name.lower()}, sandbox.isolation wants {wanted.name.lower()}: {missing}"
        return failure("sandbox", text, "ask for user namespaces, or lower sandbox.isolation (docs/security.md)")
    return ok("sandbox", f"level {reached.name.lower()}, at least {wanted.name.lower()} is asked for")


def check_model_files(config: JobConfig) -> CheckResult:
    """Weights and tokenizer."""
    path = config.model.path
    if config.model.is_generated:
        return ok("model", "made on the spot")
    if path is None:
        hub_id = config.model.hub_id
        return failure("model", f"{hub_id} is not here", f"hf download {hub_id} --local-dir DIR, and model.path=DIR")
    wanted = ("config.json", "tokenizer.json", *_weight_files(path))
    if missing := [name for name in wanted if not (path / name).is_file()]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return failure("model", f"{path} lacks {missing[0]}{more}", "fetch the whole model")
    return ok("model", str(path))


def _weight_files(path: Path) -> list[str]:
    """Names of the files that hold a model's tensors. Raises UserError where their index cannot be read."""
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return ["model.safetensors"]
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is damaged: {error!r}: fetch the whole model") from None


def check_disk(config: JobConfig, run: RunDirectory) -> CheckResult:
    """Room for the checkpoints that will be kept, and the one that is being written, beside those that are there."""
    place = existing(run.path)
    free = shutil.disk_usage(place).free
    try:
        checkpoint = checkpoint_bytes(config, load_spec(config.model))
    except UserError as error:
        return warning("disk", f"{free / 1e9:.1f} GB are free at {place}; how many are wanted is not known", str(error))
    count, there = _checkpoints(config, run)
    wanted = max(checkpoint * (count + 1) - there, checkpoint) + _SPARE_BYTES
    text = f"{free / 1e9:.1f} GB are free at {place}, {wanted / 1e9:.1f} GB are wanted for checkpoints"
    text += f" beside the {there / 1e9:.1f} GB of this run's" if there else ""
    if free < wanted:
        fewer = "" if config.sft_only else "keep fewer (train.keep_checkpoints, train.keep_every), "
        return failure("disk", text, f"make room, {fewer}or set `runs` to another filesystem")
    return ok("disk", text)


def _checkpoints(config: JobConfig, run: RunDirectory) -> tuple[int, int]:
    """How many the run keeps at most, and the bytes of those that it has already."""
    train, count = config.train, 0
    cold, own = checkpoint_directories(run.sft_checkpoints), checkpoint_directories(run.checkpoints)
    if config.sft.steps:  # they stay when it is done
        count += len(cold) if run.sft_done else COLD_START_KEPT
    if not config.sft_only:
        newest = (step_of(own[-1]) or 0) if own else 0
        due = sorted({*range(train.save_every, train.steps, train.save_every), train.steps})
        all_steps = [*own, *(run.checkpoints / f"step_{step}" for step in due if step > newest)]
        # A job that is stopped saves besides, so the newest may be more than those that are due.
        count += max(len(kept(all_steps, train.keep_checkpoints, train.keep_every)), train.keep_checkpoints)
    return count, sum(file.stat().st_size for path in (*cold, *own) for file in path.rglob("*") if file.is_file())


def check_clock(directory: Path) -> CheckResult:
    """This machine's clock is that of the filesystem of the run directories, which dates a new file."""
    with tempfile.TemporaryFile(dir=existing(directory)) as file:
        skew = abs(os.fstat(file.fileno()).st_mtime - time.time())
    text = f"{skew:.2f} s from the clock of the filesystem at {existing(directory)}"
    return ok("clock", text) if skew < CLOCK_SKEW_S else failure("clock", text, "have the clocks set (chrony, ntp)")


def existing(directory: Path) -> Path:
    """The directory, or the nearest above it that is there."""
    return next(path for path in (directory, *directory.absolute().parents) if path.exists())


def check_wandb(config: JobConfig, secrets: Mapping[str, str]) -> CheckResult:
    """A login, where metrics go there."""
    if config.monitor.wandb != "online":
        return ok("wandb", config.monitor.wandb)
    if (source := secrets.get("WANDB_API_KEY", "env")) != "env":
        return ok("wandb", f"online, the nodes read the key from {source}")
    netrc = Path.home() / ".netrc"
    if os.environ.get("WANDB_API_KEY") or (netrc.is_file() and "wandb" in netrc.read_text(errors="replace")):
        return ok("wandb", "online, with a login")
    return failure(
        "wandb", "online, but there is no login", "WANDB_API_KEY under `secrets` of the profile, or wandb login"
    )
