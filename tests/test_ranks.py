"""A rank dies with its job, also while it is being started."""

import os
import subprocess
import sys

from arpo_megatron.processes import JOB_PID

RANK = "from arpo_megatron.ranks import rank_main; rank_main(lambda: print('began'))()"


def started_by(job: int) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, JOB_PID: str(job)}
    return subprocess.run([sys.executable, "-c", RANK], env=environment, capture_output=True, text=True, timeout=250)


def test_a_rank_whose_job_has_ended_does_not_begin():
    with subprocess.Popen([sys.executable, "-c", ""]) as job:
        job.wait()
        gone = job.pid
    done = started_by(gone)
    assert (done.returncode, done.stdout) == (1, "")
    alive = started_by(os.getpid())
    assert (alive.returncode, alive.stdout) == (0, "began\n"), alive.stderr
