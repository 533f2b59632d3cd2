"""`python -m arpo_megatron.doctor.node RUN_DIR TOKEN`: one task on every node of a job, its first step.

Each node looks at itself, at the run directory (a canary that the supervisor wrote must be there) and, through one
all-reduce with a barrier, at the others; then it writes RUN_DIR/doctor/NODE.json: findings, clock, free ports.
"""

import json
import os
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

from arpo_megatron import resolve
from arpo_megatron.cluster.profile import ClusterProfile, load_profile
from arpo_megatron.doctor.finding import Finding, failure, ok, run_checks
from arpo_megatron.doctor.machine import job_checks, machine_checks
from arpo_megatron.rollout.server import free_ports
from arpo_megatron.run_directory import RunDirectory, write_json

PORTS = 32
"""Free ports that a node offers to its services."""
_MEETING = timedelta(seconds=45)
_CANARY_S = 20.0


def main() -> None:
    """Exits well whatever was found: the supervisor reads it."""
    run, token = RunDirectory(Path(sys.argv[1])), sys.argv[2]
    profile, config = load_profile(str(run.cluster)), resolve.load(run.config)
    name, address = os.environ["SLURMD_NODENAME"], os.environ["ARPO_NODE_ADDRESSES"].split(",")
    here = address[int(os.environ["SLURM_PROCID"])]
    checks = [
        ("filesystem", lambda: _canary(run, token)),
        *machine_checks(gpus=profile.gpus_per_node if config.platform != "cpu" else 0),
        *job_checks(config, run.path),
        ("network", lambda: _all_reduce(profile, address[0])),
    ]
    findings = run_checks(checks)
    clock = time.time()  # right after the nodes have met
    try:
        ports = free_ports(PORTS, here, profile.ports)
        findings.append(ok("ports", f"{len(ports)} free at {here}"))
    except Exception as error:  # told like any other finding
        ports, text = [], str(error)
        findings.append(failure("ports", text, "free some, or widen `ports` in the profile"))
    answer = {"node": name, "clock": clock, "ports": ports, "findings": [asdict(item) for item in findings]}
    write_json(run.doctor / f"{name}.json", answer)


def _canary(run: RunDirectory, token: str) -> Finding:
    """A filesystem that is not shared, or is shared late, shows here instead of in a hanging rendezvous."""
    deadline = time.monotonic() + _CANARY_S
    canary = run.doctor / "canary"
    while time.monotonic() < deadline:
        if canary.exists() and json.loads(canary.read_text())["token"] == token:
            return ok("filesystem", f"{run.path} is the supervisor's own")
        time.sleep(0.2)
    return failure("filesystem", f"{canary} is not what the supervisor wrote", "`runs` must be shared by all nodes")


def _all_reduce(profile: ClusterProfile, master: str) -> Finding:
    """A rank a node: NCCL where there are GPUs, else gloo."""
    import torch
    import torch.distributed as dist

    rank, count = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    backend = "nccl" if profile.gpus_per_node and torch.cuda.is_available() else "gloo"
    store = f"tcp://{master}:{os.environ['MASTER_PORT']}"
    started = time.monotonic()
    try:
        dist.init_process_group(backend, init_method=store, rank=rank, world_size=count, timeout=_MEETING)
    except Exception as error:
        text = f"the {count} nodes did not meet at {master}: {' '.join(str(error).split())[:200]}"
        return failure("network", text, "set NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME under `environment`")
    value = torch.ones(1, device="cuda" if backend == "nccl" else "cpu")
    dist.all_reduce(value)
    dist.destroy_process_group()
    if value.item() != count:
        return failure("network", f"an all-reduce over {count} nodes gave {value.item()}", "a NIC or driver is broken")
    return ok("network", f"all-reduce over {count} node(s) with {backend}, {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
