"""Profiles of clusters: `slurm/clusters/NAME.yaml`, which the package contains, or any file with the same keys."""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from arpo_megatron.cluster import slurm
from arpo_megatron.config import JobConfig
from arpo_megatron.config.fields import NonNegative, Positive, PositiveFloat
from arpo_megatron.config.yaml import read_yaml
from arpo_megatron.errors import UserError, did_you_mean
from arpo_megatron.hardware.specs import GB
from arpo_megatron.plan import GPUS, Hardware
from arpo_megatron.plan.shares import LINK_SHARE
from tools_sandbox.utils.faults import fault_text
from tools_sandbox.utils.yaml import yaml_text

_STRICT = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)
DIRECTORY = Path(__file__).with_name("profiles").resolve()
"""Directory of the named profiles: slurm/clusters in a clone, package data in an installation."""


def _form(pattern: str, what: str) -> BeforeValidator:
    """Return a check of a text that Slurm would refuse on submission only."""

    def check(value: object) -> object:
        text = str(value) if type(value) is int else value  # YAML reads minutes and megabytes as numbers
        if isinstance(text, str) and not re.fullmatch(pattern, text):
            raise ValueError(f"{text!r} is not {what}")
        return text

    return BeforeValidator(check)


TimeLimit = Annotated[
    str, _form(r"([0-9]+-)?[0-9]+(:[0-9]+){0,2}", "a time limit of Slurm, such as 30, 04:00:00 or 1-12; 0: none")
]
Memory = Annotated[
    str, _form(r"(?i)[0-9]+([KMGT]B?)?", "an amount of memory of Slurm, such as 64000 or 900G; 0: all of a node")
]

_REFUSED = {
    **{
        key: f"set the key {key}"
        for key in ("account", "partition", "qos", "time", "nodes", "exclusive", "mem", "requeue")
    },
    "no-requeue": "set the key requeue",
    "signal": "set the key signal_s",
    "dependency": "use arpo submit --chain",
    **dict.fromkeys(("job-name", "output", "ntasks", "ntasks-per-node", "ntasks-per-gpu"), "arpo submit sets it"),
    **dict.fromkeys(("container", "container-image"), "set the key container"),
    "container-mounts": "set the key mounts",
    **dict.fromkeys(("export", "export-file"), "use the keys environment and secrets"),
    "array": "a run is one job, and each task of an array would be another",
    "wrap": "arpo submit writes the batch script",
    "clusters": "arpo status and arpo cancel would not find the job there",
    "test-only": "no job would be submitted",
    "wait": "arpo submit does not wait for the end of the job",
}
"""Parameters of sbatch that `sbatch` must not set, with the reason or the key to use."""
_OWN_OPTIONS = ("--container", "--no-container", "--nodes", "--ntasks", "--nodelist", "--overlap", "--job-name")
"""Beginnings of the options of srun that `SlurmBackend.step` sets."""
_NOT_SHORT = frozenset({"gpus"})
"""Parameters that do not abbreviate another one. (sbatch accepts the beginning of a parameter's name.)"""


@dataclass(frozen=True, config=_STRICT)
class ClusterProfile:
    """The properties of a cluster, which no recipe contains."""

    account: Annotated[str, Field(min_length=1)]
    """Slurm account (#SBATCH --account)."""
    runs: Path
    """Parent of the run directories, at the same path on the login node and all compute nodes."""
    partition: str | None = None
    """Partition; None: the cluster's default."""
    qos: str | None = None
    """Quality of service."""
    time: TimeLimit = "04:00:00"
    """Time limit in Slurm's notation. A requeue or the next job of a `--chain` continues a longer run."""
    nodes: Positive | None = None
    """Number of nodes; None: as many as the recipe needs. `--nodes` takes precedence."""
    gpus_per_node: NonNegative = 8
    """GPUs per node. 0: all processes compute on CPUs, and trainer ranks are divided evenly among the nodes."""
    gpu: str | None = None
    """GPU type, as in `arpo plan --gpu`; a job that does not fit is refused. None: jobs are not planned."""
    gpu_request: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    """How to request GPUs: --gpus-per-node=N, --gres=gpu:N, or not at all (for clusters that allocate whole nodes)."""
    gpu_type: str | None = None
    """GPU type in a request (h100: --gres=gpu:h100:8)."""
    srun_args: tuple[str, ...] = ()
    """Further options of every srun of the job (--mpi=none, --network=...)."""
    exclusive: bool = True
    """Allocate whole nodes."""
    mem: Memory | None = "0"
    """Memory per node (#SBATCH --mem); "0" is all of it. None: no request."""
    signal_s: Annotated[int, Field(gt=0, le=65535)] = 300
    """Seconds before the time limit at which the job saves and ends. It must be longer than a training step and a
    checkpoint, and shorter than `time`. Slurm's signal may come up to a minute earlier."""
    filesystem_gb_s: PositiveFloat = 2.0
    """GB per second at which all nodes together write to `runs`, for plans and for the check of `signal_s`.
    `arpo doctor --cluster NAME --measure` measures this and the next two, and writes them here."""
    network_gb_s: PositiveFloat | None = None
    """GB per second that collectives send from a GPU to other nodes. None: 0.7 of the data sheet."""
    host_copy_gb_s: PositiveFloat | None = None
    """GB per second between a GPU and its host, with all GPUs of a node copying. None: the data sheet."""
    ssh: str | None = None
    """[USER@]HOST[:PORT] or ~/.ssh/config alias of a login node. `arpo` commands with this `--cluster` run there, with
    the local code. All other paths and variables are those of the login node, and `python` is required.
    None: this machine is a login node."""
    identity: Path | None = None
    """Private key for `ssh`. None: the agent, the usual files, or a password prompt."""
    requeue: bool = True
    """Requeue the job when its time is up or when it is preempted. It continues from its newest checkpoint."""
    restarts: NonNegative = 0
    """How often a job is requeued after a process failed or hung (`parallel.collective_timeout_s`), or a node was lost
    or failed a check that others pass; without that node if the partition can spare it. No restart follows an error
    that needs a change, or a failure without a new checkpoint since the last restart. 0: only after a lost node,
    without a limit."""
    python: Path | None = None
    """Python with this package on the nodes, outside containers. The supervisor runs in it, without torch or a GPU.
    None: the Python that runs `arpo submit`."""
    container: str | None = None
    """Container image for the job's processes (pyxis and enroot: a registry name or a .sqsh file). None: no container,
    `python` runs them."""
    container_python: str = "python"
    """Python inside the container."""
    mounts: tuple[str, ...] = ()
    """FROM:TO mounts of the container, or FROM:TO:FLAGS with flags that a + joins (ro+rprivate). Paths of the config
    are those of the nodes. If one lies in a mount, its other side replaces it in the container. The run directory is
    always mounted, and so are files of components and files that parameters name; the home directory is not."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables for all processes (NCCL_SOCKET_IFNAME, HF_HOME, ...). They are in the batch script, so they
    must not be secrets."""
    secrets: dict[str, str] = Field(default_factory=dict)
    """Environment variables that must not be written down, each with its source: `env` (the environment of
    `arpo submit`, which sbatch passes on) or the path of a file that the nodes can read."""
    ports: tuple[Positive, Positive] | None = None
    """First and last TCP port for services and the ranks' rendezvous; None: any free port. NCCL, gloo and the weight
    push choose their own ports, so the nodes of a job must be able to connect to each other on all ports."""
    trusted_networks: tuple[str, ...] = ()
    """Networks (10.1.0.0/16, ...) whose hosts and users you trust: ranks and weight pushes ask for no password. The
    preflight step fails if a port of the job listens outside them, and warns if there are none."""
    sbatch: dict[str, str] = Field(default_factory=dict)
    """Further #SBATCH parameters by their long names (constraint: h100, reservation: ...). Parameters that another key
    or `arpo submit` sets are errors, and so are those that change the number of jobs (array, ...)."""

    def gpus_of(self, config: JobConfig) -> int:
        """Return the GPUs per node that the job computes on; 0 if it computes on CPUs."""
        return 0 if config.platform == "cpu" else self.gpus_per_node

    def hardware(self) -> Hardware | None:
        """Return the hardware of a node with the speeds of this profile; None without `gpu`."""
        if self.gpu is None or not self.gpus_per_node:
            return None
        found = Hardware.named(self.gpu)
        network = found.network if self.network_gb_s is None else self.network_gb_s * GB / LINK_SHARE
        host_link = found.host_link if self.host_copy_gb_s is None else self.host_copy_gb_s * GB
        filesystem = self.filesystem_gb_s * GB
        return replace(found, gpus=self.gpus_per_node, network=network, host_link=host_link, filesystem=filesystem)

    def unset_secrets(self) -> list[str]:
        """Return the secrets with source `env` that are not set in this process."""
        return [name for name, source in self.secrets.items() if source == "env" and not os.environ.get(name)]

    def require_secrets(self) -> None:
        """Raise UserError for the first of `unset_secrets`."""
        if unset := self.unset_secrets():
            raise UserError(f"the secret {unset[0]} is not set: export {unset[0]}=..., or name a file in the profile")

    @model_validator(mode="after")
    def _check_variables(self) -> Self:
        for name in (*self.environment, *self.secrets):
            if not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise ValueError(f"{name!r} is not a valid name of an environment variable")
        if exposed := [name for name in self.environment if re.search(r"(?i)(^|_)(KEY|TOKEN|SECRET|PASSWORD)$", name)]:
            raise ValueError(f"environment: {exposed[0]} would be in the batch script: move it to secrets")
        for name, source in self.secrets.items():
            if source != "env" and not source.startswith(("/", "~/")):  # the message must not repeat a secret
                raise ValueError(f"secrets: {name} must be `env` or a path that begins with / or ~/")
        if both := sorted(set(self.environment) & set(self.secrets)):
            raise ValueError(f"{both[0]} is in environment and in secrets: remove one")
        return self

    @model_validator(mode="after")
    def _check_sbatch(self) -> Self:
        refused = _REFUSED | {self.gpu_request: "set the key gpu_request"}
        if not self.exclusive:
            del refused["exclusive"]  # its values `user` and `mcs` have no key
        if self.mem is not None:
            refused |= dict.fromkeys(("mem-per-cpu", "mem-per-gpu"), "it excludes the key mem: set mem: null, too")
        for name in self.sbatch:
            option = name.replace("_", "-")  # nemo-run accepts both
            if not re.fullmatch(r"[a-z][a-z0-9-]*", option):
                raise ValueError(f"sbatch: {name} is not the long name of a parameter of sbatch, such as constraint")
            meant = [option] if option in refused else [each for each in refused if each.startswith(option)]
            if meant and option not in _NOT_SHORT:
                raise ValueError(f"sbatch: {name} is not allowed here: {refused[meant[0]]}")
        return self

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not str(self.runs).startswith(("/", "~")):  # else it depends on the directory of each command
            raise ValueError(f"runs: '{self.runs}' must begin with / or ~/")
        if self.gpu is not None and self.gpu not in GPUS:
            raise ValueError(f"gpu: unknown type {self.gpu!r}; known: {', '.join(GPUS)}")
        if 0 < slurm.seconds(self.time) <= self.signal_s:  # 0 means no limit
            # Each job would get the signal as soon as it starts, and be requeued forever.
            raise ValueError(
                f"time: {self.time} leaves nothing before signal_s={self.signal_s}, the seconds that the job needs to "
                "save and end: raise time or lower signal_s"
            )
        if self.ports is not None and self.ports[1] - self.ports[0] < 63:
            raise ValueError(f"ports: [{self.ports[0]}, {self.ports[1]}] are fewer than 64: widen the range")
        if self.ports is not None and self.ports[1] > 65535:
            raise ValueError(f"ports: [{self.ports[0]}, {self.ports[1]}]: TCP ports end at 65535")
        if self.restarts and not self.requeue:
            raise ValueError("restarts: a job can restart only with requeue: true")
        for network in self.trusted_networks:
            try:
                ip_network(network)
            except ValueError as error:
                raise ValueError(f"trusted_networks: {error}: write a network as 10.1.0.0/16") from None
        if wrong := [mount for mount in self.mounts if not re.fullmatch(r"/[^:,]*:/[^:,]*(:[\w=+-]+)?", mount)]:
            raise ValueError(f"mounts: {wrong[0]!r} does not have the form FROM:TO or FROM:TO:FLAG+FLAG")
        if wrong := [each for each in self.srun_args if not each.startswith("--") or each.startswith(_OWN_OPTIONS)]:
            raise ValueError(f"srun_args: {wrong[0]} is not an option, or one that the job sets itself")
        for name, text in _texts(self):
            if not text.isprintable():
                raise ValueError(f"{name}: {text!r} has a character that cannot be in a batch script")
        return self


def _texts(profile: ClusterProfile) -> Iterator[tuple[str, str]]:
    """Yield each text that is written to the batch script, with its key."""
    for item in fields(profile):
        value = getattr(profile, item.name)
        if isinstance(value, str | Path):
            yield item.name, str(value)
        elif isinstance(value, tuple):
            yield from ((item.name, each) for each in value if isinstance(each, str))
        elif isinstance(value, dict):
            yield from ((f"{item.name}.{key}", text) for key, each in value.items() for text in (key, each))


_PROFILE = TypeAdapter(ClusterProfile)


def profile_names() -> list[str]:
    """Return the sorted names of the profiles in `DIRECTORY`."""
    return sorted(path.stem for path in DIRECTORY.glob("*.yaml"))


def load_profile(name: str) -> ClusterProfile:
    """Read the profile `name`, or the file with that path, and expand environment variables such as $HOME.

    Raises:
        UserError: there is no such profile, or it is invalid.
    """
    return check_profile(*read_profile(name))


def read_profile(name: str) -> tuple[dict[str, Any], str]:
    """Return the unchecked values of a profile and its path. Raises UserError if there is none."""
    is_file = name.endswith((".yaml", ".yml"))
    path = Path(name) if is_file else DIRECTORY / f"{name}.yaml"
    if not path.is_file() and is_file:
        raise UserError(f"the cluster profile {path} does not exist; copy {DIRECTORY / 'h100.yaml'} there and edit it")
    if not path.is_file():
        known = profile_names()
        raise UserError(
            f"unknown cluster {name!r}{did_you_mean(name, known)}; profiles in {DIRECTORY}: {', '.join(known)}. "
            "Copy one, edit it, and give its name or the path of the copy (--cluster FILE.yaml)"
        )
    return read_yaml(path), str(path)


def check_profile(values: dict[str, Any], where: str) -> ClusterProfile:
    """Validate plain values. Raises UserError with one line that starts with `where`."""
    known = [item.name for item in fields(ClusterProfile)]
    if unknown := [key for key in values if key not in known]:
        raise UserError(f"{where}: unknown key {unknown[0]}{did_you_mean(unknown[0], known)}")
    try:
        return _PROFILE.validate_python({key: _expanded(value, where) for key, value in values.items()}, strict=False)
    except ValidationError as error:
        fault = error.errors()[0]
        key, text = ".".join(map(str, fault["loc"])), fault_text(fault)
        if fault["type"] == "string_type" and isinstance(fault["input"], int | float):
            text += ": write the value in quotes"
        raise UserError(f"{where}: {f'{key}: ' if key else ''}{text}") from None


def save_profile(profile: ClusterProfile, path: Path) -> None:
    """Write the profile for the job, which reads it with `load_profile`."""
    plain = _PROFILE.dump_python(profile, mode="json")
    path.write_text(yaml_text(plain), encoding="utf-8")


def profile_text(profile: ClusterProfile) -> str:
    """Return the profile as one line of text."""
    return _PROFILE.dump_json(profile).decode()


def profile_from_text(text: str, where: str) -> ClusterProfile:
    """Return the profile of `profile_text`. Raises UserError with one line that starts with `where`."""
    return check_profile(json.loads(text), where)


def _expanded(value: Any, where: str) -> Any:
    if isinstance(value, list):
        return [_expanded(item, where) for item in value]
    if isinstance(value, dict):
        return {key: _expanded(item, where) for key, item in value.items()}
    if not isinstance(value, str):
        return value
    text = os.path.expandvars(value)
    if left := re.search(r"\$\w+|\$\{\w+\}", text):
        raise UserError(f"{where}: the environment variable {left[0]} is not set")
    return text
