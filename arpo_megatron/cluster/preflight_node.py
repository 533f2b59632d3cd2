"""`python -m arpo_megatron.cluster.preflight_node RUN_DIR TOKEN`: one task on every node of a job, its first step.

A node checks itself, the run directory (it must have the file that the supervisor wrote) and, with one all-reduce, the
other nodes. It writes check results, clock and free ports to RUN_DIR/doctor/NODE.json. If the run directory is not
shared, that report would not arrive, so the node logs the failure and ends the step.
"""

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

from arpo_megatron.cluster.profile import load_profile
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.preflight.allreduce import MEETING_S, all_reduce
from arpo_megatron.launch.preflight.check import CheckResult, failure, ok, run_checks, show
from arpo_megatron.launch.preflight.exposure import check_exposure
from arpo_megatron.launch.preflight.machine import PORTS, job_checks, machine_checks
from arpo_megatron.utils.atomic import write_json
from arpo_megatron.utils.ports import free_ports

REPORTED = "doctor: this node has reported"
"""Last line of a node's output. The supervisor reads no report before this line is in the step's log, because a shared
filesystem may deny for a minute that a file exists if it was asked too early."""
_CANARY_S = 15.0


def main() -> None:
    """Run the checks of this node. The exit code is 0 if the supervisor can read the report."""
    import torch  # noqa: F401  (before any timed check: the import may take a minute on a cold filesystem)

    run, token = RunDirectory(Path(sys.argv[1])), sys.argv[2]
    name, address = os.environ["SLURMD_NODENAME"], os.environ["ARPO_NODE_ADDRESSES"].split(",")
    here = address[int(os.environ["SLURM_PROCID"])]
    findings = run_checks([("filesystem", lambda: _canary(run, token))])
    if not show(findings, f"{name}: "):
        os._exit(1)
    # Not earlier: the files are only there if the check above passed.
    profile, config = load_profile(str(run.cluster)), resolve.load(run.config)
    gpus = profile.gpus_of(config)
    findings += run_checks([*machine_checks(gpus=gpus, on_gpus=gpus > 0, config=config), *job_checks(config, run)])
    rank, count, port = (int(os.environ[name]) for name in ("SLURM_PROCID", "SLURM_NTASKS", "MASTER_PORT"))
    device = "cuda:0" if gpus else "cpu"
    limit_s = MEETING_S + 5.0
    listening = {here}
    network = ("network", lambda: all_reduce(rank, count, address[0], port, device, listening))
    findings += run_checks([network], limit_s, limit_s)
    clock = time.time()  # right after the all-reduce, so that the clocks of nodes can be compared
    findings += run_checks([("exposure", lambda: check_exposure(listening, profile.trusted_networks))])
    try:
        ports = free_ports(PORTS, here, profile.ports)
        findings.append(ok("ports", f"{len(ports)} free at {here}"))
    except Exception as error:  # reported like any other failure
        ports, text = [], str(error)
        findings.append(failure("ports", text, "free some ports, or widen `ports` in the profile"))
    answer = {"node": name, "clock": clock, "ports": ports, "findings": [asdict(item) for item in findings]}
    write_json(run.doctor / f"{name}.json", answer)
    print(REPORTED, flush=True)
    os._exit(0)  # a hanging check would keep the interpreter alive


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
