"""What would fail a job is said before it starts, with how to mend it."""

from pathlib import Path

import pytest

from arpo_megatron import resolve
from arpo_megatron.config import JobConfig
from arpo_megatron.doctor.finding import failure, ok, run_checks, show
from arpo_megatron.doctor.local import examine
from arpo_megatron.doctor.machine import check_disk, check_gpus, check_model_files, check_wandb


def job(*words: str) -> JobConfig:
    return resolve.resolve("quickstart", words=words)


def test_a_check_that_cannot_be_made_is_a_failure_of_that_name() -> None:
    def broken() -> None:
        raise OSError("no such device")

    found = run_checks([("fine", lambda: ok("fine", "yes")), ("odd", broken)])  # type: ignore[list-item]
    assert [item.level for item in found] == ["ok", "failure"]
    assert "no such device" in str(found[1])
    assert show(found[:1]) and not show(found)


def test_a_disk_that_cannot_hold_the_checkpoints_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    with (model / "model.safetensors").open("wb") as file:
        file.truncate(10**13)  # of which nothing is on the disk
    found = check_disk(job(f"model.path={model}"), tmp_path / "runs")
    assert found.level == "failure"
    assert "are wanted for checkpoints" in found.text and "train.keep_checkpoints" in found.mend
    assert check_disk(job(), tmp_path / "runs").level == "ok"


def test_half_a_model_is_refused(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        found = check_model_files(job(f"model.path={tmp_path}"))
        assert found.level == "failure" and name in found.text
        (tmp_path / name).write_text("{}")
    assert "*.safetensors" in check_model_files(job(f"model.path={tmp_path}")).text
    (tmp_path / "model.safetensors").touch()
    assert check_model_files(job(f"model.path={tmp_path}")).level == "ok"


def test_metrics_that_go_online_want_a_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    online = job("monitor.wandb=online")
    assert check_wandb(online).level == "failure"
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password x\n")
    assert check_wandb(online).level == "ok"
    assert check_wandb(job()).level == "ok"


def test_a_node_without_its_gpus_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check_gpus(8).level == "failure"


def test_this_machine_can_run_the_quickstart(capsys: pytest.CaptureFixture[str]) -> None:
    assert examine(job("platform=cpu"), None)
    said = capsys.readouterr().out
    assert all(f" {name} " in said for name in ("python", "pins", "sandbox", "model", "disk", "wandb", "recipe"))
    assert not show([failure("x", "y", "z")])
