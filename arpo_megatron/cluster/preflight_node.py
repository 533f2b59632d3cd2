"""`python -m arpo_megatron.cluster.preflight_node RUN_DIR TOKEN`: the first step of a job, a task for each GPU.

The first task of a node checks the node and the run directory, which must have the file that the supervisor wrote. All
tasks then measure the network together. The first one writes check results, speeds, clock and free ports to
RUN_DIR/doctor/NODE.json. If the run directory is not shared, that report would not arrive, so the node logs the failure
and ends the step. A node without GPUs has one task.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from arpo_megatron.cluster.profile import load_profile
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.preflight.allreduce import MEETING_S, all_reduce
from arpo_megatron.launch.preflight.bandwidth import (
    CPU_BYTES,
    DISK_BYTES,
    NODE_DISK_BYTES,
    NetworkSpeeds,
    measure_network,
    write_speed,
)
from arpo_megatron.launch.preflight.check import CHECKS_S, CheckResult, failure, ok, run_checks, show
from arpo_megatron.launch.preflight.exposure import check_exposure
from arpo_megatron.launch.preflight.gpu_health import check_gpu_health
from arpo_megatron.launch.preflight.machine import PORTS, job_checks, machine_checks
from arpo_megatron.utils.atomic import write_json
from arpo_megatron.utils.ports import free_ports

REPORTED = "doctor: this node has reported"
"""Last line of a node's output. The supervisor reads no report before this line is in the step's log, because a shared
filesystem may deny for a minute that a file exists if it was asked too early."""
_CANARY_S = 15.0
MEASURE_S = 65.0
"""Time for measuring the network after the tasks have met."""


def main() -> None:
    """Run the checks of this node. The exit code is 0 if the supervisor can read the report."""
    import torch  # noqa: F401  (before any timed check: the import may take a minute on a cold filesystem)

    run, token = RunDirectory(Path(sys.argv[1])), sys.argv[2]
    name, addresses = os.environ["SLURMD_NODENAME"], os.environ["ARPO_NODE_ADDRESSES"].split(",")
    local = int(os.environ["SLURM_LOCALID"])
    findings: list[CheckResult] = []
    if local == 0:
        findings += run_checks([("filesystem", lambda: _canary(run, token))])
        if not show(findings, f"{name}: "):
            os._exit(1)
    elif _canary(run, token).level != "ok":
        os._exit(0)  # the first task reports it
    # Not earlier: the files are only there if the check above passed.
    profile, config = load_profile(str(run.cluster)), resolve.load(run.config)
    gpus = profile.gpus_of(config)
    here = addresses[int(os.environ["SLURM_NODEID"])]
    if local == 0:
        checks = [*machine_checks(gpus=gpus, on_gpus=gpus > 0, config=config), *job_checks(config, run)]
        findings += run_checks([*checks, *([("gpu health", check_gpu_health)] if gpus else [])])
    listening, speeds = set[str](), list[NetworkSpeeds]()
    meeting = ("network", lambda: _meet(addresses, gpus, listening, speeds))
    limit_s = MEETING_S + MEASURE_S + CHECKS_S * (local > 0)
    network = run_checks([meeting], limit_s, limit_s)
    if local:
        show((item for item in network if item.level != "ok"), f"{name}, task {local}: ")
        os._exit(0)
    clock = time.time()  # right after the all-reduce, so that the clocks of nodes can be compared
    findings += network
    findings += run_checks([("exposure", lambda: check_exposure(listening, profile.trusted_networks))])
    try:
        ports = free_ports(PORTS, here, profile.ports)
        findings.append(ok("ports", f"{len(ports)} free at {here}"))
    except Exception as error:  # reported like any other failure
        ports, text = [], str(error)
        findings.append(failure("ports", text, "free some ports, or widen `ports` in the profile"))
    disk = list[float]()
    size = min(NODE_DISK_BYTES if gpus else CPU_BYTES, DISK_BYTES // len(addresses))
    findings += run_checks([("disk speed", lambda: _write(run, size, disk))])
    answer = {
        "node": name,
        "clock": clock,
        "ports": ports,
        "findings": [asdict(item) for item in findings],
        "network": asdict(speeds[0]) if speeds else None,
        "disk_gb_s": disk[0] if disk else None,
    }
    write_json(run.doctor / f"{name}.json", answer)
    print(REPORTED, flush=True)
    os._exit(0)  # a hanging check would keep the interpreter alive


def _meet(addresses: Sequence[str], gpus: int, listening: set[str], speeds: list[NetworkSpeeds]) -> CheckResult:
    """Join the all-reduce of all tasks, and measure the network if there is any."""
    rank, count, port, local = (
        int(os.environ[name]) for name in ("SLURM_PROCID", "SLURM_NTASKS", "MASTER_PORT", "SLURM_LOCALID")
    )
    device = f"cuda:{local}" if gpus else "cpu"

    def measure() -> None:
        if count > 1:
            speeds.append(measure_network(len(addresses), count // len(addresses), device))

    timeout_s = MEETING_S + (CHECKS_S if gpus else 0.0)  # other tasks of the node do not check it first
    return all_reduce(rank, count, addresses[0], port, device, listening, measure=measure, timeout_s=timeout_s)


def _write(run: RunDirectory, size: int, disk: list[float]) -> CheckResult:
    disk.append(write_speed(run.doctor, size))
    return ok("disk speed", f"{disk[0]:.3g} GB/s from this node to {run.path}")


def _canary(run: RunDirectory, token: str) -> CheckResult:
    """Check that this node sees the supervisor's file. Without it, a later rendezvous would hang."""
    deadline = time.monotonic() + _CANARY_S
    canary = run.doctor / "canary"
    while time.monotonic() < deadline:
        if canary.exists() and json.loads(canary.read_text())["token"] == token:
            return ok("filesystem", f"{run.path} is shared with the supervisor")
        time.sleep(0.2)
    return failure("filesystem", f"{canary} is not the supervisor's", "set `runs` to a directory that all nodes share")


if __name__ == "__main__":
    main()
