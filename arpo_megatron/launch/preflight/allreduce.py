"""One all-reduce as a check of the network: a rank per node of a job, or ranks of this machine (`arpo doctor`).

`python -m arpo_megatron.launch.preflight.allreduce RANK COUNT PORT DEVICE` is one rank of this machine; it prints its
result as JSON.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta

from arpo_megatron.hardware.environment import LOOPBACK_ENVIRONMENT
from arpo_megatron.launch.preflight.check import CheckResult, failure, ok
from arpo_megatron.utils.ports import is_loopback, listening_addresses

MEETING_S = 40.0
"""Time that ranks wait for each other."""
_START_S = 60.0
_HERE = "127.0.0.1"


def all_reduce(
    rank: int,
    count: int,
    address: str,
    port: int,
    device: str,
    listening: set[str],
    *,
    measure: Callable[[], None] = lambda: None,
    timeout_s: float = MEETING_S,
) -> CheckResult:
    """Join an all-reduce of `count` ranks at the address of rank 0, with NCCL on a GPU and gloo on "cpu".

    Args:
        rank: this rank.
        count: number of ranks.
        address: address of rank 0.
        port: port of rank 0.
        device: "cpu" or a GPU.
        listening: receives the addresses at which this process listens meanwhile.
        measure: called in the process group after the all-reduce.
        timeout_s: how long ranks wait for each other.
    """
    import torch
    import torch.distributed as dist

    from arpo_megatron.utils.stores import tcp_store

    started = time.monotonic()
    backend = "gloo" if device == "cpu" else "nccl"
    try:
        if device != "cpu":
            torch.cuda.set_device(device)
        if is_loopback(address):
            os.environ.update(LOOPBACK_ENVIRONMENT)
        timeout = timedelta(seconds=timeout_s)
        store = tcp_store(rank, count, address, port, timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=timeout)
        value = torch.ones(1, device=device)
        dist.all_reduce(value)  # NCCL connects only here
        total = value.item()
        listening.update(host for host, _ in listening_addresses())
        elapsed = time.monotonic() - started
        if total == count:
            measure()
        dist.destroy_process_group()
    except Exception as error:
        text = f"{count} ranks did not meet at {address}: {' '.join(str(error).split())[:200]}"
        return failure("network", text, "set NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME under `environment`")
    if total != count:
        return failure(
            "network", f"an all-reduce over {count} ranks gave {total}", "check the network card and its driver"
        )
    return ok("network", f"all-reduce over {count} rank(s) with {backend}, {elapsed:.1f} s")


def check_local_all_reduce(gpus: int, port: int, listening: set[str]) -> CheckResult:
    """Run one rank per GPU, or two on the CPU, and return the worst result. `listening` is that of `all_reduce`."""
    count = gpus or 2
    command = [sys.executable, "-m", "arpo_megatron.launch.preflight.allreduce"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(count), str(port), f"cuda:{rank}" if gpus else "cpu"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(count)
    ]
    deadline = time.monotonic() + _START_S + MEETING_S
    try:
        outputs = [rank.communicate(timeout=max(0.0, deadline - time.monotonic()))[0] for rank in ranks]
    except subprocess.TimeoutExpired:
        return failure(
            "network",
            f"{count} ranks on this machine did not meet within {_START_S + MEETING_S:g} s",
            "check the loopback interface and the GPUs, or try again when the machine is less busy",
        )
    finally:
        for rank in ranks:
            rank.kill()
    answers = [json.loads(text.splitlines()[-1]) for text in outputs if text]
    found = [CheckResult(**answer["result"]) for answer in answers]
    listening.update(*(answer["listening"] for answer in answers))
    if len(found) < count:
        return failure(
            "network", f"{count - len(found)} of {count} ranks died in an all-reduce", "see the driver's log"
        )
    return max(found, key=lambda item: item.level == "failure")


if __name__ == "__main__":
    _rank, _count, _port = map(int, sys.argv[1:4])
    _listening: set[str] = set()
    _result = all_reduce(_rank, _count, _HERE, _port, sys.argv[4], _listening)
    print(json.dumps({"result": asdict(_result), "listening": sorted(_listening)}))
