"""The phases of a job: prepare, cold start, train, export. The command line calls these functions."""

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from arpo_megatron.config import JobConfig
from arpo_megatron.config.io import save_config
from arpo_megatron.errors import StoppedError, UserError
from arpo_megatron.hardware.environment import trainer_environment
from arpo_megatron.jobs import choose_run, resolve
from arpo_megatron.jobs.checkpoint_dirs import checkpoint_directories, step_of
from arpo_megatron.jobs.fingerprint import check_model
from arpo_megatron.jobs.inputs import check_inputs, prepare
from arpo_megatron.jobs.prompts import environment_notes
from arpo_megatron.jobs.run_directory import TRAINING, RunDirectory, start_model
from arpo_megatron.launch.backend import Backend, LocalBackend
from arpo_megatron.launch.preflight.machine import check_pins
from arpo_megatron.launch.services import Job, run_trainer, running_services
from arpo_megatron.launch.silent_directory import report_silence
from arpo_megatron.launch.supervisor import Supervisor
from arpo_megatron.launch.tool_check import check_tools, require_isolation
from arpo_megatron.launch.webhook import news_of, webhook_url
from arpo_megatron.monitor.events import EventLog
from arpo_megatron.monitor.progress import Progress
from arpo_megatron.trainer.skipped_updates import load_skipped_update
from arpo_megatron.utils.atomic import read_json
from arpo_megatron.utils.code_version import code_version
from arpo_megatron.utils.processes import ProcessDiedError


@contextmanager
def open_job(config: JobConfig, *, resume: bool) -> Iterator[Job]:
    """Check the inputs and yield the job of a locked run directory: a fresh one, or the newest of this config.

    Raises:
        UserError: an input is missing, or there is nothing to resume.
    """
    resumed = choose_run.existing(config) if resume else None
    check_inputs(config, resumed)
    webhook_url(config.monitor)
    run = resumed or choose_run.fresh(config)
    with hold_run(config, run, use=TRAINING) as job:
        save_config(config, run.config)  # not before the lock: a running job reads it
        code = code_version()
        EventLog(run.events).emit("note", text=f"code: {code}", code=code)
        try:
            with news_of(job):
                yield job
        except (UserError, ProcessDiedError) as error:
            EventLog(run.events).emit("failed", text=str(error).splitlines()[0])
            raise
        finally:
            job.progress.next_command("arpo", "view", run.path)


@contextmanager
def hold_run(config: JobConfig, run: RunDirectory, backend: Backend | None = None, *, use: str = "") -> Iterator[Job]:
    """Lock a run and yield its job, whose processes end with the block. Raises UserError if another job holds it.

    `use` is that of `RunDirectory.locked`.
    """
    with report_silence(run.path, run.config), run.locked(use):
        run.remove_partial()  # left by a kill -9
        run.health.unlink(missing_ok=True)
        run.scrape_targets.unlink(missing_ok=True)
        try:
            with Progress() as progress, Supervisor(run.logs) as supervisor:
                yield Job(config, run, supervisor, progress, backend or LocalBackend())
        finally:
            run.remove_partial()


def run_job(config: JobConfig, *, resume: bool, restarts: int = 0) -> RunDirectory:
    """Run a recipe to the export, from the beginning or from where its newest run stopped.

    Args:
        config: config of the job.
        resume: continue the newest run of this config.
        restarts: how often a job whose process died is resumed from its newest checkpoint.

    Raises:
        UserError: an input is missing, or there is nothing to resume.
        ProcessDiedError: a process of the job died, once more than `restarts`; the message names its log.
    """
    with open_job(config, resume=resume) as job:
        run_with_restarts(job, run_job_phases, restarts)
        job.progress.note(f"exported to {job.run.export}")
    return job.run


def run_with_restarts(job: Job, phases: Callable[[Job], None], restarts: int) -> None:
    """Run phases, again after a process has died, at most `restarts` times. Raises ProcessDiedError after that."""
    for restart in range(restarts + 1):
        try:
            return phases(job)
        except ProcessDiedError as error:
            if restart == restarts:
                raise
            job.supervisor.stop()
            job.run.remove_partial()
            text = f"{str(error).splitlines()[0]}; restart {restart + 1} of {restarts}"
            EventLog(job.run.events).emit("note", text=text)
            job.show_events()
    return None


def run_job_phases(job: Job) -> None:
    """Prepare, run the cold start if the recipe has one, and train. Phases that are done are not repeated."""
    for line in require_isolation(job.config):
        job.progress.note(line)
    _prepare(job)
    run_training_phases(job)


def run_training_phases(job: Job) -> None:
    """Run the cold start and the training. Raises StoppedError if the job is asked to end."""
    if job.config.sft.steps:
        run_sft_phase(job)
    if job.run.steps_done >= job.config.train.steps:
        job.progress.note("training is done already")
    else:
        _train(job)


def run_sft(config: JobConfig, *, resume: bool, restarts: int = 0) -> dict[str, Any]:
    """Run the cold start alone; return the figures that the command line prints. Arguments and errors of `run_job`."""
    with open_job(config, resume=resume) as job:
        _prepare(job)
        run_with_restarts(job, run_sft_phase, restarts)
        run = job.run
        job.progress.note(f"exported to {run.sft_model}")
        figures = read_json(run.sft_result, "delete it") if run.sft_result.exists() else {}
    return {**figures, "run_dir": str(run.path), "export_dir": str(run.sft_model)}


def find_export(run: RunDirectory, out: Path | None, step: int | None) -> tuple[int, Path]:
    """Return the step of the checkpoint that `export_checkpoint` would convert, and the directory it would write.

    Raises:
        UserError: `out` exists, there is no such checkpoint, or the run's model has changed.
    """
    whole = [number for path in checkpoint_directories(run.checkpoints) if (number := step_of(path)) is not None]
    stored = {number for path in checkpoint_directories(run.weights) if (number := step_of(path)) is not None}
    steps = whole if step is None else sorted({*whole, *stored})
    if not steps or (step is not None and step not in steps):
        have = ", ".join(map(str, steps)) or "none"
        raise UserError(
            f"{run.path} has no checkpoint{'' if step is None else f' of step {step}'}; steps it has: {have}"
        )
    found = steps[-1] if step is None else step
    out = out or run.exports / f"step_{found}"
    if out.exists():
        raise UserError(f"{out} exists already: choose another --out")
    check_model(resolve.read(run.config), run)
    return found, out


def export_checkpoint(run: RunDirectory, out: Path | None, step: int | None) -> Path:
    """Write checkpoint `step` (None: the newest) of a run as a Hugging Face directory.

    One process on the CPUs of this machine reads the weights layer by layer, so the run may be training meanwhile, and
    its checkpoints may be those of any number of ranks.

    Args:
        run: the run.
        out: directory to write; None: exports/step_N of the run.
        step: step of the checkpoint.

    Raises:
        UserError: see `find_export`.
        ProcessDiedError: the conversion failed; the message names its log.
    """
    _, out = find_export(run, out, step)
    wanted = "newest" if step is None else str(step)
    command = [sys.executable, "-m", "arpo_megatron.trainer.export_checkpoint", str(run.path), wanted, str(out)]
    with Supervisor(run.logs) as supervisor:
        variables = {**trainer_environment("cpu"), "CUDA_VISIBLE_DEVICES": ""}
        process = supervisor.start("export_checkpoint", command, env=variables)
        supervisor.wait(process)
        for line in process.log_lines():
            if line.startswith("arpo: "):  # a damaged checkpoint that is not used
                print(line, end="", file=sys.stderr)
    return out


def recompute_skipped_update(run: RunDirectory, dump: Path) -> str:
    """Compute a skipped update again with the newest checkpoint of its run; return lines that say what is finite.

    Raises:
        UserError: the dump cannot be read, or no checkpoint is whole.
        ProcessDiedError: a rank failed; the message names its log.
    """
    config = resolve.load(run.config)
    check_model(config, run)
    load_skipped_update(dump)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.txt"
        with hold_run(config, run) as job:
            run_trainer(job, "arpo_megatron.trainer.recompute_update", str(dump.resolve()), str(out))
        return out.read_text(encoding="utf-8")


def _prepare(job: Job) -> None:
    progress = job.progress
    progress.phase("prepare")
    if note := version_note():
        progress.note(note)
    for line in prepare_run(job.config, job.run, lambda text: progress.event({"kind": "progress", "text": text})):
        progress.note(line)


def version_note() -> str:
    """Return the packages whose versions differ from those that this project is tested with; "" if none does.

    On a cluster the preflight prints them.
    """
    found = check_pins(on_gpus=True)
    return "" if found.level == "ok" else f"{found.text}: {found.fix}"


def prepare_run(config: JobConfig, run: RunDirectory, log: Callable[[str], None]) -> list[str]:
    """Write the files that the job's processes read; return notes for the user. Raises UserError."""
    data = prepare(config, run, log)
    notes = [f"run directory {run.path}: {len(data.train)} training tasks, {len(data.held_out)} held out"]
    # Named tools, and those of services that run already, must be offered.
    unchecked = config.rollout.environment is None and config.rollout.tools is None and not config.sandbox.urls
    if unchecked and not run.searchable:
        notes.append("the search tool is off: there is nothing to search (data.search_cache=FILE.json)")
    notes += [*data.notes, *check_tools_of_run(config, run), *environment_notes(config)]
    if data.bad_rows:
        first = data.bad_rows[0]
        rows = f"{len(data.bad_rows)} bad row{'s' if len(data.bad_rows) > 1 else ''} skipped"
        listed = run.path / "bad_rows.jsonl"
        notes.append(f"{rows}, listed in {listed}; the first is row {first['row']}: {first['reason']}")
    return notes


def check_tools_of_run(config: JobConfig, run: RunDirectory) -> list[str]:
    """Return the notes of `check_tools`. Its message adds how to use the same `run_dir` again."""
    try:
        return check_tools(config, run)
    except UserError as error:
        if config.run_dir is None:
            raise
        raise UserError(
            f"{error}. After the fix add --resume, or set another run_dir if an override changes"
        ) from error


def run_sft_phase(job: Job) -> None:
    """Run the cold start unless it is done. Raises as `run_training_phases` does."""
    if job.run.sft_done:
        job.progress.note("the cold start is done already")
        return
    _check_stop(job.run)
    job.progress.phase("start the trainer")
    run_trainer(job, "arpo_megatron.sft")
    if not job.run.sft_done:
        _check_stop(job.run)


def _train(job: Job) -> None:
    run = job.run
    _check_stop(run)
    job.progress.phase("start engine and tools")
    with running_services(job, start_model(job.config, run, "train"), pushes=True) as ready:
        _check_stop(run)
        run_trainer(job, "arpo_megatron.train", env=ready.environment)
        if run.steps_done < job.config.train.steps:  # otherwise it was asked to end during the export, and is done
            _check_stop(run)


def _check_stop(run: RunDirectory) -> None:
    """Raise StoppedError if the job was asked to end; its ranks have saved their state."""
    if run.stop.exists():
        raise StoppedError
