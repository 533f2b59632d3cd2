"""How a job's services are started."""

from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from arpo_megatron.config import EngineConfig, JobConfig, ModelConfig, RolloutConfig
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch import services
from arpo_megatron.launch.supervisor import Supervisor
from tools_sandbox.client import SandboxClient, SandboxDenied
from tools_sandbox.config import TOKEN_VARIABLE


def engine_command(config: JobConfig, directory: Path, index: int = 0) -> list[str]:
    (directory / "config.json").write_text("{}")
    held = services.Job(config, RunDirectory(directory), Supervisor(directory))
    return list(services._engine(held, directory, config.engine, index, directory, "token").command)


def test_engine_seeds_fit_32_bits(tmp_path: Path) -> None:
    """SGLang seeds numpy, which refuses 2**32."""
    config = JobConfig("test", engine=EngineConfig(replicas=2), seed=2**32 - 1)

    def seed(job: JobConfig, index: int) -> str:
        command = engine_command(job, tmp_path, index)
        return command[command.index("--random-seed") + 1]

    assert [seed(config, index) for index in range(2)] == [str(2**32 - 1), "0"]
    assert [seed(replace(config, seed=5), index) for index in range(2)] == ["5", "6"]


def test_fp32_head_is_one_of_both_sides(tmp_path: Path) -> None:
    flag = "--enable-fp32-lm-head"
    assert flag not in engine_command(JobConfig("test"), tmp_path)
    assert flag in engine_command(JobConfig("test", model=ModelConfig(fp32_head=True)), tmp_path)


def test_engines_order_requests_by_age_if_the_rollouts_do(tmp_path: Path) -> None:
    flags = {"--enable-priority-scheduling", "--disable-priority-preemption", "--default-priority-value"}
    assert not flags & set(engine_command(JobConfig("test"), tmp_path))
    assert flags < set(engine_command(JobConfig("test", rollout=RolloutConfig(priority="age")), tmp_path))


def test_tool_service_of_a_job_needs_the_token_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    run = RunDirectory(tmp_path)
    run.sandbox_config.write_text("python: {preload: []}")
    with (
        Supervisor(run.logs) as supervisor,
        services.tool_service(services.Job(JobConfig("test"), run, supervisor)) as (url, token),
    ):
        with SandboxClient(url, token) as client:
            assert client.call("python", {"code": "6 * 7"}).text == "42"
        with SandboxClient(url) as stranger, pytest.raises(SandboxDenied, match="401"):
            stranger.call("python", {"code": "6 * 7"})
        commands = [each.cmdline() for each in psutil.Process().children(recursive=True)]
        written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert any("tools_sandbox" in command for command in commands)
    assert not any(token in word for command in commands for word in command)
    assert not any(token.encode() in content for content in written)
