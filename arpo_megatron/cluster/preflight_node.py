"""`python -m arpo_megatron.cluster.preflight_node RUN_DIR TOKEN`: one task on every node of a job, its first step.

Each node looks at itself, at the run directory (a canary that the supervisor wrote must be there) and, through one
all-reduce, at the others; then it writes RUN_DIR/doctor/NODE.json: findings, clock, free ports. Without the canary no
report would arrive, so such a node says it in its log and ends the step.
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
from arpo_megatron.launch.preflight.machine import PORTS, job_checks, machine_checks
from arpo_megatron.utils.atomic import write_json
from arpo_megatron.utils.ports import free_ports

REPORTED = "doctor: this node has reported"
"""Its last line. The supervisor looks for it in the step's log, and for no report before it has been written: a shared
filesystem may go on saying for a minute that a file is not there."""
_CANARY_S = 15.0


def main() -> None:
    """Exits well if the supervisor can read what was found."""
    import torch  # noqa: F401  (before any check: a minute goes by on a cold filesystem, and nothing is wrong)

    run, token = RunDirectory(Path(sys.argv[1])), sys.argv[2]
    name, address = os.environ["SLURMD_NODENAME"], os.environ["ARPO_NODE_ADDRESSES"].split(",")
    here = address[int(os.environ["SLURM_PROCID"])]
    findings = run_checks([("filesystem", lambda: _canary(run, token))])
    if not show(findings, f"{name}: "):
        os._exit(1)
    # Not before it is known that they are there.
    profile, config = load_profile(str(run.cluster)), resolve.load(run.config)
    gpus = profile.gpus_of(config)
    findings += run_checks([*machine_checks(gpus=gpus, on_gpus=gpus > 0, config=config), *job_checks(config, run)])
    rank, count, port = (int(os.environ[name]) for name in ("SLURM_PROCID", "SLURM_NTASKS", "MASTER_PORT"))
    device = "cuda:0" if gpus else "cpu"  # where torch cannot use GPUs that the job has, nobody meets
    limit_s = MEETING_S + 5.0
    meeting = [("network", lambda: all_reduce(rank, count, address[0], port, device))]
    findings += run_checks(meeting, limit_s, limit_s)
    clock = time.time()  # right after the nodes have met
    try:
        ports = free_ports(PORTS, here, profile.ports)
        findings.append(ok("ports", f"{len(ports)} free at {here}"))
    except Exception as error:  # told like any other finding
        ports, text = [], str(error)
        findings.append(failure("ports", text, "free some, or widen `ports` in the profile"))
    answer = {"node": name, "clock": clock, "ports": ports, "findings": [asdict(item) for item in findings]}
    write_json(run.doctor / f"{name}.json", answer)
    print(REPORTED, flush=True)
    os._exit(0)  # a check that hangs would keep the interpreter from ending


def _canary(run: RunDirectory, token: str) -> CheckResult:
    """A filesystem that is not shared, or is shared late, shows here instead of in a hanging rendezvous."""
    deadline = time.monotonic() + _CANARY_S
    canary = run.doctor / "canary"
    while time.monotonic() < deadline:
        if canary.exists() and json.loads(canary.read_text())["token"] == token:
            return ok("filesystem", f"{run.path} is the supervisor's own")
        time.sleep(0.2)
    return failure("filesystem", f"{canary} is not what the supervisor wrote", "`runs` must be shared by all nodes")


if __name__ == "__main__":
    main()
