"""Which processors the roles of a job use: the GPUs of this machine where it has any, unless the config says `cpu`.

Trainer ranks take the first GPUs, one each. Engines take those behind them (split), or share the trainer's (colocated);
`engine.placement=auto` shares where there are too few for both. Colocated engines give their memory back while the
trainer trains; on a CPU too, so that the same steps are taken there. It is all a pure function of the config and the
number of GPUs, so every role finds the same answer.
"""

from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec

from arpo_megatron.config import EngineConfig, JobConfig, Platform
from arpo_megatron.errors import UserError

SHARED_MEMORY_FRACTION = 0.3
"""Of a GPU's memory for an engine that shares it with the trainer."""
OWN_MEMORY_FRACTION = 0.6


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the engine computes.

    Attributes:
        gpus: of this machine that the job may use; 0: it runs on a CPU.
        engine_gpu: the (first) engine's first one.
        shared: the engine computes where trainer ranks do, and takes turns with them.
    """

    gpus: int
    engine_gpu: int
    shared: bool

    @classmethod
    def of(cls, config: JobConfig, gpus: int) -> "Placement":
        """For a machine with `gpus` of them."""
        shared = takes_turns(config, not gpus or gpus >= gpus_for_both(config))
        return cls(gpus, 0 if shared or not gpus else config.parallel.world_size, shared)

    def of_engine(self, index: int, engine: EngineConfig) -> "Placement":
        """The same for replica `index`, whose GPUs are behind those of the replicas before."""
        return replace(self, engine_gpu=self.engine_gpu + index * engine.tensor) if self.gpus else self

    def memory_fraction(self, engine: EngineConfig) -> float:
        """Share of the device's memory for the engine."""
        if engine.memory_fraction is not None:
            return engine.memory_fraction
        return SHARED_MEMORY_FRACTION if self.shared else OWN_MEMORY_FRACTION


def gpus_for_both(config: JobConfig) -> int:
    """Of trainer ranks and engines beside each other."""
    return config.parallel.world_size + config.engine.tensor * config.engine.replicas


def takes_turns(config: JobConfig, enough: bool) -> bool:
    """Whether engines compute where trainer ranks do; `auto` decides by whether there are GPUs `enough` for both."""
    return config.engine.placement == "colocated" or (config.engine.placement == "auto" and not enough)


ON_CPU = Placement(gpus=0, engine_gpu=0, shared=False)


@cache
def _visible_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpu_count(platform: Platform) -> int:
    """GPUs that a job may use on this machine."""
    return 0 if platform == "cpu" else _visible_gpus()


def placement(config: JobConfig) -> Placement:
    """On this machine."""
    return Placement.of(config, gpu_count(config.platform))


def check_machine(config: JobConfig) -> None:
    """Whether this machine can run the job.

    Raises:
        UserError: it has too few GPUs, none of the kind or software that FP8 needs, or none at all for what needs one.
    """
    gpus = gpu_count(config.platform)
    if not gpus:
        if config.engine.tensor > 1:
            raise UserError(f"engine.tensor={config.engine.tensor}: an engine on a CPU has one rank")
        if config.model.fp8 != "none":
            raise UserError(f"model.fp8={config.model.fp8} needs a GPU, and torch sees none here")
        if config.engine.quantization != "none":
            raise UserError(f"engine.quantization={config.engine.quantization} needs a GPU, and torch sees none here")
        if config.optimizer.offload or config.sft.optimizer.offload:
            raise UserError("optimizer.offload=true needs a GPU: without one all state is in host memory already")
        return
    ranks, engines = config.parallel.world_size, config.engine.tensor * config.engine.replicas
    for name, wanted in (("trainer ranks", ranks), ("engine.tensor * engine.replicas", engines)):
        if wanted > gpus:
            raise UserError(f"{wanted} {name} need as many GPUs, and torch sees {gpus} here (platform=cpu uses none)")
    if config.engine.placement == "split" and ranks + engines > gpus:
        raise UserError(
            f"engine.placement=split needs {ranks} GPUs for the trainer and {engines} for engines, and torch sees "
            f"{gpus} here"
        )
    if config.sync.transport == "ipc" and not Placement.of(config, gpus).shared:
        raise UserError("sync.transport=ipc is for an engine that shares the trainer's GPUs; here it has its own")
    if config.model.fp8 != "none":
        _check_fp8(config.model.fp8)


def _check_fp8(recipe: str) -> None:
    if find_spec("transformer_engine") is None:
        raise UserError(f"model.fp8={recipe} needs Transformer Engine: pip install 'arpo-megatron[gpu]'")
    import torch

    needed = (9, 0) if recipe == "blockwise" else (8, 9)
    found = torch.cuda.get_device_capability()
    if found < needed:
        raise UserError(
            f"model.fp8={recipe} needs compute capability {'.'.join(map(str, needed))}, and this GPU has "
            f"{'.'.join(map(str, found))}"
        )
