"""A failing rank ends all ranks soon, and the user reads its error first."""

import json
import re
import time
from pathlib import Path

import psutil
import pytest

from arpo_megatron.config import JobConfig, ParallelConfig
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.services import Job, run_trainer
from arpo_megatron.launch.supervisor import Supervisor
from arpo_megatron.utils.processes import ProcessDiedError

ROOT = Path(__file__).resolve().parents[2]
END_S = 100.0  # a rank that is not stopped stays in its collective or its clean-up for 600 s


@pytest.mark.parametrize("how", ["hangs in its clean-up", "is killed"])
def test_failing_rank_is_reported_first_and_all_ranks_end(tmp_path, how):
    run = RunDirectory(tmp_path)
    (tmp_path / "how.txt").write_text(how)
    run.logs.mkdir()
    (run.logs / "failing_rank.log").write_text("---- rank 9 failed:\nof an earlier attempt\n")
    config = JobConfig(name="test", parallel=ParallelConfig(data=2))
    env = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    with Supervisor(run.logs) as supervisor, pytest.raises(ProcessDiedError) as caught:
        run_trainer(Job(config, run, supervisor), "tests.launch.failing_rank", env=env)
    ended_s = time.monotonic()
    assert 0 < ended_s - float((tmp_path / "failed_at_s.txt").read_text()) < END_S
    assert not [p for p in psutil.process_iter() if str(tmp_path) in " ".join(_command(p))]
    listening = json.loads((tmp_path / "listening.json").read_text())
    assert listening and all(host == "127.0.0.1" for host, _ in listening), "gloo's and no other, on loopback"
    message, log = str(caught.value), run.logs / "failing_rank.log"
    assert f"log: {log}" in message and "rank 9" not in message
    if how == "is killed":  # it can say nothing itself: the launcher names it, and no other rank speaks up
        assert "failing_rank ended with exit code 137" in message
        assert "arpo: rank 1 of 2 was killed by SIGKILL" in message
        assert "rank 0 failed" not in log.read_text()
    else:
        first = re.search(r"rank (\d) failed:\n(.*)", log.read_text().split("earlier attempt\n")[1])
        assert first is not None and first[1] == "1"
        assert (
            message.index("rank 1 failed") < message.index("Traceback") < message.index("the guilty rank's own words")
        )


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return []
