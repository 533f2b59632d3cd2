"""What one machine must have for a job: Python, pins, GPUs, disk, model files, isolation."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from arpo_megatron.config import JobConfig
from arpo_megatron.doctor.finding import Finding, failure, ok, warning
from arpo_megatron.rollout.cpu_standins import SGLANG_VERSION

PINS = {"torch": "2.13.0", "megatron-core": "0.16.1", "sglang": SGLANG_VERSION, "transformers": "5.12.1"}
"""What this project is checked against; another version may work on a GPU, whose image has its own pins."""
STATE_OVER_WEIGHTS = 7.0
"""Bytes of a checkpoint over those of the model's bfloat16 files: weights, float32 master copy and two moments."""
_SPARE_BYTES = 2**30

Check = tuple[str, Callable[[], Finding]]


def machine_checks(*, gpus: int) -> list[Check]:
    """Of a machine that is to have `gpus` GPUs for the job (0: it runs on CPUs)."""
    on_gpu: list[Check] = [("gpu", lambda: check_gpus(gpus)), ("rdma", check_rdma)] if gpus else []
    return [("python", check_python), ("pins", lambda: check_pins(gpus)), *on_gpu, ("sandbox", check_isolation)]


def job_checks(config: JobConfig, run_parent: Path) -> list[Check]:
    """Of the files and services that a recipe wants; `run_parent` is where its run directory will be or is."""
    return [
        ("model", lambda: check_model_files(config)),
        ("disk", lambda: check_disk(config, run_parent)),
        ("wandb", lambda: check_wandb(config)),
    ]


def check_python() -> Finding:
    """3.11 or 3.12."""
    text = f"Python {platform.python_version()} at {sys.executable}"
    if (3, 11) <= sys.version_info[:2] <= (3, 12):
        return ok("python", text)
    return failure("python", text, "Python 3.11 or 3.12 is wanted")


def check_pins(gpus: int) -> Finding:
    """The packages of a role."""
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
    level = warning if gpus else failure
    return level("pins", ", ".join(odd), "install the pinned versions (requirements.lock), or know why not")


def check_gpus(wanted: int) -> Finding:
    """nvidia-smi lists as many as the job wants."""
    if shutil.which("nvidia-smi") is None:
        return failure("gpu", "nvidia-smi is not there", "the node has no NVIDIA driver, or the container hides it")
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False).stdout.splitlines()
    if len(lines) < wanted:
        return failure("gpu", f"{len(lines)} GPUs, the profile says {wanted}", "mend gpus_per_node or gpu_request")
    return ok("gpu", f"{len(lines)} x {lines[0]}")


def check_rdma() -> Finding:
    """InfiniBand or RoCE devices, without which NCCL between nodes is slow."""
    devices = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    if devices:
        return ok("rdma", ", ".join(devices))
    return warning(
        "rdma", "no RDMA device", "between nodes NCCL will use TCP; inside a container mount /dev/infiniband"
    )


def check_isolation() -> Finding:
    """Whether foreign code can be given namespaces of its own."""
    probe = ["unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "true"]
    if shutil.which("unshare") and not subprocess.run(probe, capture_output=True, timeout=30, check=False).returncode:
        return ok("sandbox", "user, network and process namespaces are allowed")
    return warning(
        "sandbox",
        "no namespaces for the code that the model writes",
        "ask for kernel.unprivileged_userns_clone=1, or read the tool service's notes on what else holds it",
    )


def check_model_files(config: JobConfig) -> Finding:
    """Weights and tokenizer."""
    path = config.model.path
    if path is None:
        return ok("model", "made on the spot")
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
    if missing or not list(path.glob("*.safetensors")):
        return failure("model", f"{path} lacks {missing[0] if missing else '*.safetensors'}", "fetch the whole model")
    return ok("model", str(path))


def check_disk(config: JobConfig, directory: Path) -> Finding:
    """Room for the checkpoints that are kept, and the one that is being written."""
    place = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    weights = sum(file.stat().st_size for file in config.model.path.glob("*.safetensors")) if config.model.path else 0
    wanted = int(STATE_OVER_WEIGHTS * weights * (config.train.keep_checkpoints + 1)) + _SPARE_BYTES
    text = f"{free / 1e9:.1f} GB are free at {place}, {wanted / 1e9:.1f} GB are wanted for checkpoints"
    if free < wanted:
        return failure("disk", text, "make room, lower train.keep_checkpoints, or set `runs` to another filesystem")
    return ok("disk", text)


def check_wandb(config: JobConfig) -> Finding:
    """A login, where metrics go there."""
    if config.monitor.wandb != "online":
        return ok("wandb", config.monitor.wandb)
    netrc = Path.home() / ".netrc"
    if os.environ.get("WANDB_API_KEY") or (netrc.is_file() and "wandb" in netrc.read_text(errors="replace")):
        return ok("wandb", "online, with a login")
    return failure(
        "wandb", "online, but there is no login", "WANDB_API_KEY under `secrets` of the profile, or wandb login"
    )
