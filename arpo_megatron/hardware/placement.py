"""Devices of a job's processes: the GPUs of this machine, or its CPUs if it has none or `platform=cpu`.

Each trainer rank takes one of the first GPUs. Engines take the GPUs after those (split) or share the trainer's
(colocated). `engine.placement=auto` shares them if there are too few for both. Colocated engines release their memory
while the trainer trains; they do so on a CPU too, so that the same code runs. Placement is a pure function of the
config and the number of GPUs, so every process computes the same.
"""

from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from arpo_megatron.config import EngineConfig, JobConfig, ModelConfig, Platform
from arpo_megatron.errors import UserError
from arpo_megatron.hardware.transformer_engine import (
    INSTALL_EXTENSION,
    check_emulation,
    extension_fault,
    extension_installed,
)

COLOCATED_MEMORY_FRACTION = 0.3
"""Share of a GPU's memory for an engine that shares it with the trainer."""
SPLIT_MEMORY_FRACTION = 0.6
"""Share of a GPU's memory for an engine without a trainer rank."""
FLASH_TORCH = "2.13"
"""First torch whose FLASH backend was checked, in its source, with a block mask in both passes."""
BLOCKWISE_CUDA = (12, 9)
"""First version of CUDA whose cuBLAS has products of blockwise FP8."""


@dataclass(frozen=True, slots=True)
class Placement:
    """GPUs of the job and of one engine on a machine."""

    gpus: int
    """Number of the machine's GPUs that the job may use; 0: the job runs on CPUs."""
    engine_gpu: int
    """First GPU of the engine."""
    colocated: bool
    """Whether the engine and trainer ranks take turns on the same devices."""

    @classmethod
    def of(cls, config: JobConfig, gpus: int) -> "Placement":
        """Return the placement of the first engine on a machine with `gpus` GPUs."""
        colocated = takes_turns(config, not gpus or gpus >= gpus_for_both(config))
        return cls(gpus, 0 if colocated or not gpus else config.parallel.world_size, colocated)

    def of_engine(self, index: int, engine: EngineConfig) -> "Placement":
        """Return the placement of replica `index`, whose GPUs follow those of the replicas before it."""
        return replace(self, engine_gpu=self.engine_gpu + index * engine.tensor) if self.gpus else self

    def memory_fraction(self, engine: EngineConfig) -> float:
        """Return the share of the device's memory for the engine."""
        if engine.memory_fraction is not None:
            return engine.memory_fraction
        return COLOCATED_MEMORY_FRACTION if self.colocated else SPLIT_MEMORY_FRACTION


def gpus_for_both(config: JobConfig) -> int:
    """Return the number of GPUs that trainer ranks and engines need without sharing."""
    return config.parallel.world_size + config.engine.tensor * config.engine.replicas


def takes_turns(config: JobConfig, enough: bool) -> bool:
    """Return whether engines share the trainer's devices. `auto` shares unless there is `enough` for both."""
    return config.engine.placement == "colocated" or (config.engine.placement == "auto" and not enough)


ON_CPU = Placement(gpus=0, engine_gpu=0, colocated=False)


@cache
def _visible_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpu_count(platform: Platform) -> int:
    """Return the number of this machine's GPUs that a job may use."""
    return 0 if platform == "cpu" else _visible_gpus()


def emulates_te(config: JobConfig) -> bool:
    """Return whether trainer ranks run Transformer Engine's layers on a CPU."""
    wanted = config.model.fp8 != "none" or config.model.transformer_impl == "transformer_engine"
    return wanted and not gpu_count(config.platform)


def placement(config: JobConfig) -> Placement:
    """Return the placement of the first engine on this machine."""
    return Placement.of(config, gpu_count(config.platform))


def check_machine(config: JobConfig) -> None:
    """Check that this machine can run the job.

    Raises:
        UserError: it has no GPU, too few GPUs, none that supports the job's FP8 recipe or attention kernels, or no
            Transformer Engine that the job can use.
    """
    gpus = gpu_count(config.platform)
    if not gpus:
        _check_cpu(config)
        return
    ranks, engines = config.parallel.world_size, config.engine.tensor * config.engine.replicas
    for name, wanted in (("trainer ranks", ranks), ("engine.tensor * engine.replicas", engines)):
        if wanted > gpus:
            raise UserError(f"{wanted} {name} need {wanted} GPUs, but torch finds {gpus} (platform=cpu needs none)")
    if config.engine.placement == "split" and ranks + engines > gpus:
        raise UserError(
            f"engine.placement=split needs {ranks} GPUs for the trainer and {engines} for engines, but torch "
            f"finds {gpus}: set engine.placement=colocated"
        )
    colocated = Placement.of(config, gpus).colocated
    if config.rollout.across_push == "keep_kv" and colocated:
        raise UserError(
            "rollout.across_push=keep_kv needs engine.placement=split: engines that share GPUs with the trainer "
            "release the memory of their KV cache"
        )
    if config.sync.transport == "ipc" and not colocated:
        raise UserError("sync.transport=ipc needs engine.placement=colocated: engines on the trainer's GPUs")
    _check_transformer_engine(config.model)
    if config.model.fp8 != "none":
        _check_fp8(config.model.fp8)
    if config.parallel.recomputes("layernorm") and not (config.model.dtype == "bfloat16" and extension_installed()):
        # Megatron's own layers would keep the norms, which the plan of the job's memory does not count.
        raise UserError(
            "parallel.recompute_modules=layernorm needs Transformer Engine's layers: model.dtype=bfloat16 and "
            f"{INSTALL_EXTENSION}"
        )
    if config.model.attention_backend == "flash":
        check_flash()
    if config.engine.quantization == "fp8":
        # For older and for newer GPUs SGLang changes the layout of weights or scales after loading.
        _check_capability("engine.quantization=fp8", (8, 9), below=(10, 0))


def _check_cpu(config: JobConfig) -> None:
    if emulates_te(config):
        check_emulation()
    if config.optimizer.offload or config.sft.optimizer.offload:
        raise UserError("optimizer.offload=true needs a GPU: without one, all state is in host memory already")
    if config.model.attention_backend == "flash":
        raise UserError("model.attention_backend=flash needs a GPU: give model.attention_backend=auto")


def _check_transformer_engine(model: ModelConfig) -> None:
    if model.fp8 != "none":
        key = f"model.fp8={model.fp8}"
    elif model.transformer_impl == "transformer_engine":
        key = "model.transformer_impl=transformer_engine"
    elif model.dtype == "bfloat16" and extension_installed():
        key = "model.dtype=bfloat16 with Transformer Engine"
    else:
        return
    if fault := extension_fault():
        raise UserError(f"{key} needs {fault}")


def _check_fp8(recipe: str) -> None:
    import torch

    _check_capability(f"model.fp8={recipe}", (9, 0) if recipe == "blockwise" else (8, 9))
    cuda = torch.version.cuda or "0"
    if recipe == "blockwise" and tuple(map(int, cuda.split(".")[:2])) < BLOCKWISE_CUDA:
        raise UserError(
            f"model.fp8=blockwise needs a torch for CUDA {'.'.join(map(str, BLOCKWISE_CUDA))} or newer, but this is "
            f"one for {cuda}; model.fp8=current needs none"
        )


def check_flash() -> None:
    """Raise UserError, with what it lacks, unless this machine can compile FlexAttention's FLASH kernels."""
    import torch
    from torch.torch_version import TorchVersion

    key = "model.attention_backend=flash"
    # On Blackwell a tile has 256 queries, two blocks of the mask.
    if (found := torch.cuda.get_device_capability())[0] != 9:
        raise UserError(f"{key} needs a Hopper GPU (compute capability 9.0), but this GPU has {found[0]}.{found[1]}")
    if TorchVersion(torch.__version__) < FLASH_TORCH:
        raise UserError(f"{key} needs torch {FLASH_TORCH} or newer, not {torch.__version__}")
    try:
        version("flash-attn-4")
    except PackageNotFoundError:
        raise UserError(f"{key} needs FlashAttention 4: pip install --pre flash-attn-4") from None


def _check_capability(key: str, needed: tuple[int, int], below: tuple[int, int] | None = None) -> None:
    import torch

    found = torch.cuda.get_device_capability()
    if found < needed or (below is not None and found >= below):
        first, last, own = (".".join(map(str, each or ())) for each in (needed, below, found))
        bound = f", below {last}" if below else ""
        raise UserError(f"{key} needs compute capability {first}{bound}, but this GPU has {own}")
