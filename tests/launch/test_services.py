"""How a job's services are started."""

from dataclasses import replace
from pathlib import Path

from arpo_megatron.config import EngineConfig, JobConfig
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch import services
from arpo_megatron.launch.backend import LocalBackend


def test_engine_seeds_fit_32_bits(tmp_path: Path) -> None:
    """SGLang seeds numpy, which refuses 2**32."""
    (tmp_path / "config.json").write_text("{}")
    config = JobConfig("test", engine=EngineConfig(replicas=2), seed=2**32 - 1)

    def seed(job: JobConfig, index: int) -> str:
        run = RunDirectory(tmp_path)
        words = services._engine(job, run, tmp_path, index, LocalBackend(), tmp_path, "token").command
        return words[words.index("--random-seed") + 1]

    assert [seed(config, index) for index in range(2)] == [str(2**32 - 1), "0"]
    assert [seed(replace(config, seed=5), index) for index in range(2)] == ["5", "6"]
