"""Submission of a job: recipe and profile -> nemo-run's SlurmExecutor -> an allocation that runs `supervise`."""

import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import chdir, contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arpo_megatron.cluster import slurm
from arpo_megatron.cluster.code_snapshot import ROOT, Code, snapshot
from arpo_megatron.cluster.dry_run import forecast_lines
from arpo_megatron.cluster.executor import submission_executor, supervisor_python
from arpo_megatron.cluster.files_before import FilesBefore
from arpo_megatron.cluster.mounts import in_container, on_host, with_files_mounted
from arpo_megatron.cluster.profile import ClusterProfile, save_profile
from arpo_megatron.cluster.runs import address, wait_until_ended
from arpo_megatron.cluster.submission import Submission
from arpo_megatron.cluster.submissions import no_longer_auto, submissions_of
from arpo_megatron.config import JobConfig
from arpo_megatron.config.io import save_config
from arpo_megatron.errors import UserError
from arpo_megatron.hardware.specs import GIB
from arpo_megatron.jobs import choose_run, run_directory
from arpo_megatron.jobs.inputs import check_files
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.jobs.tool_file import with_tool_file
from arpo_megatron.plan import plan
from arpo_megatron.plan.node_layout import lay_out_nodes, with_placement
from arpo_megatron.utils.atomic import write_json
from arpo_megatron.utils.signals import Interrupted, interrupts_held_back, interrupts_ignored
from tools_sandbox.config import TOKEN_VARIABLE

if TYPE_CHECKING:
    from nemo_run import Experiment

JOB = "arpo_megatron.cluster"
ONLY_SFT = "--sft"
"""Argument of a job that ends after the cold start."""
UNSAFE = re.compile(r"[^A-Za-z0-9_@+=./-]")
"""A character that no path in the batch script may have: it is shell syntax, or special to sbatch (%), PYTHONPATH (:)
or mounts (,)."""


def prepare_submission(
    config: JobConfig,
    profile: ClusterProfile,
    *,
    nodes: int | None,
    chain: int = 1,
    resume: bool = False,
    only_sft: bool = False,
) -> Submission:
    """Complete the config for the cluster and forecast the job. Nothing is written.

    Args:
        config: config of the job.
        profile: profile of the cluster.
        nodes: number of nodes; None for the profile's (only for a new run), or as few as possible.
        chain: number of jobs to queue one after the other.
        resume: continue the run of this config instead of starting one.
        only_sft: end after the cold start; a later `arpo resume` continues.

    Raises:
        UserError: the job does not fit the nodes, there is no run to resume, or a path cannot be in a batch script.
    """
    config, profile = in_container(config, profile), with_files_mounted(config, profile)
    layout = lay_out_nodes(config, profile.gpus_per_node, nodes or (None if resume else profile.nodes))
    before, config = config, with_placement(config, layout)
    auto = no_longer_auto(before, config)
    base = profile.runs.expanduser().absolute()
    path = config.run_dir or choose_run.next_path(config, base)
    if resume:
        path = choose_run.existing(config, base).path
    path = path.expanduser().absolute()
    _check_path("the run directory", path)
    _check_path("python:", supervisor_python(profile))
    config = replace(config, run_dir=path)
    hardware = profile.hardware() if profile.gpus_of(config) else None
    run = RunDirectory(path)
    forecast = None if hardware is None else plan(with_tool_file(on_host(config, profile), run), hardware)
    arguments = (ONLY_SFT,) if only_sft else ()
    return Submission(config, profile, layout, run, chain, forecast, resume, auto, arguments)


def _check_path(name: str, path: Path) -> None:
    """Raise UserError for a path that cannot be in a batch script, into which nemo-run writes it without quotes."""
    if found := UNSAFE.search(str(path)):
        raise UserError(
            f"{name} {str(path)!r} has {found[0]!r} in it, which a batch script cannot hold: "
            "use letters, digits and _@+=./- only"
        )


def dry_run(submission: Submission) -> str:
    """Return the batch script, the node layout and whether the job would be refused. Nothing remains on disk."""
    with tempfile.TemporaryDirectory(prefix="arpo-dryrun-") as folder:
        home = Path(folder)
        with _experiment(submission, home, snapshot()) as experiment:
            experiment.dryrun(log=False, delete_exp_dir=False)
        (script,) = home.rglob("*_sbatch.sh")
        text = script.read_text(encoding="utf-8").replace(str(home), str(submission.run.submissions))
    lines = [f"# {line}" for line in [f"node layout: {submission.layout.nodes} node(s)", *submission.layout.describe()]]
    lines += [f"# {line}" for line in forecast_lines(submission)]
    if (forecast := submission.forecast) is not None:
        share = f"{forecast.peak_bytes / GIB:.1f} of {forecast.hardware.memory / GIB:.1f} GiB"
        lines.append(f"# arpo plan: {share} of a GPU, {forecast.seconds:.0f} s a step")
        lines += [f"# warning: {warning}" for warning in forecast.warnings]
        if submission.too_late:
            lines.append(f"# arpo submit would refuse it: {submission.too_late}")
        if not forecast.fits:
            lines.append(f"# arpo submit would refuse it: {forecast.reason}")
    try:
        submission.profile.require_secrets()
        check_files(on_host(submission.config, submission.profile), submission.run)
    except UserError as error:
        lines.append(f"# arpo submit would refuse it: {error}")
    return "\n".join([text, *lines])


def submit_jobs(submission: Submission, *, force: bool = False) -> list[str]:
    """Write the run directory, submit the jobs of the chain, and return their ids.

    If Slurm accepts no job, the run is restored. If it accepts only some, or the command is interrupted, the accepted
    jobs are cancelled.

    Raises:
        UserError: the job does not fit the GPUs (and `force` is not set), Slurm refuses it, a job of this run is in the
            queue or being submitted, a secret or an input is missing, or the run directory cannot be written.
        Interrupted: the command was interrupted; the message has what became of the accepted jobs.
    """
    check_files(on_host(submission.config, submission.profile), submission.run)
    forecast = submission.forecast
    if forecast is not None and not forecast.fits and not force:
        raise UserError(f"the job does not fit: {forecast.reason}; arpo plan shows layouts that do, --force submits it")
    if (late := submission.too_late) and not force:
        raise UserError(f"{late}; --force submits it")
    submission.profile.require_secrets()
    webhook = submission.config.monitor.webhook_variable
    if webhook is not None and webhook not in submission.profile.secrets:
        raise UserError(f"monitor.webhook_variable={webhook}: name it in the profile: `secrets: {{{webhook}: env}}`")
    if submission.config.sandbox.urls and TOKEN_VARIABLE not in submission.profile.secrets:
        raise UserError(f"sandbox.urls: name their token in the profile: `secrets: {{{TOKEN_VARIABLE}: env}}`")
    slurm.call("sbatch", "--version")
    code = snapshot()
    try:
        with _locked(submission.run):
            return _submit_chain(submission, code)
    except OSError as error:
        raise UserError(f"cannot write {submission.run.path}: {error.strerror or error}") from None


@contextmanager
def _locked(run: RunDirectory) -> Iterator[None]:
    """Exclude other commands that submit this run. A run directory that stays empty is removed."""
    run.path.mkdir(run_directory.PRIVATE, parents=True, exist_ok=True)
    try:
        with run.submitting():
            yield
    finally:
        with suppress(OSError):  # raised if it is not empty
            run.path.rmdir()


def _submit_chain(submission: Submission, code: Code) -> list[str]:
    run = submission.run
    if submission.resume:
        wait_until_ended(run)
    number = len(submissions_of(run)) + 1
    diff, record = run.submissions / f"{number}.diff", run.submissions / f"{number}.json"
    before = FilesBefore.read(run, diff, record)
    jobs: list[str] = []
    try:
        if not submission.resume:
            choose_run.fresh(submission.config)
        save_config(submission.config, run.config)
        run.submissions.mkdir(exist_ok=True)
        run.logs.mkdir(exist_ok=True)  # Slurm does not create it
        save_profile(submission.profile, run.cluster)
        diff.write_bytes(code.diff)
        _nemo_run(run.submissions)  # takes seconds; an interrupt takes effect here
        _submit_links(submission, code, record, jobs)
    except BaseException as error:
        with interrupts_ignored():
            if jobs:
                raise _cancel_accepted(submission, jobs, error) from None
            before.restore()
        raise
    return jobs


def _submit_links(submission: Submission, code: Code, record: Path, jobs: list[str]) -> None:
    """Submit each job, and add it to `jobs` and to the record. Raise UserError at the first that Slurm refuses."""
    for link in range(submission.chain):
        try:
            # An interrupt before Slurm's answer would leave a job that `arpo status` and `arpo cancel` do not know.
            with interrupts_held_back():
                jobs.append(submit_one(submission, code))
                write_json(record, submission.record(jobs, submission.job_name, code))
            if not submission.profile.requeue:
                # nemo-run calls `sbatch --requeue`, which has precedence over the script.
                slurm.call("scontrol", "update", f"JobId={jobs[-1]}", "Requeue=0")
        except UserError as error:
            if jobs:
                raise UserError(f"job {link + 1} of {submission.chain}: {error}") from None
            raise


def submit_one(submission: Submission, code: Code) -> str:
    """Submit one job and return its id. Raises UserError if Slurm refuses it."""
    with _experiment(submission, submission.run.submissions, code) as experiment:
        try:
            experiment.run(detach=True)
        except Exception as error:
            raise UserError(f"sbatch refused the job: {_refusal(error)}") from None
        return str(experiment.jobs[0].handle).rpartition("/")[2]


def _cancel_accepted(submission: Submission, jobs: list[str], error: BaseException) -> BaseException:
    """Cancel the accepted jobs, the last first so that none starts, and return the error with the outcome added.

    An OSError here means a full disk.
    """
    name = address(submission.run)
    try:
        for job in reversed(jobs):
            slurm.call("scancel", job)
        outcome = f"cancelled job {', '.join(jobs)}; arpo resume {name} submits it again"
    except UserError as other:
        outcome = f"{other}: cancel the accepted jobs ({', '.join(jobs)}) with arpo cancel {name}"
    if isinstance(error, Interrupted):
        return Interrupted(outcome)
    if isinstance(error, UserError | OSError):
        return UserError(f"{error}; {outcome}")
    error.add_note(outcome)
    return error


def _nemo_run(home: Path) -> Any:
    """Import nemo-run, which keeps its files in `home`."""
    if find_spec("nemo_run") is None:
        raise UserError("arpo submit needs nemo-run: pip install 'arpo-megatron[slurm]', or `make setup` in the clone")
    os.environ["NEMORUN_HOME"] = str(home)
    with warnings.catch_warnings():  # nemo-run imports packages for other executors that warn
        warnings.simplefilter("ignore")
        import nemo_run

    nemo_run.config.set_nemorun_home(str(home))
    return nemo_run


@contextmanager
def _experiment(submission: Submission, home: Path, code: Code) -> "Iterator[Experiment]":
    """Yield a nemo-run experiment with one job."""
    nemo_run = _nemo_run(home)
    name = submission.run.path.name
    script = nemo_run.Script(
        path=JOB,
        m=True,
        entrypoint=str(supervisor_python(submission.profile)),
        args=[str(submission.run.path), *submission.arguments],
    )
    # nemo-run calls git in the working directory, and its commands would read our standard input.
    with chdir(ROOT), _empty_stdin():
        experiment = nemo_run.Experiment(
            name, id=f"{name}_{time.time_ns()}", log_level="ERROR", clean_mode=True, skip_status_at_exit=True
        )
        with experiment:
            experiment.add(script, executor=submission_executor(submission, code), name="job", tail_logs=False)
            yield experiment


@contextmanager
def _empty_stdin() -> Iterator[None]:
    before = sys.stdin
    with Path(os.devnull).open(encoding="utf-8") as nothing:
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = before


def _refusal(error: Exception) -> str:
    result = getattr(error, "result", None)
    text = getattr(result, "stderr", "") or str(error)
    return " ".join(text.replace("sbatch: error:", "").split())
