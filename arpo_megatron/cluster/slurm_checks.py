"""Checks of a cluster against its profile, from the login node."""

import getpass
import os
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from arpo_megatron.cluster import slurm
from arpo_megatron.cluster.profile import ClusterProfile
from arpo_megatron.launch.preflight.check import CheckResult, failure, ok, warning
from arpo_megatron.launch.preflight.machine import Check

_UNLIMITED = ("UNLIMITED", "INFINITE", "infinite")
_Check = Callable[[ClusterProfile], CheckResult]


def cluster_checks(profile: ClusterProfile) -> list[Check]:
    """Return the checks in order. Those that need an answer from Slurm are not made if it gives none to the first."""
    of_slurm: dict[str, _Check] = {
        "partition": check_partition,
        "account": check_account,
        "qos": check_qos,
        "limits": check_limits,
        "gres": check_gres,
        "preemption": check_preemption,
    }
    of_files: dict[str, _Check] = {
        "image": check_image,
        "mounts": check_mounts,
        "job python": check_job_python,
        "secrets": check_secrets,
    }
    answers = list[CheckResult]()

    def ask_slurm() -> CheckResult:
        answers.append(check_slurm(profile))
        return answers[0]

    def ask(name: str, check: _Check) -> CheckResult:
        if not answers or answers[0].level != "ok":
            return warning(name, "not checked, since Slurm does not answer", "fix what the check `slurm` reports")
        return check(profile)

    return [
        ("nemo-run", check_nemo_run),
        ("slurm", ask_slurm),
        *((name, partial(ask, name, check)) for name, check in of_slurm.items()),
        *((name, partial(check, profile)) for name, check in of_files.items()),
    ]


def check_nemo_run() -> CheckResult:
    """Check that nemo-run, which `arpo submit` needs, is installed."""
    if find_spec("nemo_run") is None:
        return failure("nemo-run", "is not installed here", "run make setup, or pip install 'arpo-megatron[slurm]'")
    return ok("nemo-run", "is installed")


def check_slurm(profile: ClusterProfile) -> CheckResult:
    """Check that Slurm's commands are installed and that its controller answers."""
    if missing := [name for name in ("sbatch", "srun", "scontrol", "squeue", "scancel") if shutil.which(name) is None]:
        return failure("slurm", f"{missing[0]} is not on the PATH", "run this on a login node of the cluster")
    # It fails if one of several controllers is down. Without a result, the second call raises its error.
    pinged = (slurm.call("scontrol", "ping", check=False) or slurm.call("scontrol", "ping")).splitlines()
    if not (up := [line for line in pinged if re.search(r"\bUP\b", line)]):
        text = f"no controller answers: {pinged[0]}"
        return failure("slurm", text, "wait until it does, or ask the administrators of the cluster")
    return ok("slurm", f"{slurm.call('sbatch', '--version').strip()}, {up[0]}")


def check_partition(profile: ClusterProfile) -> CheckResult:
    """Check that the partition exists, is up, and allows the time limit."""
    shown = _partition(profile, "%a|%l|%D")
    if not shown and profile.partition is None:
        return failure("partition", "the cluster has no default partition", "set `partition`; sinfo lists them")
    if not shown:
        return failure("partition", f"{profile.partition} does not exist", "set `partition`; sinfo lists them")
    name, up, limit, nodes = shown[0]
    text = f"{name}: {nodes} nodes, {up}, time limit {limit}"
    if up != "up":
        return failure("partition", text, "wait, or set another `partition`")
    if limit not in _UNLIMITED and not 0 < slurm.seconds(profile.time) <= slurm.seconds(limit):  # 0: without a limit
        return failure("partition", f"{text}, less than time={profile.time}", "lower `time`, and submit with --chain N")
    return ok("partition", text)


def check_account(profile: ClusterProfile) -> CheckResult:
    """Check that the partition accepts the account and that the user belongs to it."""
    partition = _partition_settings(profile)
    for key, bad in (("AllowAccounts", False), ("DenyAccounts", True)):
        found = re.search(rf"{key}=(\S+)", partition)
        listed = found[1].split(",") if found else []
        if listed and listed != ["ALL"] and (profile.account in listed) is bad:
            text = f"the partition does not accept {profile.account} ({key}={','.join(listed)})"
            return failure("account", text, "set another `account` or `partition`")
    if not _has_accounting():
        return ok("account", f"{profile.account}; the cluster keeps no accounts")
    user = getpass.getuser()
    wanted = (f"user={user}", f"account={profile.account}", "format=account")
    if not slurm.call("sacctmgr", "-nP", "show", "assoc", *wanted).strip():
        fix = "sacctmgr show assoc user=$USER lists yours"
        return failure("account", f"{user} does not belong to {profile.account}", fix)
    return ok("account", profile.account)


def check_qos(profile: ClusterProfile) -> CheckResult:
    """Check that the quality of service exists, the partition accepts it, and it allows the time limit."""
    if profile.qos is None:
        return ok("qos", "the default")
    partition = _partition_settings(profile)
    found = re.search(r"AllowQos=(\S+)", partition)
    if found and found[1] not in ("ALL", "N/A") and profile.qos not in found[1].split(","):
        return failure("qos", f"the partition accepts {found[1]}, not {profile.qos}", "set another `qos`")
    if not _has_accounting():
        return warning("qos", f"{profile.qos} cannot be checked: the cluster keeps no accounts", "remove `qos`")
    limit = slurm.call("sacctmgr", "-nP", "show", "qos", profile.qos, "format=name,maxwall").strip()
    if not limit:
        return failure("qos", f"{profile.qos} does not exist", "sacctmgr show qos lists them")
    wall = limit.partition("|")[2]
    if wall and not 0 < slurm.seconds(profile.time) <= slurm.seconds(wall):
        return failure("qos", f"{profile.qos} allows {wall}, less than time={profile.time}", "lower `time`")
    return ok("qos", profile.qos)


def check_limits(profile: ClusterProfile, nodes: int | None = None) -> CheckResult:
    """Check that partition, QOS and account allow a job of this size.

    Args:
        profile: profile of the cluster.
        nodes: number of nodes; None: that of the profile, else one.
    """
    nodes = nodes or profile.nodes or 1
    wanted = {"node": nodes, "gres/gpu": nodes * profile.gpus_per_node}
    if profile.gpu_type:
        wanted[f"gres/gpu:{profile.gpu_type}"] = wanted["gres/gpu"]
    partition = _partition_settings(profile)
    for key in ("TotalNodes", "MaxNodes"):
        if (found := re.search(rf"\b{key}=(\d+)", partition)) and int(found[1]) < nodes:
            text = f"{nodes} node(s), and the partition has {key}={found[1]}"
            return failure("limits", text, "lower `nodes` or --nodes, or set another `partition`")
    for place, limits in _tres_limits(profile, partition):
        for resource, most in re.findall(r"([\w/:.-]+)=(\d+)", limits):
            if wanted.get(resource, 0) > int(most):
                text = f"{nodes} node(s) take {resource}={wanted[resource]}, and {place} allows {most}"
                return failure("limits", text, "lower `nodes` or --nodes, or set another `qos` or `account`")
    return ok("limits", f"{nodes} node(s) with {profile.gpus_per_node} GPUs each are allowed")


def _tres_limits(profile: ClusterProfile, partition: str) -> Iterator[tuple[str, str]]:
    """Yield who sets limits of resources, and the limits (node=2,gres/gpu=16), of a job, a user or all jobs."""
    if not _has_accounting():
        return
    of_partition = re.search(r"\bQoS=(\S+)", partition)
    for qos in {profile.qos, of_partition[1] if of_partition else None} - {None, "N/A"}:
        yield (
            f"qos {qos}",
            slurm.call(
                "sacctmgr", "-nP", "show", "qos", str(qos), "format=MaxTRES,MaxTRESPerUser,MaxTRESPerAccount,GrpTRES"
            ),
        )
    wanted = (f"user={getpass.getuser()}", f"account={profile.account}", "format=MaxTRES,GrpTRES")
    yield f"account {profile.account}", slurm.call("sacctmgr", "-nP", "show", "assoc", *wanted)


def check_image(profile: ClusterProfile) -> CheckResult:
    """Check that the container image exists, unless it comes from a registry."""
    image = profile.container
    if image is None:
        return ok("image", "no container")
    if not image.startswith("/"):
        return ok("image", f"{image}, which the nodes fetch")
    if not Path(image).is_file():
        return failure("image", f"{image} does not exist", "set `container` to an image on the shared filesystem")
    return ok("image", image)


def check_mounts(profile: ClusterProfile) -> CheckResult:
    """Check that the host sides of the mounts exist and that no container side hides another."""
    sides = [mount.split(":")[:2] for mount in profile.mounts]
    if twice := [inside for number, (_, inside) in enumerate(sides) if inside in {b for _, b in sides[:number]}]:
        return failure("mounts", f"two mounts end at {twice[0]}", "give each mount its own place in the container")
    if missing := [outside for outside, _ in sides if not Path(outside).exists()]:
        return failure("mounts", f"{missing[0]} does not exist here", "create it, or remove it from `mounts`")
    return ok("mounts", ", ".join(profile.mounts) or "the run directory")


def check_job_python(profile: ClusterProfile) -> CheckResult:
    """Check that the Python of the supervisor exists."""
    if profile.python is None:
        return ok("job python", "this one")
    if not os.access(python := profile.python.expanduser(), os.X_OK):
        fix = "set `python` to that of a venv on the shared filesystem"
        return failure("job python", f"{python} is not an executable file here", fix)
    return ok("job python", str(python))


def check_gres(profile: ClusterProfile) -> CheckResult:
    """Check that nodes of the partition have the GPUs of the profile."""
    if not profile.gpus_per_node or profile.gpu_request == "none":
        return ok("gres", "the profile requests no GPUs")
    shown = {gres for _, gres in _partition(profile, "%G")}
    if max((gpus_in(gres, profile.gpu_type) for gres in shown), default=0) < profile.gpus_per_node:
        wanted = f"{profile.gpus_per_node} GPUs{f' of type {profile.gpu_type}' if profile.gpu_type else ''}"
        text = f"nodes have {', '.join(sorted(shown)) or 'no gres'}, the profile requests {wanted}"
        return failure("gres", text, "fix gpus_per_node and gpu_type, or set gpu_request: none")
    return ok("gres", ", ".join(sorted(shown)))


def gpus_in(gres: str, kind: str | None) -> int:
    """Count the GPUs of a node in sinfo's notation: `gpu[:TYPE]:N`, with (S:SOCKETS) or (IDX:...) after N.

    Args:
        gres: gres of the node, separated by commas.
        kind: type of GPU to count; None counts all.
    """
    items = (item.split(":") for item in re.sub(r"\([^)]*\)", "", gres).split(","))
    gpus = [(fields[1:-1], fields[-1]) for fields in items if fields[0].strip() == "gpu"]
    return sum(int(count) for types, count in gpus if count.isdecimal() and (kind is None or types[:1] == [kind]))


def check_preemption(profile: ClusterProfile) -> CheckResult:
    """Check that a preempted job is warned early enough to save a checkpoint."""
    config = slurm.call("scontrol", "show", "config")
    mode, by_qos = _setting(config, "PreemptMode"), _setting(config, "PreemptType") == "preempt/qos"
    partition = [] if by_qos else _partition_settings(profile).split()
    if mode in ("OFF", "") or "PreemptMode=OFF" in partition:
        return ok("preemption", "jobs are not preempted")
    if by_qos:
        shown = slurm.call("sacctmgr", "-nP", "show", "qos", profile.qos, "format=GraceTime") if profile.qos else ""
        grace_s = slurm.seconds(shown.strip()) if shown.strip() else 0
    else:
        grace_s = next((int(each[10:]) for each in partition if re.fullmatch(r"GraceTime=\d+", each)), 0)
    user_signal = "send_user_signal" in _setting(config, "PreemptParameters") + _setting(config, "SlurmctldParameters")
    signal = "USR1" if user_signal else "TERM"
    if by_qos and profile.qos is None:
        text = f"with {signal}; the time before the end depends on the QOS, which the profile does not set"
    elif grace_s == 0:
        text = "and GraceTime=0 leaves no time to save: the steps since the last checkpoint are repeated"
    elif not user_signal and _setting(config, "ProctrackType") == "proctrack/linuxproc":
        text = "with TERM, which proctrack/linuxproc sends to all processes of a job, so none is left to save"
    elif grace_s < profile.signal_s:
        text = f"with a warning ({signal}) {grace_s} s before the end, less than signal_s={profile.signal_s}"
    else:
        return ok("preemption", f"{mode}, with a warning {grace_s} s before the end ({signal}): the trainer saves")
    fix = "keep train.save_every small, or ask for a longer GraceTime (and PreemptParameters=send_user_signal)"
    return warning("preemption", f"{mode} {text}", fix)


def check_secrets(profile: ClusterProfile) -> CheckResult:
    """Check that secrets from the environment are set. Files may exist on the nodes only, so they get a warning."""
    if missing := profile.unset_secrets():
        return failure("secrets", f"{missing[0]} is not set here", f"export {missing[0]}=..., or use a file")
    files = [source for source in profile.secrets.values() if source != "env"]
    if absent := [source for source in files if not Path(source).expanduser().is_file()]:
        return warning("secrets", f"{absent[0]} does not exist here", "make sure that the job's nodes can read it")
    return ok("secrets", ", ".join(profile.secrets) or "none")


def _partition(profile: ClusterProfile, fields: str) -> list[list[str]]:
    """Return name and sinfo fields of the profile's (or the default) partition, one row per kind of node."""
    where = [] if profile.partition is None else [f"--partition={profile.partition}"]
    rows = [line.split("|") for line in slurm.call("sinfo", "-h", "-o", f"%P|{fields}", *where).splitlines() if line]
    # sinfo marks the default partition with a star.
    return [[name.rstrip("*"), *rest] for name, *rest in rows if profile.partition or name.endswith("*")]


def _partition_settings(profile: ClusterProfile) -> str:
    """Return scontrol's KEY=VALUE text of the profile's (or the default) partition; empty if there is none."""
    shown = _partition(profile, "%a")
    return slurm.call("scontrol", "show", "partition", shown[0][0]) if shown else ""


def _has_accounting() -> bool:
    kind = _setting(slurm.call("scontrol", "show", "config"), "AccountingStorageType")
    return kind not in ("", "accounting_storage/none") and shutil.which("sacctmgr") is not None


def _setting(config: str, name: str) -> str:
    found = re.search(rf"^{name}\s*=\s*(.*)$", config, re.MULTILINE)
    return found[1].strip().replace("(null)", "") if found else ""
