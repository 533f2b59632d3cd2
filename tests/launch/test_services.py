"""How a job's services are started."""

from dataclasses import replace
from pathlib import Path

from arpo_megatron.config import EngineConfig, JobConfig
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch import services as launch
from arpo_megatron.launch.backend import LocalBackend


def test_each_engine_has_a_seed_that_sglang_takes(tmp_path: Path) -> None:
    """It gives numpy the seed, which refuses 2**32."""
    (tmp_path / "config.json").write_text("{}")
    config = JobConfig("test", engine=EngineConfig(replicas=2), seed=2**32 - 1)

    def seed(job: JobConfig, index: int) -> str:
        run = RunDirectory(tmp_path)
        words = launch._engine(job, run, tmp_path, index, LocalBackend(), tmp_path, "token").command
        return words[words.index("--random-seed") + 1]

    assert [seed(config, index) for index in range(2)] == [str(2**32 - 1), "0"]
    assert [seed(replace(config, seed=5), index) for index in range(2)] == ["5", "6"]
