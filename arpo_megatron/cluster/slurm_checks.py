"""What a cluster must be like for the profile, seen from its login node."""

import os
import re
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from arpo_megatron.cluster import slurm
from arpo_megatron.cluster.profile import ClusterProfile
from arpo_megatron.launch.preflight.check import CheckResult, failure, ok, warning
from arpo_megatron.launch.preflight.machine import Check, existing

_UNLIMITED = ("UNLIMITED", "INFINITE", "infinite")


def cluster_checks(profile: ClusterProfile) -> list[Check]:
    """In order; the later ones make sense where Slurm answers."""
    asked: list[tuple[str, Callable[[ClusterProfile], CheckResult]]] = [
        ("slurm", check_slurm),
        ("partition", check_partition),
        ("gres", check_gres),
        ("preemption", check_preemption),
        ("runs", check_runs),
        ("secrets", check_secrets),
    ]
    return [("nemo-run", check_nemo_run), *((name, lambda check=check: check(profile)) for name, check in asked)]


def check_nemo_run() -> CheckResult:
    """The submitter."""
    if find_spec("nemo_run") is None:
        return failure("nemo-run", "is not installed here", "make setup, or pip install 'arpo-megatron[slurm]'")
    return ok("nemo-run", "is installed")


def check_slurm(profile: ClusterProfile) -> CheckResult:
    """The commands are here, and the controller answers."""
    if missing := [name for name in ("sbatch", "srun", "scontrol", "squeue", "scancel") if shutil.which(name) is None]:
        return failure("slurm", f"{missing[0]} is not on the PATH", "go to a login node of the cluster")
    return ok(
        "slurm", slurm.call("sbatch", "--version").strip() + f", {slurm.call('scontrol', 'ping').splitlines()[0]}"
    )


def check_partition(profile: ClusterProfile) -> CheckResult:
    """It exists, is up, and allows the time limit."""
    shown = _partition(profile, "%a|%l|%D")
    if not shown and profile.partition is None:
        return failure("partition", "the cluster has no default", "name one of those that sinfo lists")
    if not shown:
        return failure("partition", f"{profile.partition} does not exist", "sinfo lists those that do")
    name, up, limit, nodes = shown[0]
    text = f"{name}: {nodes} nodes, {up}, time limit {limit}"
    if up != "up":
        return failure("partition", text, "wait, or choose another")
    if limit not in _UNLIMITED and not 0 < slurm.seconds(profile.time) <= slurm.seconds(limit):  # 0: without a limit
        return failure("partition", f"{text}, less than time={profile.time}", "lower `time`, and submit with --chain N")
    return ok("partition", text)


def check_gres(profile: ClusterProfile) -> CheckResult:
    """Nodes of the partition have the GPUs that the profile names."""
    if not profile.gpus_per_node or profile.gpu_request == "none":
        return ok("gres", "none is asked for")
    shown = {gres for _, gres in _partition(profile, "%G")}
    if max((gpus_in(gres, profile.gpu_type) for gres in shown), default=0) < profile.gpus_per_node:
        asked = f"{profile.gpus_per_node} GPUs{f' of type {profile.gpu_type}' if profile.gpu_type else ''}"
        text = f"nodes have {', '.join(sorted(shown)) or 'no gres'}, the profile says {asked}"
        return failure("gres", text, "fix gpus_per_node and gpu_type, or set gpu_request: none")
    return ok("gres", ", ".join(sorted(shown)))


def gpus_in(gres: str, kind: str | None) -> int:
    """GPUs of a node in sinfo's words: `gpu[:TYPE]:N`, where N may be followed by (S:SOCKETS) or (IDX:...).

    Args:
        gres: of the node, items with commas between them.
        kind: count those of this type only.
    """
    items = (item.split(":") for item in re.sub(r"\([^)]*\)", "", gres).split(","))
    gpus = [(words[1:-1], words[-1]) for words in items if words[0].strip() == "gpu"]
    return sum(int(count) for types, count in gpus if count.isdecimal() and (kind is None or types[:1] == [kind]))


def check_preemption(profile: ClusterProfile) -> CheckResult:
    """Whether a preempted job is warned in time to save."""
    config = slurm.call("scontrol", "show", "config")
    mode, by_qos = _setting(config, "PreemptMode"), _setting(config, "PreemptType") == "preempt/qos"
    names = [] if by_qos else [name for name, *_ in _partition(profile, "%a")]
    partition = slurm.call("scontrol", "show", "partition", names[0]).split() if names else []
    if mode in ("OFF", "") or "PreemptMode=OFF" in partition:
        return ok("preemption", "jobs are not preempted")
    if by_qos:
        said = slurm.call("sacctmgr", "-nP", "show", "qos", profile.qos, "format=GraceTime") if profile.qos else ""
        grace_s = slurm.seconds(said.strip()) if said.strip() else 0
    else:
        grace_s = next((int(word[10:]) for word in partition if re.fullmatch(r"GraceTime=\d+", word)), 0)
    user_signal = "send_user_signal" in _setting(config, "PreemptParameters") + _setting(config, "SlurmctldParameters")
    signal = "USR1" if user_signal else "TERM"
    if by_qos and profile.qos is None:
        text = f"with {signal}; how long before the end is said by the QOS, which the profile does not name"
    elif grace_s == 0:
        text = "and GraceTime=0 leaves no time to save: what was done since the last checkpoint is done again"
    elif not user_signal and _setting(config, "ProctrackType") == "proctrack/linuxproc":
        text = "with TERM, which proctrack/linuxproc sends to all processes of a job: nobody is left to save"
    elif grace_s < profile.signal_s:
        text = f"with a warning ({signal}) {grace_s} s before the end, less than signal_s={profile.signal_s}"
    else:
        warned = f"with a warning {grace_s} s before the end ({signal})"
        return ok("preemption", f"{mode}, {warned}, which makes the trainer save")
    fix = "keep train.save_every small, or ask for a longer GraceTime (and PreemptParameters=send_user_signal)"
    return warning("preemption", f"{mode} {text}", fix)


def check_runs(profile: ClusterProfile) -> CheckResult:
    """The run directories can be made."""
    place = profile.runs.expanduser().absolute()
    there = existing(place)
    if not os.access(there, os.W_OK):
        return failure("runs", f"{there} is not writable", "set `runs` to a directory of yours that all nodes share")
    return ok("runs", str(place))


def check_secrets(profile: ClusterProfile) -> CheckResult:
    """Those from the environment are in it; files are read on the nodes, and may be there only."""
    if missing := profile.unset_secrets():
        return failure("secrets", f"{missing[0]} is not set here", f"export {missing[0]}=..., or name a file")
    files = [source for source in profile.secrets.values() if source != "env"]
    if absent := [source for source in files if not Path(source).expanduser().is_file()]:
        return warning("secrets", f"{absent[0]} is not here", "the first node must have it, else the job ends at once")
    return ok("secrets", ", ".join(profile.secrets) or "none")


def _partition(profile: ClusterProfile, fields: str) -> list[list[str]]:
    """Name and sinfo's fields of the profile's partition, or of the default one; a row for nodes that differ there."""
    where = [] if profile.partition is None else [f"--partition={profile.partition}"]
    rows = [line.split("|") for line in slurm.call("sinfo", "-h", "-o", f"%P|{fields}", *where).splitlines() if line]
    # sinfo marks the default with a star.
    return [[name.rstrip("*"), *rest] for name, *rest in rows if profile.partition or name.endswith("*")]


def _setting(config: str, name: str) -> str:
    found = re.search(rf"^{name}\s*=\s*(.*)$", config, re.MULTILINE)
    return found[1].strip().replace("(null)", "") if found else ""
