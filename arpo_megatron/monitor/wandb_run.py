"""A run in Weights & Biases: curves, config and export as artifacts, sampled trajectories, evaluations."""

import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from arpo_megatron.config import JobConfig
from arpo_megatron.config.io import dump_config
from arpo_megatron.errors import UserError
from arpo_megatron.monitor.samples import SampledLeaf
from arpo_megatron.utils.code_version import code_version


class WandbRun:
    """The run of a run directory. Its id is in RUN_DIR/wandb_run_id, so a resumed run continues the same curves.

    Args:
        run_dir: the run directory, which exists.
        config: its config, with `monitor.wandb` not "disabled".
        prefix: set before all names of metrics.

    Raises:
        UserError: wandb cannot be started (no login in online mode, for example).
    """

    def __init__(self, run_dir: Path, config: JobConfig, prefix: str = "") -> None:
        import wandb

        monitor, id_file = config.monitor, run_dir / "wandb_run_id"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:8] + "\n")
        try:
            self._run = wandb.init(
                project=monitor.wandb_project,
                entity=monitor.wandb_entity,
                group=monitor.wandb_group,
                tags=monitor.wandb_tags,
                notes=monitor.wandb_notes,
                job_type="sft" if config.sft_only else "rl",
                name=run_dir.name,
                id=id_file.read_text().strip(),
                resume="allow",
                mode=monitor.wandb,
                dir=run_dir,
                config=dump_config(config),
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.errors.Error as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"monitor.wandb={monitor.wandb}: {reason}; or use monitor.wandb=offline") from None
        self._prefix = prefix
        origin = {"code": code_version(), "slurm_job_id": os.environ.get("SLURM_JOB_ID")}
        self._run.config.update(origin, allow_val_change=True)
        # A resumed run repeats steps. wandb drops repeated values of its own step counter, but not of a metric.
        self._run.define_metric(f"{prefix}*", step_metric=f"{prefix}step")
        stored = run_dir / "config.yaml"
        if stored.is_file():
            self._run.log_artifact(str(stored), name=f"config-{self._run.id}", type="config")

    @property
    def place(self) -> str:
        """Where the run is shown: its address, or the command that sends an offline run."""
        return f"wandb sync {Path(self._run.dir).parent}" if self._run.offline else str(self._run.url)

    def log(self, row: Mapping[str, Any]) -> None:
        """Log the metrics of a step."""
        self._run.log({self._prefix + key: value for key, value in row.items()})

    def log_samples(self, step: int, leaves: Sequence[SampledLeaf]) -> None:
        """Log trajectories as the table `samples`. A table that the disk refuses is lost: it must not end a run."""
        import wandb

        columns = [each.name for each in fields(SampledLeaf)]
        table = wandb.Table(columns=columns, data=[list(asdict(leaf).values()) for leaf in leaves])
        with suppress(OSError):
            self._run.log({f"{self._prefix}samples": table, f"{self._prefix}step": step})

    def log_export(self, path: Path) -> None:
        """Log the exported model as an artifact that refers to its directory; its files are not uploaded."""
        import wandb

        artifact = wandb.Artifact(f"export-{self._run.id}", type="model", metadata={"path": str(path.absolute())})
        artifact.add_reference(path.absolute().as_uri(), checksum=False)
        self._run.log_artifact(artifact)

    def log_evaluation(self, benchmark: str, figures: Mapping[str, Any]) -> None:
        """Add the figures of a benchmark to the run's summary, as eval/BENCHMARK/NAME."""
        self._run.summary.update({f"eval/{benchmark}/{name}": value for name, value in figures.items()})

    def close(self) -> None:
        self._run.finish()


def add_evaluation(run_dir: Path, config: JobConfig, figures: Mapping[str, Mapping[str, Any]]) -> str:
    """Add the figures of an evaluation to the summary of a run, and return a line for the user.

    Args:
        run_dir: the run directory.
        config: the run's config.
        figures: values by benchmark and name; numbers are added.
    """
    try:
        run = WandbRun(run_dir, config)
    except UserError as error:
        return f"the figures are not in Weights & Biases: {error}"
    for benchmark, own in figures.items():
        run.log_evaluation(benchmark, {name: value for name, value in own.items() if isinstance(value, int | float)})
    run.close()
    return f"wandb: {run.place}"
