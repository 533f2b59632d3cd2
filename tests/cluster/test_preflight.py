"""Checks before a job: each failure has its reason and its fix."""

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from arpo_megatron.cli.doctor import examine
from arpo_megatron.cluster.profile import ClusterProfile, check_profile
from arpo_megatron.cluster.slurm_checks import check_gres, check_partition, check_preemption, cluster_checks
from arpo_megatron.config import JobConfig
from arpo_megatron.engine.version import SGLANG_VERSION
from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.launch.job import version_note
from arpo_megatron.launch.preflight.check import failure, ok, run_checks, show
from arpo_megatron.launch.preflight.exposure import check_exposure
from arpo_megatron.launch.preflight.machine import (
    PINS,
    check_clock,
    check_gpus,
    check_isolation,
    check_model_files,
    check_packages,
    check_runs,
    check_wandb,
    machine_checks,
)
from tools_sandbox.python_tool.walls import Level


def profile(**values: object) -> ClusterProfile:
    return check_profile({"account": "a", "runs": "/tmp", **values}, "here")


def job(*overrides: str) -> JobConfig:
    return resolve.resolve("quickstart", overrides=overrides)


def test_check_that_raises_is_a_failure() -> None:
    def broken() -> None:
        raise OSError("no such device")

    found = run_checks([("fine", lambda: ok("fine", "yes")), ("odd", broken)])  # type: ignore[list-item]  # returns nothing
    assert [item.level for item in found] == ["ok", "failure"]
    assert "no such device" in str(found[1])
    assert show(found[:1]) and not show(found)


def test_hanging_check_is_a_failure_and_later_checks_run() -> None:
    hung = threading.Event()
    checks = [("mount", lambda: ok("mount", str(hung.wait()))), ("fine", lambda: ok("fine", "yes"))]
    found = run_checks(checks, each_s=0.2)
    hung.set()
    assert [(item.name, item.level) for item in found] == [("mount", "failure"), ("fine", "ok")]
    assert "no answer for 1 s" in found[0].text


def test_job_notes_versions_that_differ_from_the_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    assert version_note() == ""
    monkeypatch.setitem(PINS, "sglang", "0.0.1")
    assert version_note().startswith(f"sglang {SGLANG_VERSION} instead of 0.0.1: ")


def test_incomplete_model_is_a_failure(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        found = check_model_files(job(f"model.path={tmp_path}"))
        assert found.level == "failure" and name in found.text
        (tmp_path / name).write_text("{}")
    (tmp_path / "model-00001-of-00003.safetensors").touch()  # files that the index does not list are not read
    assert "lacks model.safetensors" in check_model_files(job(f"model.path={tmp_path}")).text
    (tmp_path / "model.safetensors").touch()
    assert check_model_files(job(f"model.path={tmp_path}")).level == "ok"
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {str(n): f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)}}))
    found = check_model_files(job(f"model.path={tmp_path}"))
    assert found.level == "failure" and "lacks model-00002-of-00003.safetensors and 1 more" in found.text
    for n in (2, 3):
        (tmp_path / f"model-0000{n}-of-00003.safetensors").touch()
    assert check_model_files(job(f"model.path={tmp_path}")).level == "ok"
    index.write_text("{}")
    with pytest.raises(UserError, match="is damaged"):
        check_model_files(job(f"model.path={tmp_path}"))
    named = check_model_files(resolve.resolve("deepsearch_14b"))
    assert named.level == "failure" and "hf download Qwen/Qwen3-14B" in named.fix
    assert check_model_files(job()).level == "ok"


def test_online_metrics_need_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
    """Slurm's answers on a cluster whose default partition is the second, with QOS."""

    def __init__(
        self, preempt_type: str, grace: str, default: str = "gpu*", more: str = "", gres: str = "gpu:h100:8"
    ) -> None:
        self.type, self.grace, self.default, self.gres = preempt_type, grace, default, gres
        self.more = more or "PreemptParameters       = send_user_signal\n"

    def call(self, *arguments: str, check: bool = True) -> str:
        if arguments[0] == "sinfo":
            rows = {
                "cpu": ("cpu", "up", "1:00", "9", "(null)"),
                "gpu": (self.default, "up", "infinite", "4", self.gres),
            }
            wanted = [word.partition("=")[2] for word in arguments if word.startswith("--partition=")] or list(rows)
            fields = arguments[arguments.index("-o") + 1].split("|")
            places = ["%P", "%a", "%l", "%D", "%G"]
            return "".join("|".join(rows[name][places.index(field)] for field in fields) + "\n" for name in wanted)
        if arguments[:3] == ("scontrol", "show", "config"):
            return f"PreemptMode             = REQUEUE\nPreemptType             = preempt/{self.type}\n{self.more}"
        if arguments[0] == "sacctmgr":
            return f"{self.grace}\n"
        assert arguments == ("scontrol", "show", "partition", "gpu")
        return f"PartitionName=gpu\n   DefaultTime=NONE GraceTime={self.grace}\n   PreemptMode=REQUEUE State=UP\n"


def test_partition_check_uses_the_default_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    """sinfo's first line is a partition with a limit of a minute and no GPU."""
    monkeypatch.setattr("arpo_megatron.cluster.slurm.call", Cluster("partition_prio", "600").call)
    assert "gpu: 4 nodes, up, time limit infinite" in check_partition(profile()).text
    assert check_gres(profile()).level == "ok"
    assert "less than time=" in check_partition(profile(partition="cpu")).text
    assert "less than time=0" in check_partition(profile(partition="cpu", time=0)).text, "0 is no limit"
    monkeypatch.setattr("arpo_megatron.cluster.slurm.call", Cluster("partition_prio", "600", default="gpu").call)
    assert "no default" in check_partition(profile()).text


@pytest.mark.parametrize(
    ("gres", "count", "kind", "level"),
    [
        ("gpu:8", 8, None, "ok"),
        ("gpu:8(S:0-1)", 8, None, "ok"),
        ("gpu:3090:4", 4, None, "ok"),
        ("gpu:3090:4", 5, None, "failure"),
        ("gpu:3090:4(S:0,2)", 4, "3090", "ok"),
        ("gpu:h100:8(IDX:0-7)", 8, "h100", "ok"),
        ("gpu:a100:8", 8, "h100", "failure"),
        ("gpu:8", 8, "h100", "failure"),
        ("lustre:no_consume:40,gpu:a100_3g.20gb:2(S:0),gpu:a100:6(S:0-1)", 8, None, "ok"),
        ("gpu:a100_3g.20gb:2(S:0),gpu:a100:6(S:0-1)", 8, "a100", "failure"),
        ("lustre:40", 1, None, "failure"),
        ("(null)", 1, None, "failure"),
    ],
)
def test_gres_check_counts_gpus_by_type(
    monkeypatch: pytest.MonkeyPatch, gres: str, count: int, kind: str | None, level: str
) -> None:
    monkeypatch.setattr("arpo_megatron.cluster.slurm.call", Cluster("partition_prio", "600", gres=gres).call)
    found = check_gres(profile(gpus_per_node=count, gpu_type=kind))
    assert found.level == level, found
    assert level == "ok" or f"the profile requests {count} GPUs{f' of type {kind}' if kind else ''}" in found.text


@pytest.mark.parametrize(
    ("kind", "grace", "qos", "level", "text"),
    [
        ("partition_prio", "600", None, "ok", "600 s before the end"),
        ("partition_prio", "60", None, "warning", "60 s before the end, less than signal_s=300"),
        ("partition_prio", "0", None, "warning", "GraceTime=0 leaves no time"),
        ("qos", "00:10:00", "high", "ok", "600 s before the end"),
        ("qos", "00:00:00", "high", "warning", "GraceTime=0 leaves no time"),
        ("qos", "00:10:00", None, "warning", "which the profile does not set"),
    ],
)
def test_preemption_check_compares_grace_time_with_signal_time(
    monkeypatch: pytest.MonkeyPatch, kind: str, grace: str, qos: str | None, level: str, text: str
) -> None:
    monkeypatch.setattr("arpo_megatron.cluster.slurm.call", Cluster(kind, grace).call)
    found = check_preemption(profile(qos=qos))
    assert (found.level, text in found.text) == (level, True), found


@pytest.mark.parametrize(("kind", "level"), [("cgroup", "ok"), ("pgid", "ok"), ("linuxproc", "warning")])
def test_preemption_check_knows_whether_term_reaches_the_trainer(
    monkeypatch: pytest.MonkeyPatch, kind: str, level: str
) -> None:
    answers = Cluster("partition_prio", "600", more=f"ProctrackType           = proctrack/{kind}\n")
    monkeypatch.setattr("arpo_megatron.cluster.slurm.call", answers.call)
    found = check_preemption(profile())
    assert found.level == level and "TERM" in found.text, found


def test_clock_check_compares_with_the_filesystem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert check_clock(tmp_path / "runs").level == "ok"
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now + 44)
    found = check_clock(tmp_path / "runs")
    assert found.level == "failure" and "s from the clock of the filesystem" in found.text


def test_directory_that_cannot_be_written_is_one_failure_with_its_name(tmp_path: Path) -> None:
    """The parent is a file, so that the test holds for root, too."""
    (file := tmp_path / "file").touch()
    found = check_runs(file / "runs")
    assert (found.name, found.level) == ("runs", "failure") and f"{file} is not writable (Not a dir" in found.text
    clock = check_clock(file / "runs")
    assert clock.level == "warning" and f"not checked, since {file} is not writable" in clock.text
    assert check_runs(tmp_path / "new" / "runs") == ok("runs", str(tmp_path / "new" / "runs"))


def test_controller_that_is_down_is_one_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(*words: str, check: bool = True, ignore: str | None = None) -> str:
        if words == ("scontrol", "ping"):
            return "Slurmctld(primary) at n1 is DOWN\n*****\n** RESTORE SLURMCTLD DAEMON TO SERVICE **\n"
        raise UserError("unable to contact slurm controller")

    monkeypatch.setattr("arpo_megatron.cluster.slurm.call", call)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    found = run_checks(cluster_checks(profile(qos="high")))
    (failed,) = [item for item in found if item.level == "failure"]
    assert failed.name == "slurm" and failed.text == "no controller answers: Slurmctld(primary) at n1 is DOWN"
    unchecked = [item.name for item in found if item.text == "not checked, since Slurm does not answer"]
    assert unchecked == ["partition", "account", "qos", "limits", "gres", "preemption"]


def test_missing_package_of_a_recipe_is_a_failure() -> None:
    assert check_packages(job("engine.router=sglang"), False).level == "ok"
    found = check_packages(job(), True)
    assert (
        found.level == "failure"
        and "quickstart needs transformer-engine[pytorch] 2.11.0 (pip install --no-build" in found.text
    )
    assert "transformer-engine" in check_packages(None, True).text and check_packages(None, False).level == "ok"
    assert "flash-attn-4" not in found.text
    flash = job("model.attention_backend=flash", "model.dtype=bfloat16")
    assert "flash-attn-4" in check_packages(flash, True).text
    assert "no_such_module" in check_packages(job("sandbox.preload=[no_such_module]"), False).text


def test_sft_skips_checks_of_the_tool_service() -> None:
    overrides = ["sandbox.preload=[no_such_module]"]
    checks = {
        name: dict(machine_checks(gpus=0, on_gpus=False, config=resolve.resolve(name, overrides=overrides)))
        for name in ("sft_7b", "reasoning_7b")
    }
    assert "sandbox" in checks["reasoning_7b"] and "sandbox" not in checks["sft_7b"]
    assert "no_such_module" in checks["reasoning_7b"]["packages"]().text
    assert "no_such_module" not in checks["sft_7b"]["packages"]().text


def test_isolation_check_runs_isolated_code(monkeypatch: pytest.MonkeyPatch) -> None:
    reached = check_isolation(job("sandbox.isolation=limits"))
    assert reached.level == "ok" and "sandbox.isolation=limits" in reached.text
    monkeypatch.setattr("tools_sandbox.python_tool.walls.Walls.level", lambda walls: Level.LIMITS)  # an old kernel
    found = check_isolation(job())
    assert found.level == "failure" and "sandbox.isolation=process, but this machine reaches limits" in found.text
    weak = check_isolation(job("sandbox.isolation=limits"))
    assert weak.level == "warning" and "everything that the service's user can" in weak.text


def test_gpu_check_fails_on_missing_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """nvidia-smi and torch may disagree if torch was built for another driver."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("arpo_megatron.launch.preflight.machine.gpu_count", lambda platform: 2)
    (program := tmp_path / "nvidia-smi").write_text(
        "#!/bin/sh\necho NVIDIA-SMI has failed because it could not\necho communicate with the driver.\nexit 9\n"
    )
    program.chmod(0o755)
    found = check_gpus(2)
    assert found.level == "failure" and "exit code 9: NVIDIA-SMI has failed because" in found.text
    program.write_text("#!/bin/sh\nfor n in 1 2; do echo NVIDIA H100 80GB HBM3, 580.65.06, 81559 MiB; done\n")
    assert check_gpus(2) == ok("gpu", "2 x NVIDIA H100 80GB HBM3, 580.65.06, 81559 MiB")
    assert "2 GPUs, gpus_per_node is 8" in check_gpus(8).text
    monkeypatch.setattr("arpo_megatron.launch.preflight.machine.gpu_count", lambda platform: 1)
    assert "lists 2 GPUs, torch can use 1 of the 2" in check_gpus(2).text
    monkeypatch.setenv("PATH", "/not/there")
    assert check_gpus(2).level == "failure"


def test_exposure_check_compares_addresses_with_trusted_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    interfaces = {
        "bond0": [
            SimpleNamespace(address="10.1.2.3", netmask="255.255.0.0"),
            SimpleNamespace(address="fd00::7%bond0", netmask="ffff:ffff:ffff:ffff::"),
        ]
    }
    monkeypatch.setattr("arpo_megatron.launch.preflight.exposure.psutil.net_if_addrs", lambda: interfaces)
    here, node = {"127.0.0.1", "::1"}, {"127.0.0.1", "10.1.2.3"}
    assert check_exposure(here).level == "ok"
    assert check_exposure(()).level == "warning", "nothing was seen"
    found = check_exposure(node)
    assert found.level == "warning" and "set trusted_networks" in found.fix
    assert "listen at 10.1.2.3 (bond0, open to 10.1.0.0/16)" in found.text
    assert check_exposure(node, ("192.168.0.0/16", "10.0.0.0/8")).level == "ok"
    assert "fd00::7 (bond0, open to fd00::/64)" in check_exposure({"fd00::7"}).text
    found = check_exposure(node | {"::"}, ("10.0.0.0/8",))
    assert found.level == "failure" and ":: (every network of this machine)" in found.text
    assert ": :: is in none of trusted_networks" in found.text


def lines_of(output: str) -> dict[str, str]:
    """Return the check's results by name."""
    return {line.split()[1]: line for line in output.splitlines() if line.startswith(("ok ", "warning ", "failure "))}


def test_gpu_packages_are_checked_on_a_machine_without_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A downloaded model is trained on GPUs unless overrides set platform=cpu."""
    monkeypatch.setattr("arpo_megatron.cli.doctor.gpu_count", lambda platform: 0)
    monkeypatch.setattr("arpo_megatron.cli.doctor.check_local_all_reduce", lambda *_: failure("network", "", ""))
    examine(resolve.resolve("deepsearch_14b"), None)
    output = lines_of(capsys.readouterr().out)
    assert "deepsearch_14b needs transformer-engine[pytorch] 2.11.0 (pip install" in output["packages"]
    assert output["gpu"].startswith("warning") and "torch finds no GPU here" in output["gpu"]
    assert "not checked, since the network check failed" in output["exposure"]
    examine(resolve.resolve("deepsearch_14b", overrides=["platform=cpu"]), None)
    output = lines_of(capsys.readouterr().out)
    assert output["packages"].startswith("ok") and "gpu" not in output


def test_doctor_reports_what_submit_refuses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("arpo_megatron.cluster.slurm.call", Cluster("partition_prio", "600").call)
    monkeypatch.setattr("arpo_megatron.cli.doctor.check_files", lambda config: None)  # of a model that is not here
    cluster = profile(gpu="h100-80", runs=str(tmp_path))
    examine(resolve.resolve("deepsearch_14b"), cluster)
    assert lines_of(capsys.readouterr().out)["recipe"].startswith("ok")
    overrides = ["parallel.tensor=1", "parallel.sequence=false", "parallel.data=16"]
    assert not examine(resolve.resolve("deepsearch_14b", overrides=overrides), cluster)
    output = lines_of(capsys.readouterr().out)["recipe"]
    assert output.startswith("failure") and "deepsearch_14b does not fit: " in output and "of a GPU's" in output
    examine(resolve.resolve("deepsearch_14b"), profile(runs=str(tmp_path / "two words")))
    assert "has ' ' in it" in lines_of(capsys.readouterr().out)["recipe"]


def test_doctor_passes_for_the_quickstart_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert examine(job("platform=cpu"), None)
    lines = capsys.readouterr().out.splitlines()
    output = {line.split()[1] for line in lines if line.startswith("ok ")}
    assert {"python", "pins", "packages", "sandbox", "ports", "network", "exposure", "runs", "clock"} <= output
    assert {"model", "disk", "wandb", "tools", "recipe"} <= output
    assert not show([failure("x", "y", "z")])
