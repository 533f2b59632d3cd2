"""Checks of one machine for a job: Python, packages, GPUs, disk, model files, isolation."""

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
from arpo_megatron.engine.version import SGLANG_VERSION
from arpo_megatron.errors import UserError
from arpo_megatron.hardware.placement import gpu_count
from arpo_megatron.hardware.transformer_engine import extension_fault
from arpo_megatron.jobs.checkpoint_dirs import SFT_CHECKPOINTS_KEPT, checkpoint_directories, kept, step_of
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.preflight.check import CheckResult, failure, ok, warning
from arpo_megatron.models.known import load_spec
from arpo_megatron.plan.memory import checkpoint_bytes, weights_bytes

ROUTER_PIN = "0.3.2"
PINS = {"torch": "2.13.0", "megatron-core": "0.16.1", "sglang": SGLANG_VERSION, "transformers": "5.12.1"}
"""Versions that this project is tested with. Others may work on a GPU, whose image has its own pins."""
_SPARE_BYTES = 2**30

PORTS = 32
"""Free ports that a machine offers to its services."""
CLOCK_SKEW_S = 5.0
"""Largest difference of clocks. Beyond it logs, deadlines and wandb's curves are wrong."""
_OTHER_RUNS = "choose a writable directory for runs, on a cluster one that all nodes share"

Check = tuple[str, Callable[[], CheckResult]]


def machine_checks(*, gpus: int, on_gpus: bool, config: JobConfig | None = None) -> list[Check]:
    """Return the checks of a machine or of a container image.

    Args:
        gpus: number that it must have for the job.
        on_gpus: the job computes on GPUs and needs their packages, even if this machine has none.
        config: config of the job; None for any job.
    """
    seen: list[Check] = [("gpu", lambda: check_gpus(gpus)), ("rdma", check_rdma)] if gpus else [("gpu", _no_gpus)]
    packages = ("packages", lambda: check_packages(config, on_gpus))
    installed: list[Check] = [("python", check_python), ("pins", lambda: check_pins(on_gpus)), packages]
    tools: list[Check] = [("sandbox", lambda: check_isolation(config))] if _calls_tools(config) else []
    return [*installed, *(seen if on_gpus else ()), *tools]


def _calls_tools(config: JobConfig | None) -> bool:
    """Return whether the job starts a tool service; a cold start alone, or one with `sandbox.urls`, does not."""
    return config is None or not (config.sft_only or config.sandbox.urls)


def job_checks(config: JobConfig, run: RunDirectory, secrets: Mapping[str, str] = MappingProxyType({})) -> list[Check]:
    """Return the checks of the files and services that a job needs.

    Args:
        config: config of the job.
        run: its directory, which need not exist yet.
        secrets: those of the cluster profile, if they are not in the environment yet.
    """
    return [
        ("model", lambda: check_model_files(config)),
        ("disk", lambda: check_disk(config, run)),
        ("wandb", lambda: check_wandb(config, secrets)),
    ]


def check_python() -> CheckResult:
    """Check for Python 3.11 or 3.12."""
    text = f"Python {platform.python_version()} at {sys.executable}"
    if (3, 11) <= sys.version_info[:2] <= (3, 12):
        return ok("python", text)
    return failure("python", text, "use Python 3.11 or 3.12")


def check_pins(on_gpus: bool) -> CheckResult:
    """Check the versions of pinned packages; on GPUs another version is a warning."""
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
    """Check the other packages that a job needs, so that no image lacks a package that is first used later."""
    modules = list(config.sandbox.preload) if config is not None and _calls_tools(config) else []
    missing = []
    engines = not config.sft_only if config else on_gpus
    if on_gpus:
        missing += [fault] if (fault := extension_fault()) else []
        modules += ["sgl_kernel"] * engines
        if config is not None and config.model.attention_backend == "flash":
            missing += _lacking("flash-attn-4", lambda found: True)
    if engines and (config is None or config.engine.router == "sglang"):
        missing += _lacking("sglang-router", lambda found: found == _numbers(ROUTER_PIN))
    if config is not None and config.monitor.wandb != "disabled":
        modules.append("wandb")
    missing += [name for name in modules if find_spec(name) is None]
    who = config.name if config else "a job on GPUs" if on_gpus else "a job"
    if missing:
        return failure(
            "packages", f"{who} needs {', '.join(missing)}, not installed here", "slurm/container/Dockerfile"
        )
    return ok("packages", f"all that {who} needs")


def _lacking(package: str, fits: Callable[[tuple[int, ...]], bool]) -> list[str]:
    """Return a package that is missing or has an unsupported version, as a list of its name."""
    try:
        have = version(package)
    except PackageNotFoundError:
        return [package]
    return [] if fits(_numbers(have)) else [f"another {package} than {have}"]


def _numbers(text: str) -> tuple[int, ...]:
    """Parse a version: 2.11.0+abc -> (2, 11, 0)."""
    return tuple(int(part) for part in text.split("+", maxsplit=1)[0].split(".") if part.isdecimal())


def check_gpus(wanted: int) -> CheckResult:
    """Check that nvidia-smi lists as many GPUs as the job needs, and that torch can use them."""
    if shutil.which("nvidia-smi") is None:
        return failure("gpu", "nvidia-smi is missing", "install the NVIDIA driver, or start the container with it")
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    asked = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    if asked.returncode:  # it prints errors on standard output, like GPUs
        output = " ".join((asked.stdout + asked.stderr).split())[:200]
        return failure("gpu", f"nvidia-smi ended with exit code {asked.returncode}: {output}", "fix the driver")
    lines = asked.stdout.splitlines()
    if len(lines) < wanted:
        return failure("gpu", f"{len(lines)} GPUs, gpus_per_node is {wanted}", "fix gpus_per_node or gpu_request")
    if (usable := gpu_count("auto")) < wanted:
        text = f"nvidia-smi lists {len(lines)} GPUs, torch can use {usable} of the {wanted} that the job needs"
        return failure("gpu", text, "install a torch for this driver's CUDA, and look at CUDA_VISIBLE_DEVICES")
    return ok("gpu", f"{len(lines)} x {lines[0]}")


def _no_gpus() -> CheckResult:
    return warning("gpu", "torch finds no GPU here", "look where the job will run, or give platform=cpu")


def check_rdma() -> CheckResult:
    """Check for InfiniBand or RoCE devices, without which NCCL between nodes is slow."""
    devices = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    if devices:
        return ok("rdma", ", ".join(devices))
    return warning(
        "rdma", "no RDMA device", "between nodes NCCL will use TCP; inside a container mount /dev/infiniband"
    )


def check_isolation(config: JobConfig | None) -> CheckResult:
    """Start a Python worker, and check that its isolation is as strong as `sandbox.isolation`."""
    from tools_sandbox import check

    wanted = (config.sandbox if config is not None else SandboxConfig()).isolation
    reached = check.check_isolation(wanted)
    if not reached.sufficient:
        text = f"sandbox.isolation={wanted}, but this machine reaches {reached.level} ({reached.missing})"
        fix = f"ask for user namespaces, or set sandbox.isolation={reached.level} if you trust the code"
        return failure("sandbox", text, f"{fix} (docs/guides/security.md)")
    text = f"python calls are isolated at level {reached.level}"
    if reached.warning:
        fix = "ask for user namespaces (docs/guides/security.md)"
        return warning("sandbox", f"{text} only: {reached.warning}", fix)
    return ok("sandbox", f"{text}, sandbox.isolation={wanted}")


def check_model_files(config: JobConfig) -> CheckResult:
    """Check for the files of weights and tokenizer."""
    path = config.model.path
    if config.model.is_generated:
        return ok("model", "generated for the run")
    if path is None:
        hub_id = config.model.hub_id
        return failure("model", f"{hub_id} is not here", f"hf download {hub_id} --local-dir DIR, and model.path=DIR")
    wanted = ("config.json", "tokenizer.json", *_weight_files(path))
    if missing := [name for name in wanted if not (path / name).is_file()]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return failure("model", f"{path} lacks {missing[0]}{more}", "fetch the whole model")
    return ok("model", str(path))


def _weight_files(path: Path) -> list[str]:
    """Return the names of the files with a model's tensors. Raises UserError if their index cannot be read."""
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return ["model.safetensors"]
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is damaged: {error!r}: fetch the whole model") from None


def check_disk(config: JobConfig, run: RunDirectory) -> CheckResult:
    """Check for disk space for the checkpoints that will be kept and one that is being written."""
    place = existing(run.path)
    free = shutil.disk_usage(place).free
    try:
        checkpoint = checkpoint_bytes(config, load_spec(config.model))
    except UserError as error:
        return warning(
            "disk", f"{free / 1e9:.1f} GB are free at {place}; the size of checkpoints is not known", str(error)
        )
    count, there = _checkpoints(config, run)
    wanted = max(checkpoint * (count + 1) - there, checkpoint) + _weights_bytes(config, run) + _SPARE_BYTES
    text = f"{free / 1e9:.1f} GB are free at {place}, {wanted / 1e9:.1f} GB are needed for checkpoints"
    text += f" in addition to the {there / 1e9:.1f} GB of this run" if there else ""
    if free < wanted:
        fewer = "" if config.sft_only else "keep fewer (train.keep_checkpoints, train.keep_best, train.keep_every), "
        return failure("disk", text, f"make room, {fewer}or set `runs` to another filesystem")
    return ok("disk", text)


def _weights_bytes(config: JobConfig, run: RunDirectory) -> int:
    """Return the bytes of weights without an optimizer that the run still stores (`train.weights_every`)."""
    every = config.train.weights_every
    if config.sft_only or not every:
        return 0
    left = config.train.steps // every - len(checkpoint_directories(run.weights))
    return max(0, left) * weights_bytes(config, load_spec(config.model))


def _checkpoints(config: JobConfig, run: RunDirectory) -> tuple[int, int]:
    """Return the most checkpoints that the run keeps, and the bytes of those that it has."""
    train, count = config.train, 0
    sft, own = checkpoint_directories(run.sft_checkpoints), checkpoint_directories(run.checkpoints)
    if config.sft.steps:  # its checkpoints stay
        count += len(sft) if run.sft_done else SFT_CHECKPOINTS_KEPT
    if not config.sft_only:
        newest = (step_of(own[-1]) or 0) if own else 0
        due = sorted({*range(train.save_every, train.steps, train.save_every), train.steps})
        all_steps = [*own, *(run.checkpoints / f"step_{step}" for step in due if step > newest)]
        # A job that is stopped saves one in addition to those that are due.
        count += max(len(kept(all_steps, train.keep_checkpoints, train.keep_every)), train.keep_checkpoints)
        count += train.keep_best
    return count, sum(file.stat().st_size for path in (*sft, *own) for file in path.rglob("*") if file.is_file())


def check_runs(directory: Path) -> CheckResult:
    """Check that run directories can be created: this process can write to the directory or its nearest parent."""
    there = existing(directory)
    try:
        with tempfile.TemporaryFile(dir=there):
            return ok("runs", str(directory.absolute()))
    except OSError as error:
        return failure("runs", f"{there} is not writable ({error.strerror})", _OTHER_RUNS)


def check_clock(directory: Path) -> CheckResult:
    """Compare this machine's clock with that of the filesystem of the run directories."""
    there = existing(directory)
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            skew = abs(os.fstat(file.fileno()).st_mtime - time.time())
    except OSError:
        return warning("clock", f"not checked, since {there} is not writable", _OTHER_RUNS)
    text = f"{skew:.2f} s from the clock of the filesystem at {there}"
    return ok("clock", text) if skew < CLOCK_SKEW_S else failure("clock", text, "synchronize the clocks (chrony, ntp)")


def existing(directory: Path) -> Path:
    """Return the directory, or its nearest parent that exists and can be read."""
    above = (directory, *directory.absolute().parents)
    return next(path for path in above if os.path.exists(path))  # noqa: PTH110  (Path.exists may raise PermissionError)


def check_wandb(config: JobConfig, secrets: Mapping[str, str]) -> CheckResult:
    """Check for a wandb login if metrics go online."""
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
