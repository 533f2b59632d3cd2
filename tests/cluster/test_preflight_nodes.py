"""Preflight step of a job: reports of its nodes, and which failure ends the job."""

import json
import re
import sys
import time
from pathlib import Path

import pytest

from arpo_megatron.cluster.backend import NodeError, SlurmBackend
from arpo_megatron.cluster.preflight import (
    Report,
    compare_reports,
    examine_nodes,
    guilty_nodes,
    judge_speeds,
    worst_failure,
)
from arpo_megatron.cluster.profile import check_profile, save_profile
from arpo_megatron.cluster.slurm import Node
from arpo_megatron.config.io import save_config
from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.preflight.check import CheckResult, failure, ok
from arpo_megatron.launch.supervisor import Supervisor
from arpo_megatron.plan.node_layout import lay_out_nodes
from arpo_megatron.utils.ports import free_ports


def report(*findings: CheckResult, clock: float = 100.0) -> Report:
    return Report(findings, clock, [])


def test_clocks_are_not_compared_after_a_failed_all_reduce() -> None:
    """Two nodes wait 44 s for each other in turn, so their clocks were read 44 s apart."""
    alone = failure("network", "2 ranks did not meet")
    reports = {"n1": report(alone), "n2": report(alone, clock=144.0)}
    findings = [*((name, alone) for name in reports), *compare_reports(reports, ["n1", "n2"])]
    assert worst_failure(findings) == ("n1", alone)
    assert [item.level for _, item in compare_reports(reports, ["n1", "n2"])] == ["warning"]


def test_clocks_are_compared_after_an_all_reduce() -> None:
    met = ok("network", "all-reduce")
    reports = {"n1": report(met), "n2": report(met, clock=106.0)}
    worst = worst_failure(compare_reports(reports, ["n1", "n2"]))
    assert worst is not None and worst[1].name == "clock" and "6.00 s between the nodes" in worst[1].text
    assert worst_failure(compare_reports({"n1": report(met), "n2": report(met, clock=104.0)}, ["n1", "n2"])) is None


def test_missing_report_has_precedence_over_network_failures() -> None:
    alone = failure("network", "2 ranks did not meet")
    worst = worst_failure([("n1", alone), *compare_reports({"n1": report(alone)}, ["n1", "n2"])])
    assert worst is not None and worst[0] == "n2" and "the node hangs" in worst[1].text


@pytest.mark.parametrize(
    ("check", "failed", "guilty"),
    [
        ("gpu health", ["n2"], ["n2"]),
        ("gpu health", ["n1", "n2"], ["n1", "n2"]),
        ("bandwidth", ["n2"], ["n2"]),
        ("pins", ["n1", "n2"], []),
        ("clock", ["all nodes"], []),
    ],
)
def test_node_that_fails_what_others_pass_is_guilty(check: str, failed: list[str], guilty: list[str]) -> None:
    findings = [(name, failure(check, "x")) for name in failed]
    findings += [("n1", failure("other", "x")), ("n2", ok(check, "x"))]
    assert guilty_nodes(check, findings, ["n1", "n2"]) == guilty


@pytest.mark.parametrize(
    ("longest_s", "disk_gb_s", "level"), [(299, 1.0, "ok"), (301, 1.0, "warning"), (299, 1e-6, "warning")]
)
def test_longest_step_and_a_save_must_fit_into_signal_s(
    longest_s: float, disk_gb_s: float, level: str, tmp_path: Path
) -> None:
    run, config = RunDirectory(tmp_path), resolve.resolve("quickstart", overrides=["platform=cpu"])
    save_config(config, run.config)
    rows = [{"step": 1, "seconds/rollout": longest_s - 9, "seconds/update": 9}, {"step": 2, "seconds/rollout": 1}]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    profile = check_profile({"account": "a", "runs": "/tmp", "gpus_per_node": 0, "signal_s": 300}, "here")
    backend = SlurmBackend(profile, lay_out_nodes(config, 0, 1), [Node("n1", "127.0.0.1")], run, "7")
    found = {item.name: item for _, item in judge_speeds(backend, [Report((), 100.0, [], None, disk_gb_s)])}
    assert found["signal"].level == level
    assert f"signal_s=300; the longest step took {longest_s} s, a save takes" in found["signal"].text


BOTH = """#!/bin/bash
while [ "$1" != arpo ]; do shift; done; shift
export SLURM_NTASKS=2
for rank in 0 1; do
  SLURM_PROCID=$rank SLURM_NODEID=$rank SLURM_LOCALID=0 SLURMD_NODENAME=n$((rank + 1)) "$@" & started="$started $!"
done
for task in $started; do wait $task || exit 1; done
"""


def examined(
    monkeypatch: pytest.MonkeyPatch, folder: Path, gpus: int = 0, container: str | None = None, **programs: str
) -> SlurmBackend:
    """Run `examine_nodes` for two nodes with stand-ins for programs (`srun`, ...)."""
    (folder / "bin").mkdir()
    for name, text in programs.items():
        (folder / "bin" / name.replace("_", "-")).write_text(text)
        (folder / "bin" / name.replace("_", "-")).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder / "bin"), prepend=":")
    overrides = ["sandbox.isolation=limits", *([] if gpus else ["platform=cpu"])]
    run, config = RunDirectory(folder / "run"), resolve.resolve("quickstart", overrides=overrides)
    run.path.mkdir()
    values = {"account": "a", "runs": "/tmp", "gpus_per_node": gpus, "container": container}
    profile = check_profile(values, "here")
    save_config(config, run.config)
    save_profile(profile, run.cluster)
    nodes = [Node("n1", "127.0.0.1"), Node("n2", "127.0.0.2")]
    backend = SlurmBackend(profile, lay_out_nodes(config, gpus, 2), nodes, run, "7")
    with Supervisor(run.logs) as supervisor:
        try:
            examine_nodes(backend, supervisor, *free_ports(1), lambda: None)
        finally:
            assert not [each for each in supervisor.running if each.process.poll() is None]
    return backend


def test_two_nodes_reduce_and_report_free_ports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two local processes stand for the nodes; test_on_slurm.py has real ones."""
    backend = examined(monkeypatch, tmp_path, srun=BOTH)
    assert [len(backend.free_ports[name]) for name in ("n1", "n2")] == [32, 32]
    output = capsys.readouterr().out
    assert "n1: ok       network      all-reduce over 2 rank(s) with gloo" in output
    assert "all nodes: ok       clock" in output
    assert re.search(r"all nodes: ok       bandwidth    all-reduce: \S+ GB/s per rank; to another node: median", output)
    assert re.search(r"all nodes: ok       disk speed   \S+ GB/s from all nodes to ", output)


HANGING = """#!{python}
import json, pathlib, sys, time
run = pathlib.Path(sys.argv[-2])
finding = {{"name": "network", "level": "failure", "text": "2 ranks did not meet", "fix": "x"}}
report = {{"findings": [finding], "clock": 1.0, "ports": []}}
(run / "doctor" / "n1.json").write_text(json.dumps(report))
print("doctor: this node has reported", flush=True)
time.sleep(100)
"""


def test_hanging_node_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first node reports, the second does not."""
    monkeypatch.setattr("arpo_megatron.cluster.preflight.LAST_S", 0.5)
    started = time.monotonic()
    with pytest.raises(NodeError, match="doctor: report on n2: no report: the node hangs") as caught:
        examined(monkeypatch, tmp_path, srun=HANGING.format(python=sys.executable))
    assert caught.value.guilty == ("n2",)
    assert time.monotonic() - started < 90  # the stand-in hangs for 100 s


LOST = """#!/bin/sh
echo 'srun: error: Task launch for StepId=7.1 failed on node n2: Communication connection failure'
exit 1
"""


def test_step_that_does_not_start_is_a_silent_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(NodeError, match=r"doctor: a node cannot run the checks: .*\n.* failed on node n2"):
        examined(monkeypatch, tmp_path, srun=LOST)


UNPACKING = """#!/bin/bash
[[ "$*" == *--job-name=image* ]] || {{ echo doctor >>{log}; exit 1; }}
sleep 1; echo image >>{log}
"""


@pytest.mark.parametrize(
    ("limit_s", "why", "steps"),
    [(100.0, "a node cannot run the checks", "image\ndoctor\n"), (0.1, "not all nodes have unpacked", "")],
)
def test_checks_begin_when_all_nodes_have_unpacked_the_image(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit_s: float, why: str, steps: str
) -> None:
    (log := tmp_path / "steps").touch()
    monkeypatch.setattr("arpo_megatron.cluster.preflight.IMAGE_S", limit_s)
    with pytest.raises(NodeError, match=f"doctor: {why}"):
        examined(monkeypatch, tmp_path, container="/image.sqsh", srun=UNPACKING.format(log=log))
    assert log.read_text() == steps


UNSHARED = """#!{python}
import json, os, pathlib, sys
from arpo_megatron.cluster import preflight_node
run, token = sys.argv[-2:]
finding = {{"name": "rdma", "level": "warning", "text": "no RDMA device", "fix": "x"}}
report = {{"findings": [finding], "clock": 1.0, "ports": []}}
(pathlib.Path(run) / "doctor" / "n1.json").write_text(json.dumps(report))
os.environ |= {{"SLURMD_NODENAME": "n2", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}}
os.environ |= {{"SLURM_NODEID": "1", "SLURM_LOCALID": "0"}}
sys.argv[1:] = [{run}, {token}]
preflight_node._CANARY_S = 0.1
preflight_node.main()
"""


@pytest.mark.parametrize(("run", "token"), [("run", "'another'"), ("'/not/there'", "token")])
def test_unshared_run_directory_is_reported_with_its_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], run: str, token: str
) -> None:
    """The second node has another directory of that name, or none; the report of the first is shown too."""
    with pytest.raises(
        NodeError, match=r"^doctor: filesystem on n2: \S+/canary is not the supervisor.*: set `runs`"
    ) as said_so:
        examined(monkeypatch, tmp_path, srun=UNSHARED.format(python=sys.executable, run=run, token=token))
    assert not said_so.value.guilty, "other nodes would not help"
    output = capsys.readouterr().out
    assert "n1: warning  rdma         no RDMA device" in output
    assert "n2: failure  filesystem   " in output


def test_gpus_unusable_by_torch_are_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    driver = "#!/bin/sh\necho NVIDIA H100 80GB HBM3, 580.65.06, 81559 MiB\n"
    with pytest.raises(UserError, match=r"^doctor: \w+ on n1: "):
        examined(monkeypatch, tmp_path, 1, srun=BOTH, nvidia_smi=driver)
    output = capsys.readouterr().out
    assert "n1: failure  gpu          nvidia-smi lists 1 GPUs, torch can use 0 of the 1" in output
    assert "n1: failure  network" in output and "with gloo" not in output
