"""Trainer module of test_failing_rank.py: rank 1 fails in the way that the run directory's `how.txt` names.

Meanwhile rank 0 sits in a collective that the other never joins. `failed_at_s.txt` is when, by the
monotonic clock, and `listening.json` are the addresses at which rank 1 listened.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from arpo_megatron.actor import parallel
from arpo_megatron.config import ParallelConfig
from arpo_megatron.utils.ports import listening_addresses
from arpo_megatron.utils.rank_main import log_failure, rank_main


def fail(how: str) -> None:
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    try:  # its clean-up closes the groups and then hangs
        raise ValueError("the guilty rank's own words")
    except ValueError as error:
        log_failure(error)
        parallel.destroy()
        time.sleep(600)


@rank_main
def main() -> None:
    run = Path(sys.argv[1])
    how = (run / "how.txt").read_text()
    parallel.initialize(ParallelConfig(data=2), seed=1)
    if dist.get_rank() == 1:
        time.sleep(0.5)
        (run / "listening.json").write_text(json.dumps(sorted(listening_addresses())))
        (run / "failed_at_s.txt").write_text(repr(time.monotonic()))
        fail(how)
    dist.all_reduce(torch.zeros(1))


if __name__ == "__main__":
    main()
