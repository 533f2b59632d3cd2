"""Run directories: where a job writes, and the purpose of each file (docs/reference/run-directory.md)."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.utils.atomic import read_json
from tools_sandbox.utils.yaml import load_yaml

Phase = Literal["train", "sft"]
"""Training phases of a job: "sft" is the cold start, "train" is ARPO."""
RUNS = Path("runs")
"""Default parent of run directories."""
SYSTEM_PROMPT = "system_prompt.txt"
"""File of an exported model with the system prompt that the agent was trained with."""
PRIVATE = 0o700
"""Mode of new run directories: a user who can write to one can run code as its owner (docs/guides/security.md)."""
SUBMIT_LOCK = ".submit.lock"
TRAINING = "training"
"""Text in the lock of a run that trains."""


def run_path(name: str | Path) -> Path:
    """Return the directory that a user names: the path itself, or `runs/NAME` if only that one is a run."""
    path = Path(name)
    inside = RUNS / path
    return inside if not path.exists() and (inside / "config.yaml").is_file() else path


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths of the files and directories of one run (docs/reference/run-directory.md)."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved config (YAML)."""
        return self.path / "config.yaml"

    @property
    def weights(self) -> Path:
        """Weights without optimizer states (`train.weights_every`)."""
        return self.path / "weights"

    def stored(self, step: int | str) -> tuple[Path, Path]:
        """Return the places of a step's weights: its checkpoint, and the weights alone."""
        return self.checkpoints / f"step_{step}", self.weights / f"step_{step}"

    @property
    def rank_times(self) -> Path:
        """Seconds of every rank in each step (JSONL)."""
        return self.path / "ranks.jsonl"

    @property
    def metrics(self) -> Path:
        """Numbers of each step (JSONL)."""
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """Events for the terminal: phases, notes, errors (JSONL)."""
        return self.path / "events.jsonl"

    @property
    def logs(self) -> Path:
        """One log per process."""
        return self.path / "logs"

    @property
    def initial_model(self) -> Path:
        """Hugging Face directory of the generated model, if the config names no model."""
        return self.path / "initial_model"

    @property
    def inputs(self) -> Path:
        """Fingerprint of the inputs: the model's spec, digests of its weights, tokenizer and data (JSON)."""
        return self.path / "inputs.json"

    @property
    def corpus(self) -> Path:
        """Search corpus of generated tasks (JSONL)."""
        return self.path / "corpus.jsonl"

    @property
    def sandbox_config(self) -> Path:
        """Config of the tool service (YAML)."""
        return self.path / "sandbox.yaml"

    @property
    def tool_definitions(self) -> Path:
        """Descriptions and schemas of the tools, if the prompts of the job contain them."""
        return self.path / "tools.json"

    @property
    def sandbox_user_file(self) -> Path:
        """Copy of the user's file (`sandbox.file`) from which the config of the tool service was made."""
        return self.path / "sandbox_user.yaml"

    @property
    def sft_model(self) -> Path:
        """Hugging Face directory after supervised training."""
        return self.path / "sft"

    @property
    def sft_checkpoints(self) -> Path:
        """Checkpoints of the cold start."""
        return self.path / "sft_checkpoints"

    @property
    def sft_result(self) -> Path:
        """Results of the cold start (JSON); written at its end."""
        return self.path / "sft_result.json"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints of the ARPO loop: step_N, each complete or absent."""
        return self.path / "checkpoints"

    @property
    def exports(self) -> Path:
        """Hugging Face directories of single checkpoints (`arpo export`)."""
        return self.path / "exports"

    @property
    def scrape_targets(self) -> Path:
        """Addresses of services with metrics while they run: a list for Prometheus' file_sd (JSON)."""
        return self.path / "prometheus.json"

    @property
    def heartbeats(self) -> Path:
        """Progress of each trainer rank, and its stacks after a hang."""
        return self.path / "heartbeats"

    @property
    def profile(self) -> Path:
        """Traces of torch's profiler (`monitor.profile_steps`)."""
        return self.path / "profile"

    @property
    def skipped_updates(self) -> Path:
        """Batches whose update was skipped because a quantity was not finite (`arpo recompute-update`)."""
        return self.path / "skipped_updates"

    @property
    def trees(self) -> Path:
        """Finished trees with their rewards, one Parquet file per step."""
        return self.path / "trees"

    @property
    def step_journal(self) -> Path:
        """Samples of the unfinished step's trees (msgpack)."""
        return self.path / "step_journal.msgpack"

    @property
    def held_out(self) -> Path:
        """Rewards of the held-out tasks, one JSON file per evaluation."""
        return self.path / "held_out"

    @property
    def judge_replies(self) -> Path:
        """Cached replies of the judge (SQLite), if the job uses `reward.judge`."""
        return self.path / "judge.sqlite"

    @property
    def export(self) -> Path:
        """The trained model as a Hugging Face directory."""
        return self.path / "export"

    @property
    def result(self) -> Path:
        """Final counters and held-out success (JSON); written at the end of the job."""
        return self.path / "result.json"

    @property
    def health(self) -> Path:
        """Health of all processes (JSON); exists while the job's services run."""
        return self.path / "health.json"

    @property
    def memory_lent(self) -> Path:
        """Exists while the trainer uses the engines' memory, when no engine may start."""
        return self.path / "memory_lent"

    @property
    def cluster(self) -> Path:
        """Cluster profile of the newest submission (YAML)."""
        return self.path / "cluster.yaml"

    @property
    def submissions(self) -> Path:
        """Records of a submitted run: its Slurm jobs, the code of each, and their batch scripts."""
        return self.path / "submissions"

    @property
    def doctor(self) -> Path:
        """Preflight report of every node."""
        return self.path / "doctor"

    @property
    def stop(self) -> Path:
        """Exists while a job is asked to save and end, before a time limit or a preemption."""
        return self.path / "stop"

    @property
    def searchable(self) -> bool:
        """Whether the tool service has a corpus or a search engine."""
        search = load_yaml(self.sandbox_config.read_text(encoding="utf-8"))["search"]
        return bool(search["sources"]) or search.get("engine", "local") != "local"

    def read_result(self) -> dict[str, Any]:
        """Return the content of `result`. Raises UserError if it is damaged."""
        return read_json(self.result, "delete it, then --resume exports again")

    @property
    def steps_done(self) -> int:
        """Steps of a finished training, -1 if none has finished. A resumed run may need more."""
        return int(self.read_result()["step"]) if self.result.exists() else -1

    @property
    def sft_done(self) -> bool:
        """Whether the cold start has finished and exported its model."""
        return (self.sft_model / "config.json").exists()

    def remove_partial(self) -> None:
        """Delete what a killed job has left: files of interrupted writes, and its marks `memory_lent` and `stop`.

        A job writes NAME.tmp and renames it. NAME.replaced.tmp is what NAME was before; a job that was killed between
        both renames has left no NAME, which is exported again.
        """
        models = [self.initial_model, self.sft_model, self.export]
        found = [path.with_name(path.name + ending) for path in models for ending in (".tmp", ".replaced.tmp")]
        found += [self.memory_lent, self.stop]
        for folder in (self.path, self.trees, self.held_out, self.skipped_updates):
            found += folder.glob(".*.tmp")  # `atomic_write`
        for folder in (self.checkpoints, self.sft_checkpoints):
            found += folder.glob("*step_*.tmp")
        found += self.profile.glob("**/*.tmp.gz")
        for path in found:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    @contextmanager
    def locked(self, use: str = "") -> Iterator[None]:
        """Hold the directory for a job of this process. Raises UserError if another job holds it.

        Args:
            use: what the job does, for readers of the lock's file; `TRAINING` for training.
        """
        with (self.path / ".lock").open("a") as file:  # the holder's text stays if it is locked
            if not self._try_lock(file):
                raise UserError(f"{self.path} is in use by another job: end that job, or set another run_dir")
            file.truncate(0)
            file.write(use)
            file.flush()
            yield

    @contextmanager
    def submitting(self) -> Iterator[None]:
        """Hold the directory against other submissions. A job of the run may start in the meantime (see `locked`).

        Raises:
            UserError: another command is submitting this run.
        """
        lock = self.path / SUBMIT_LOCK
        with lock.open("w") as file:
            if not self._try_lock(file) or not os.fstat(file.fileno()).st_nlink:  # the last holder removed it
                raise UserError(f"{self.path} is being submitted by another command: try again after it ends")
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)

    def _try_lock(self, file: IO[str]) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise UserError(
                f"{self.path} is on a filesystem without file locks ({error.strerror}): mount it with them (Lustre: "
                "-o flock), or put runs on another one"
            ) from None
        return True


def start_model(config: JobConfig, run: RunDirectory, phase: Phase) -> Path:
    """Return the Hugging Face directory that a phase starts from; this is the only place that decides this."""
    if phase == "train" and config.sft.steps:
        return run.sft_model
    return config.model.path or run.initial_model
