"""The launcher of a machine's ranks: what a rank gets, whose failure is reported, and that no rank is left."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.test_processes import gone

ROOT = Path(__file__).resolve().parents[2]
RANK = """
import json, os, pathlib, signal, sys, time
here, behaviour = pathlib.Path(sys.argv[1]), sys.argv[2:]
store = pathlib.Path(os.environ["ARPO_STORE_FILE"])
seen = {"pid": os.getpid(), "environment": dict(os.environ), "mode": store.parent.stat().st_mode, "store": str(store)}
if "stubborn" in behaviour:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
(here / "partial").with_suffix("." + os.environ["RANK"]).write_text(json.dumps(seen))
(here / "partial").with_suffix("." + os.environ["RANK"]).rename(here / ("rank" + os.environ["RANK"]))
while len(list(here.glob("rank?"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
if "ends" in behaviour:
    sys.exit(0)
if os.environ["RANK"] == "1" and "fails" in behaviour:
    sys.exit(3)
if os.environ["RANK"] == "1" and "is_killed" in behaviour:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


def launch(folder: Path, *behaviour: str) -> "subprocess.Popen[str]":
    (folder / "a_rank.py").write_text(RANK)
    paths = {"PYTHONPATH": f"{folder}:{ROOT}", "TMPDIR": str(folder), "MASTER_ADDR": "192.0.2.1"}
    command = [sys.executable, "-m", "arpo_megatron.launch.ranks", "2", "a_rank", str(folder), *behaviour]
    return subprocess.Popen(command, env={**os.environ, **paths}, stderr=subprocess.PIPE, text=True)


def started(folder: Path) -> list[dict[str, object]]:
    """Wait for both ranks and return what each has seen."""
    files = [folder / "rank0", folder / "rank1"]
    deadline = time.monotonic() + 60
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return [json.loads(file.read_text()) for file in files]


def test_ranks_get_torch_variables_and_a_private_store(tmp_path: Path) -> None:
    job = launch(tmp_path, "ends")
    ranks = started(tmp_path)
    assert (job.wait(60), job.communicate()[1]) == (0, "")
    for number, rank in enumerate(ranks):
        variables = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        assert isinstance(rank["environment"], dict)
        assert rank["environment"].items() >= variables.items()
        assert "MASTER_ADDR" not in rank["environment"], "a variable of the user's shell"
        assert stat.S_IMODE(int(str(rank["mode"]))) == 0o700
    assert not list(tmp_path.glob("arpo-ranks-*")), "the store ends with its ranks"


@pytest.mark.parametrize(
    ("how", "code", "line"),
    [("fails", 3, "rank 1 of 2 ended with exit code 3"), ("is_killed", 137, "rank 1 of 2 was killed by SIGKILL")],
)
def test_first_failing_rank_is_reported_and_ends_the_others(tmp_path: Path, how: str, code: int, line: str) -> None:
    job = launch(tmp_path, how, "stubborn")
    ranks = started(tmp_path)
    _, said = job.communicate(timeout=60)
    assert job.returncode == code
    assert said == f"arpo: {line}; all ranks were ended\n"
    assert all(gone(int(str(rank["pid"])), 10.0) for rank in ranks)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_the_launcher(tmp_path: Path, number: signal.Signals) -> None:
    job = launch(tmp_path)
    ranks = started(tmp_path)
    job.send_signal(number)
    job.communicate(timeout=60)
    assert job.returncode == (143 if number is signal.SIGTERM else -number)
    assert all(gone(int(str(rank["pid"])), 10.0) for rank in ranks)
