"""What would fail a job is said before it starts, with how to mend it."""

import sys
import threading
import time
from pathlib import Path

import pytest

from arpo_megatron import resolve
from arpo_megatron.cluster.profile import ClusterProfile, check_profile, save_profile
from arpo_megatron.cluster.site import SlurmSite
from arpo_megatron.cluster.slurm import Node
from arpo_megatron.config import JobConfig
from arpo_megatron.doctor.finding import Finding, failure, ok, run_checks, show
from arpo_megatron.doctor.job import Report, examine_nodes, guilty, judged
from arpo_megatron.doctor.local import examine
from arpo_megatron.doctor.machine import (
    check_clock,
    check_disk,
    check_gpus,
    check_isolation,
    check_model_files,
    check_packages,
    check_wandb,
)
from arpo_megatron.doctor.slurm import check_gres, check_partition, check_preemption
from arpo_megatron.errors import UserError
from arpo_megatron.plan.roles import plan_roles
from arpo_megatron.processes import Roles
from arpo_megatron.rollout.server import free_ports
from arpo_megatron.run_directory import RunDirectory
from tools_sandbox.python_tool.walls import Level


def profile(**values: object) -> ClusterProfile:
    return check_profile({"account": "a", "runs": "/tmp", **values}, "here")


def job(*words: str) -> JobConfig:
    return resolve.resolve("quickstart", words=words)


def test_a_check_that_cannot_be_made_is_a_failure_of_that_name() -> None:
    def broken() -> None:
        raise OSError("no such device")

    found = run_checks([("fine", lambda: ok("fine", "yes")), ("odd", broken)])  # type: ignore[list-item]  # returns nothing
    assert [item.level for item in found] == ["ok", "failure"]
    assert "no such device" in str(found[1])
    assert show(found[:1]) and not show(found)


def test_a_check_that_hangs_is_a_failure_of_that_name_and_the_others_are_made() -> None:
    hung = threading.Event()
    checks = [("mount", lambda: ok("mount", str(hung.wait()))), ("fine", lambda: ok("fine", "yes"))]
    found = run_checks(checks, each_s=0.2)
    hung.set()
    assert [(item.name, item.level) for item in found] == [("mount", "failure"), ("fine", "ok")]
    assert "no answer for 1 s" in found[0].text


def report(*findings: Finding, clock: float = 100.0) -> Report:
    return Report(findings, clock, [])


def test_clocks_of_nodes_that_have_not_met_are_not_compared() -> None:
    """Two nodes wait 44 s for each other, one after the other: their clocks were read 44 s apart."""
    alone = failure("network", "2 ranks did not meet")
    reports = {"n1": report(alone), "n2": report(alone, clock=144.0)}
    findings = [*((name, alone) for name in reports), *judged(reports, ["n1", "n2"])]
    assert guilty(findings) == ("n1", alone)
    assert [item.level for _, item in judged(reports, ["n1", "n2"])] == ["warning"]


def test_clocks_of_nodes_that_have_met_are() -> None:
    met = ok("network", "all-reduce")
    reports = {"n1": report(met), "n2": report(met, clock=106.0)}
    worst = guilty(judged(reports, ["n1", "n2"]))
    assert worst is not None and worst[1].name == "clock" and "6.00 s between the nodes" in worst[1].text
    assert guilty(judged({"n1": report(met), "n2": report(met, clock=104.0)}, ["n1", "n2"])) is None


def test_a_node_that_nobody_met_is_blamed_before_the_network() -> None:
    alone = failure("network", "2 ranks did not meet")
    worst = guilty([("n1", alone), *judged({"n1": report(alone)}, ["n1", "n2"])])
    assert worst is not None and worst[0] == "n2" and "it hangs" in worst[1].text


BOTH = """#!/bin/bash
while [ "$1" != arpo ]; do shift; done; shift
export SLURM_NTASKS=2
for rank in 0 1; do SLURM_PROCID=$rank SLURMD_NODENAME=n$((rank + 1)) "$@" & started="$started $!"; done
for task in $started; do wait $task || exit 1; done
"""


def examined(monkeypatch: pytest.MonkeyPatch, folder: Path, srun: str) -> SlurmSite:
    """`examine_nodes` of two nodes, with that program in place of srun."""
    program = folder / "bin" / "srun"
    program.parent.mkdir()
    program.write_text(srun)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    run, config = RunDirectory(folder / "run"), job("platform=cpu", "sandbox.isolation=limits")
    run.path.mkdir()
    cpus = profile(gpus_per_node=0)
    resolve.save(config, run.config)
    save_profile(cpus, run.cluster)
    nodes = [Node("n1", "127.0.0.1"), Node("n2", "127.0.0.2")]
    site = SlurmSite(cpus, plan_roles(config, 0, 2), nodes, run, "7")
    with Roles(run.logs) as roles:
        try:
            examine_nodes(site, roles, *free_ports(1), lambda: None)
        finally:
            assert not [role for role in roles.running if role.process.poll() is None]
    return site


def test_two_nodes_meet_and_offer_ports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two processes of this machine are the nodes; Slurm's own are in test_on_slurm.py."""
    site = examined(monkeypatch, tmp_path, BOTH)
    assert [len(site.free_ports[name]) for name in ("n1", "n2")] == [32, 32]
    said = capsys.readouterr().out
    assert "n1: ok       network      all-reduce over 2 rank(s) with gloo" in said
    assert "all nodes: ok       clock" in said


HANGING = """#!{python}
import json, pathlib, sys, time
run = pathlib.Path(sys.argv[-2])
finding = {{"name": "network", "level": "failure", "text": "2 ranks did not meet", "mend": "x"}}
report = {{"findings": [finding], "clock": 1.0, "ports": []}}
(run / "doctor" / "n1.json").write_text(json.dumps(report))
print("doctor: this node has reported", flush=True)
time.sleep(100)
"""


def test_a_node_that_hangs_ends_the_job_with_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first node reports, the second never does."""
    monkeypatch.setattr("arpo_megatron.doctor.job.LAST_S", 0.5)
    started = time.monotonic()
    with pytest.raises(UserError, match="doctor: report on n2: the node left none: it hangs"):
        examined(monkeypatch, tmp_path, HANGING.format(python=sys.executable))
    assert time.monotonic() - started < 90  # what hangs does so for 100 s


def test_a_disk_that_cannot_hold_the_checkpoints_is_refused(tmp_path: Path) -> None:
    assert check_disk(job(), tmp_path / "runs").level == "ok"
    large = resolve.resolve("deepsearch_14b", words=["train.keep_checkpoints=20"])
    found = check_disk(large, tmp_path / "runs")  # of a model that is not here either
    assert (
        "4343.0 GB are wanted for checkpoints" in found.text
    )  # 21 of 14,768,307,200 parameters, 14 bytes each, and 1 GiB
    assert found.level == "failure" and "train.keep_checkpoints" in found.mend
    unknown = check_disk(job(f"model.path={tmp_path}"), tmp_path / "runs")
    assert unknown.level == "warning" and "is not known" in unknown.text


def test_half_a_model_is_refused(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        found = check_model_files(job(f"model.path={tmp_path}"))
        assert found.level == "failure" and name in found.text
        (tmp_path / name).write_text("{}")
    assert "*.safetensors" in check_model_files(job(f"model.path={tmp_path}")).text
    (tmp_path / "model.safetensors").touch()
    assert check_model_files(job(f"model.path={tmp_path}")).level == "ok"
    named = check_model_files(resolve.resolve("deepsearch_14b"))
    assert named.level == "failure" and "hf download Qwen/Qwen3-14B" in named.mend
    assert check_model_files(job()).level == "ok"


def test_metrics_that_go_online_want_a_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    online = job("monitor.wandb=online")
    assert check_wandb(online, {}).level == "failure"
    assert check_wandb(online, {"WANDB_API_KEY": "env"}).level == "failure"  # which is this environment
    assert check_wandb(online, {"WANDB_API_KEY": "/home/me/key"}).level == "ok"  # which nodes read
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password x\n")
    assert check_wandb(online, {}).level == "ok"
    assert check_wandb(job(), {}).level == "ok"


class Cluster:
    """Slurm's answers on a cluster unlike the one that tests can start: a default that comes second, and QOS."""

    def __init__(self, preempt_type: str, grace: str, default: str = "gpu*", more: str = "") -> None:
        self.type, self.grace, self.default = preempt_type, grace, default
        self.more = more or "PreemptParameters       = send_user_signal\n"

    def call(self, *words: str, check: bool = True) -> str:
        if words[0] == "sinfo":
            rows = {
                "cpu": ("cpu", "up", "1:00", "9", "(null)"),
                "gpu": (self.default, "up", "infinite", "4", "gpu:h100:8"),
            }
            wanted = [word.partition("=")[2] for word in words if word.startswith("--partition=")] or list(rows)
            fields = words[words.index("-o") + 1].split("|")
            places = ["%P", "%a", "%l", "%D", "%G"]
            return "".join("|".join(rows[name][places.index(field)] for field in fields) + "\n" for name in wanted)
        if words[:3] == ("scontrol", "show", "config"):
            return f"PreemptMode             = REQUEUE\nPreemptType             = preempt/{self.type}\n{self.more}"
        if words[0] == "sacctmgr":
            return f"{self.grace}\n"
        assert words == ("scontrol", "show", "partition", "gpu")
        return f"PartitionName=gpu\n   DefaultTime=NONE GraceTime={self.grace}\n   PreemptMode=REQUEUE State=UP\n"


def test_without_a_partition_the_default_one_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """sinfo's first line is that of a partition with a minute and no GPU."""
    monkeypatch.setattr("arpo_megatron.cluster.slurm.call", Cluster("partition_prio", "600").call)
    assert "gpu: 4 nodes, up, time limit infinite" in check_partition(profile()).text
    assert check_gres(profile()).level == "ok"
    assert "less than time=" in check_partition(profile(partition="cpu")).text
    monkeypatch.setattr("arpo_megatron.cluster.slurm.call", Cluster("partition_prio", "600", default="gpu").call)
    assert "no default" in check_partition(profile()).text


@pytest.mark.parametrize(
    ("kind", "grace", "qos", "level", "text"),
    [
        ("partition_prio", "600", None, "ok", "600 s before the end"),
        ("partition_prio", "60", None, "warning", "60 s before the end, less than signal_s=300"),
        ("partition_prio", "0", None, "warning", "GraceTime=0 leaves no time"),
        ("qos", "00:10:00", "high", "ok", "600 s before the end"),
        ("qos", "00:00:00", "high", "warning", "GraceTime=0 leaves no time"),
        ("qos", "00:10:00", None, "warning", "which the profile does not name"),
    ],
)
def test_a_warning_without_time_to_save_is_none(
    monkeypatch: pytest.MonkeyPatch, kind: str, grace: str, qos: str | None, level: str, text: str
) -> None:
    monkeypatch.setattr("arpo_megatron.cluster.slurm.call", Cluster(kind, grace).call)
    found = check_preemption(profile(qos=qos))
    assert (found.level, text in found.text) == (level, True), found


@pytest.mark.parametrize(("kind", "level"), [("cgroup", "ok"), ("pgid", "ok"), ("linuxproc", "warning")])
def test_without_the_users_signal_term_is_the_warning(monkeypatch: pytest.MonkeyPatch, kind: str, level: str) -> None:
    answers = Cluster("partition_prio", "600", more=f"ProctrackType           = proctrack/{kind}\n")
    monkeypatch.setattr("arpo_megatron.cluster.slurm.call", answers.call)
    found = check_preemption(profile())
    assert found.level == level and "TERM" in found.text, found


def test_a_clock_that_is_not_the_filesystems_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert check_clock(tmp_path / "runs").level == "ok"
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now + 44)
    found = check_clock(tmp_path / "runs")
    assert found.level == "failure" and "s from the clock of the filesystem" in found.text


def test_an_image_that_lacks_what_the_recipe_needs_is_refused() -> None:
    assert check_packages(job("engine.router=sglang"), 0).level == "ok"
    found = check_packages(job(), 8)
    assert found.level == "failure" and "quickstart wants transformer-engine, sgl_kernel, not installed" in found.text
    assert "transformer-engine" in check_packages(None, 8).text and check_packages(None, 0).level == "ok"
    assert "no_such_module" in check_packages(job("sandbox.preload=[no_such_module]"), 0).text


def test_the_isolation_of_foreign_code_is_tried_and_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    reached = check_isolation(job("sandbox.isolation=limits"))
    assert reached.level == "ok" and "at least limits is asked for" in reached.text
    monkeypatch.setattr("tools_sandbox.python_tool.walls.Walls.level", lambda walls: Level.LIMITS)  # an old kernel
    found = check_isolation(job())
    assert found.level == "failure" and "level limits, sandbox.isolation wants contained" in found.text


def test_a_node_without_its_gpus_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check_gpus(8).level == "failure"


def test_this_machine_can_run_the_quickstart(capsys: pytest.CaptureFixture[str]) -> None:
    assert examine(job("platform=cpu"), None)
    lines = capsys.readouterr().out.splitlines()
    said = {line.split()[1] for line in lines if line.startswith("ok ")}
    assert {"python", "pins", "packages", "sandbox", "ports", "network", "clock"} <= said
    assert {"model", "disk", "wandb", "recipe"} <= said
    assert not show([failure("x", "y", "z")])
