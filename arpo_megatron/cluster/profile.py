"""What a cluster wants to be told: `slurm/clusters/NAME.yaml`, or any file of that form."""

import os
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from arpo_megatron.cluster import slurm
from arpo_megatron.config import JobConfig
from arpo_megatron.config.fields import NonNegative, Positive
from arpo_megatron.config.yaml import read_yaml
from arpo_megatron.errors import UserError, did_you_mean
from arpo_megatron.plan import GPUS, Hardware

_STRICT = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)
DIRECTORY = Path(__file__).resolve().parents[2] / "slurm" / "clusters"

Duration = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),  # minutes, to YAML a number
    Field(pattern=r"^(\d+-)?\d+(:\d{1,2}){0,2}$"),
]

_REFUSED = {
    **{
        key: f"the key {key} decides it"
        for key in ("account", "partition", "qos", "time", "nodes", "exclusive", "mem", "requeue")
    },
    "no-requeue": "the key requeue decides it",
    "signal": "the key signal_s decides it",
    "dependency": "--chain decides it",
    **dict.fromkeys(("job-name", "output", "ntasks", "ntasks-per-node", "ntasks-per-gpu"), "arpo submit decides it"),
    **dict.fromkeys(("container", "container-image"), "the key container decides it"),
    "container-mounts": "the key mounts decides it",
    **dict.fromkeys(("export", "export-file"), "the keys environment and secrets say what a job gets"),
    "array": "a run is one job, and each task of an array would be another",
    "wrap": "the batch script is that of arpo submit",
    "clusters": "no other command would look for the job there",
    "test-only": "no job would be submitted",
    "wait": "arpo submit does not wait for the job's end",
}
"""Parameters of sbatch that a profile's `sbatch` would set behind our back, or that break a submission, and why."""
_NOT_SHORT = frozenset({"gpus"})
"""Parameters that are no short form of another (sbatch takes the beginning of a name for the whole)."""


@dataclass(frozen=True, config=_STRICT)
class ClusterProfile:
    """Everything about a cluster that no recipe should know."""

    account: str
    """Slurm account (#SBATCH --account)."""
    runs: Path
    """Directory of run directories, on a filesystem that the login node and all compute nodes see under one name."""
    partition: str | None = None
    """Partition; None: the cluster's default."""
    qos: str | None = None
    """Quality of service."""
    time: Duration = "04:00:00"
    """Time limit, as Slurm writes it. What does not fit in is continued: by a requeue, or by `--chain`."""
    nodes: Positive | None = None
    """Nodes of a job; None: as many as the recipe needs. `--nodes` overrules it."""
    gpus_per_node: NonNegative = 8
    """GPUs of a node; 0: the roles compute on CPUs, and trainer ranks are divided evenly among the nodes."""
    gpu: str | None = None
    """Which GPUs these are, as `arpo plan --gpu` names them: a job that does not fit is refused. None: not planned."""
    gpu_request: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    """How GPUs are asked for: --gpus-per-node=N, --gres=gpu:N, or not at all (clusters that give whole nodes)."""
    gpu_type: str | None = None
    """With `gres` or `gpus-per-node`: the type in front of the number (h100: --gres=gpu:h100:8)."""
    exclusive: bool = True
    """Take whole nodes."""
    mem: str | None = "0"
    """Memory of a node (#SBATCH --mem); "0" is all of it. None: not asked for."""
    signal_s: Positive = 300
    """Seconds before the time limit at which the job is told to save and end: longer than a training step and a
    checkpoint, and less than `time`. Slurm may tell it up to a minute earlier."""
    ssh: str | None = None
    """[USER@]HOST[:PORT] of a login node, or an alias of ~/.ssh/config: each `arpo` command with this `--cluster` runs
    there, with the code as it lies here. All other paths and variables are of that side, and `python` is required.
    None: this machine is a login node."""
    identity: Path | None = None
    """With `ssh`: private key. None: the agent, the usual files, or a password."""
    requeue: bool = True
    """Put the job back into the queue when its time is up or it is preempted. It goes on from its checkpoint."""
    python: Path | None = None
    """Python that has this package, on the nodes themselves (the role supervisor runs there, outside containers, and
    wants neither torch nor a GPU). None: the one that runs `arpo submit`."""
    container: str | None = None
    """Container image of the roles (pyxis and enroot: a registry's name or a .sqsh file). None: `python` runs them."""
    container_python: str = "python"
    """Python inside the container."""
    mounts: tuple[str, ...] = ()
    """FROM:TO mounts of the container; the run directory is mounted anyhow."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables of every role (NCCL_SOCKET_IFNAME, HF_HOME, ...). They stand in the batch script: no secrets."""
    secrets: dict[str, str] = Field(default_factory=dict)
    """Variables that must not be written down, and where each comes from: `env` (the environment of `arpo submit`,
    which sbatch hands over) or the path of a file that the nodes can read."""
    ports: tuple[Positive, Positive] | None = None
    """First and last TCP port that services and the ranks' rendezvous may listen on. None: any free one. NCCL, gloo and
    the group of the weight push take ports of their own, so the nodes of a job must reach each other on all."""
    sbatch: dict[str, str] = Field(default_factory=dict)
    """More #SBATCH parameters, by their long names (constraint: h100, reservation: ...); not those that other keys or
    `arpo submit` itself decide, and none that makes more or less than one job of it (array, export, ...)."""

    def gpus_of(self, config: JobConfig) -> int:
        """GPUs of a node that the job computes on; 0: it computes on CPUs."""
        return 0 if config.platform == "cpu" else self.gpus_per_node

    def hardware(self, config: JobConfig) -> Hardware | None:
        """What the job is planned for; None: this profile does not say, or the job takes no GPU."""
        if self.gpu is None or not self.gpus_of(config):
            return None
        return replace(Hardware.named(self.gpu), gpus=self.gpus_per_node)

    def unset_secrets(self) -> list[str]:
        """Those that are to come from the environment and are not in this one."""
        return [name for name, source in self.secrets.items() if source == "env" and not os.environ.get(name)]

    @model_validator(mode="after")
    def _check_variables(self) -> Self:
        for name in (*self.environment, *self.secrets):
            if not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise ValueError(f"{name!r} cannot be the name of a variable")
        if written := [name for name in self.environment if re.search(r"(?i)(^|_)(KEY|TOKEN|SECRET|PASSWORD)$", name)]:
            raise ValueError(f"environment: {written[0]} would stand in the batch script: list it under secrets")
        for name, source in self.secrets.items():
            if source != "env" and not source.startswith(("/", "~/")):  # the words themselves are not repeated
                raise ValueError(f"secrets: {name} must be `env` or the path of a file, from / or ~/ on")
        if both := sorted(set(self.environment) & set(self.secrets)):
            raise ValueError(f"{both[0]} is listed under environment and under secrets")
        return self

    @model_validator(mode="after")
    def _check_sbatch(self) -> Self:
        refused = _REFUSED | {self.gpu_request: "the key gpu_request decides it"}
        if not self.exclusive:
            del refused["exclusive"]  # `user` and `mcs` can be said here alone
        for name in self.sbatch:
            said = name.replace("_", "-")  # nemo-run reads both so
            meant = [said] if said in refused else [each for each in refused if each.startswith(said)]
            if meant and said not in _NOT_SHORT:
                raise ValueError(f"sbatch: {name} cannot be given here: {refused[meant[0]]}")
        return self

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.gpu is not None and self.gpu not in GPUS:
            raise ValueError(f"gpu: {self.gpu!r} is none that `arpo plan` knows: {', '.join(GPUS)}")
        if 0 < slurm.seconds(self.time) <= self.signal_s:  # 0 is no limit to Slurm
            # Each life would be told to end as soon as it begins, and be requeued for ever.
            raise ValueError(
                f"time: {self.time} leaves nothing before signal_s={self.signal_s}, the seconds before its end "
                "at which the job is told to end: raise time or lower signal_s"
            )
        if self.ports is not None and self.ports[1] - self.ports[0] < 63:
            raise ValueError(f"ports: [{self.ports[0]}, {self.ports[1]}] are too few: at least 64 are wanted")
        if self.ports is not None and self.ports[1] > 65535:
            raise ValueError(f"ports: [{self.ports[0]}, {self.ports[1]}]: the last TCP port there is is 65535")
        if wrong := [mount for mount in self.mounts if not re.fullmatch(r"/[^:]*:/[^:]*(:[a-z,+-]+)?", mount)]:
            raise ValueError(f"mounts: {wrong[0]!r} is not FROM:TO")
        for name, text in _texts(self):
            if not text.isprintable():
                raise ValueError(f"{name}: {text!r} has a character that no line of a batch script can have")
        return self


def _texts(profile: ClusterProfile) -> Iterator[tuple[str, str]]:
    """Whatever comes into the batch script, each with its key."""
    for item in fields(profile):
        value = getattr(profile, item.name)
        if isinstance(value, str | Path):
            yield item.name, str(value)
        elif isinstance(value, tuple):
            yield from ((item.name, each) for each in value if isinstance(each, str))
        elif isinstance(value, dict):
            yield from ((f"{item.name}.{key}", text) for key, words in value.items() for text in (key, words))


_PROFILE = TypeAdapter(ClusterProfile)


def profile_names() -> list[str]:
    """The profiles that lie in `slurm/clusters`."""
    return sorted(path.stem for path in DIRECTORY.glob("*.yaml"))


def load_profile(name: str) -> ClusterProfile:
    """The profile called `name`, or that of a file with that path; variables such as $HOME are filled in.

    Raises:
        UserError: there is none, or it says what no profile can say.
    """
    return check_profile(*read_profile(name))


def read_profile(name: str) -> tuple[dict[str, Any], str]:
    """The profile as it is written, and where; raises as `load_profile` does."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else DIRECTORY / f"{name}.yaml"
    if not path.is_file():
        raise UserError(f"unknown cluster {name!r}: there are {', '.join(profile_names())}, or give a FILE.yaml")
    return read_yaml(path), str(path)


def check_profile(values: dict[str, Any], where: str) -> ClusterProfile:
    """Validate plain values. Raises UserError with one line that begins with `where`."""
    known = [item.name for item in fields(ClusterProfile)]
    if unknown := [key for key in values if key not in known]:
        raise UserError(f"{where}: unknown key {unknown[0]}{did_you_mean(unknown[0], known)}")
    try:
        return _PROFILE.validate_python({key: _filled(value, where) for key, value in values.items()}, strict=False)
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"]))
        text = fault["msg"].removeprefix("Value error, ")
        raise UserError(f"{where}: {f'{key}: ' if key else ''}{text}") from None


def save_profile(profile: ClusterProfile, path: Path) -> None:
    """Write it for the job, which reads it with `load_profile`."""
    plain = _PROFILE.dump_python(profile, mode="json")
    path.write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")


def _filled(value: Any, where: str) -> Any:
    if isinstance(value, list):
        return [_filled(item, where) for item in value]
    if isinstance(value, dict):
        return {key: _filled(item, where) for key, item in value.items()}
    if not isinstance(value, str):
        return value
    text = os.path.expandvars(value)
    if left := re.search(r"\$\w+|\$\{\w+\}", text):
        raise UserError(f"{where}: the variable {left[0]} is not set")
    return text
