"""Recipe and profile -> nemo-run's SlurmExecutor -> one allocation that runs `cluster/supervise.py`."""

import os
import re
import shlex
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arpo_megatron.cluster import slurm
from arpo_megatron.cluster.backend import gpu_options
from arpo_megatron.cluster.code_snapshot import ROOT, Code, snapshot
from arpo_megatron.cluster.profile import ClusterProfile, save_profile
from arpo_megatron.cluster.runs import address, until_ended
from arpo_megatron.cluster.submissions import no_longer_auto, submissions_of
from arpo_megatron.config import JobConfig
from arpo_megatron.config.io import save_config
from arpo_megatron.errors import UserError
from arpo_megatron.hardware.specs import GIB
from arpo_megatron.jobs import run_directory
from arpo_megatron.jobs.inputs import check_files
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.plan import Plan
from arpo_megatron.plan import plan as forecast_of
from arpo_megatron.plan.node_layout import NodeLayout, lay_out_nodes, with_placement
from arpo_megatron.utils.atomic import write_json
from arpo_megatron.utils.signals import Interrupted, interrupts_held_back, interrupts_ignored

if TYPE_CHECKING:
    from nemo_run import Experiment, SlurmExecutor

JOB = "arpo_megatron.cluster"
UNSAFE = re.compile(r"[^A-Za-z0-9_@+=./-]")
"""In a path of the batch script: what a shell reads otherwise, % (sbatch's file name patterns), : (PYTHONPATH, mounts)
and , (mounts)."""
WAIT_FOR_SRUN = "trap : TERM USR1"
"""In the batch script: a signal does not end the shell before the supervisor, which hears it too, has tidied up."""
_OWN_VARIABLES = {"PYTHONPATH": "/nemo_run/code", "PYTHONDONTWRITEBYTECODE": "1"}


@dataclass(frozen=True, slots=True)
class Submission:
    """A job as it is to be submitted.

    Attributes:
        config: of the job; placement and run directory are with_placement.
        profile: of the cluster.
        layout: which role runs where.
        run: its directory.
        chain: jobs, one after the other, each of which goes on where the one before it stopped.
        forecast: what it will need; None: see `ClusterProfile.hardware`.
        resume: the run is there already.
        auto: keys of the config that were `auto`, and that the number of nodes has settled.
    """

    config: JobConfig
    profile: ClusterProfile
    layout: NodeLayout
    run: RunDirectory
    chain: int = 1
    forecast: Plan | None = None
    resume: bool = False
    auto: tuple[str, ...] = ()

    @property
    def job_name(self) -> str:
        """For Slurm; jobs of one run share it, so that `--dependency=singleton` lets one run at a time."""
        return f"arpo-{self.run.path.name}"


def prepare_submission(
    config: JobConfig, profile: ClusterProfile, *, nodes: int | None, chain: int = 1, resume: bool = False
) -> Submission:
    """Settle what the cluster decides. Nothing is written.

    Args:
        config: of the job.
        profile: of the cluster.
        nodes: how many; None: what the profile says (of a run that is resumed it does not), or as few as can be.
        chain: see `Submission`.
        resume: go on with the run of this config instead of beginning one.

    Raises:
        UserError: the roles do not fit the nodes, there is nothing to resume, or a path cannot stand in a batch script.
    """
    layout = lay_out_nodes(config, profile.gpus_per_node, nodes or (None if resume else profile.nodes))
    said, config = config, _with_transport(with_placement(config, layout), layout)
    auto = no_longer_auto(said, config)
    base = profile.runs.expanduser().absolute()
    path = config.run_dir or run_directory.next_path(config, base)
    if resume:
        path = run_directory.existing(config, base).path
    path = path.expanduser().absolute()
    _check_path("the run directory", path)
    _check_path("python:", _python(profile))
    config = replace(config, run_dir=path)
    hardware = profile.hardware(config)
    forecast = None if hardware is None else forecast_of(config, hardware)
    return Submission(config, profile, layout, RunDirectory(path), chain, forecast, resume, auto)


def _check_path(name: str, path: Path) -> None:
    """Raises UserError where the path cannot stand in a batch script as it is: nemo-run writes it without quotes."""
    if found := UNSAFE.search(str(path)):
        raise UserError(
            f"{name} {str(path)!r} has {found[0]!r} in it, which batch scripts do not carry through: "
            "only letters, digits and _@+=./- are safe"
        )


def _python(profile: ClusterProfile) -> Path:
    """That of the role supervisor."""
    return (profile.python or Path(sys.executable)).expanduser()


def _with_transport(config: JobConfig, layout: NodeLayout) -> JobConfig:
    """`sync.transport=auto` as the plan wants it: on a node, a role could only guess from that node's own GPUs."""
    sync = config.sync
    if layout.shared and layout.nodes > 1:
        if sync.transport == "ipc":
            raise UserError("sync.transport=ipc: engines on other nodes than the trainer's first rank share no memory")
        if sync.transport == "auto":
            sync = replace(sync, transport="broadcast")
    return replace(config, sync=sync)


def dry_run(submission: Submission) -> str:
    """The batch script and the node layout, and which input is still missing, if one is; nothing is left behind."""
    with tempfile.TemporaryDirectory(prefix="arpo-dryrun-") as folder:
        home = Path(folder)
        with _experiment(submission, home, snapshot()) as experiment:
            experiment.dryrun(log=False, delete_exp_dir=False)
        (script,) = home.rglob("*_sbatch.sh")
        text = script.read_text(encoding="utf-8").replace(str(home), str(submission.run.submissions))
    lines = [f"# {line}" for line in [f"node layout: {submission.layout.nodes} node(s)", *submission.layout.describe()]]
    if (forecast := submission.forecast) is not None:
        share = f"{forecast.peak_bytes / GIB:.1f} of {forecast.hardware.memory / GIB:.1f} GiB"
        lines.append(f"# arpo plan: {share} of a GPU, {forecast.seconds:.0f} s a step")
        lines += [f"# warning: {warning}" for warning in forecast.warnings]
        if not forecast.fits:
            lines.append(f"# not submitted as it is: {forecast.reason}")
    try:
        check_files(submission.config)
    except UserError as error:
        lines.append(f"# not submitted as it is: {error}")
    return "\n".join([text, *lines])


def submit(submission: Submission, *, force: bool = False) -> list[str]:
    """Write the run directory and submit; returns the ids of the jobs of the chain.

    Where Slurm takes no job, the run is what it was before. Where it does not take all, or the command is interrupted,
    those that it has taken are cancelled.

    Raises:
        UserError: the job does not fit the GPUs (and `force` is not set), Slurm refuses, a job of this run is in the
            queue already or just being submitted, a secret or an input is missing, or the run directory cannot be
            written.
        Interrupted: with what became of the jobs that Slurm had taken.
    """
    check_files(submission.config)
    forecast = submission.forecast
    if forecast is not None and not forecast.fits and not force:
        raise UserError(f"the job does not fit: {forecast.reason}; arpo plan shows layouts that do, --force submits it")
    if unset := submission.profile.unset_secrets():
        raise UserError(f"the secret {unset[0]} is not in this environment: export {unset[0]}=..., or name a file")
    slurm.call("sbatch", "--version")
    code = snapshot()
    try:
        with _alone(submission.run):
            return _submitted(submission, code)
    except OSError as error:
        raise UserError(f"cannot write {submission.run.path}: {error.strerror or error}") from None


@contextmanager
def _alone(run: RunDirectory) -> Iterator[None]:
    """Of two commands with one run, the first has it. A directory that is empty afterwards was never a run's."""
    run.path.mkdir(parents=True, exist_ok=True)
    try:
        with run.submitting():
            yield
    finally:
        with suppress(OSError):  # it is not empty
            run.path.rmdir()


def _submitted(submission: Submission, code: Code) -> list[str]:
    run = submission.run
    if submission.resume:
        until_ended(run)
    number = len(submissions_of(run)) + 1
    diff, record = run.submissions / f"{number}.diff", run.submissions / f"{number}.json"
    before = _Before.of(run, diff, record)
    jobs: list[str] = []
    try:
        if not submission.resume:
            run_directory.fresh(submission.config)
        save_config(submission.config, run.config)
        run.submissions.mkdir(exist_ok=True)
        run.logs.mkdir(exist_ok=True)  # Slurm does not make it
        save_profile(submission.profile, run.cluster)
        diff.write_bytes(code.diff)
        _nemo_run(run.submissions)  # takes seconds, in which an interrupt is heard
        _send(submission, code, record, jobs)
    except BaseException as error:
        with interrupts_ignored():
            if jobs:
                raise _taken_back(submission, jobs, error) from None
            before.restore()
        raise
    return jobs


def _send(submission: Submission, code: Code, record: Path, jobs: list[str]) -> None:
    """Submit each link and note it in `jobs` and in the file. Raises UserError at the first that Slurm refuses."""
    for link in range(submission.chain):
        try:
            # Whatever happens next, `arpo status` and `arpo cancel` know of it: an interrupt before Slurm's answer is
            # heard would leave a job that nobody knows.
            with interrupts_held_back():
                jobs.append(_sent(submission, code))
                write_json(record, _record(submission, code, jobs))
            if not submission.profile.requeue:
                # nemo-run submits with `sbatch --requeue`, which overrules what the script says.
                slurm.call("scontrol", "update", f"JobId={jobs[-1]}", "Requeue=0")
        except UserError as error:
            if jobs:
                raise UserError(f"job {link + 1} of {submission.chain}: {error}") from None
            raise


def _sent(submission: Submission, code: Code) -> str:
    """The id of a job that Slurm has taken. Raises UserError where it does not."""
    with _experiment(submission, submission.run.submissions, code) as experiment:
        try:
            experiment.run(detach=True)
        except Exception as error:
            raise UserError(f"sbatch refused the job: {_refusal(error)}") from None
        return str(experiment.jobs[0].handle).rpartition("/")[2]


def _record(submission: Submission, code: Code, jobs: list[str]) -> dict[str, Any]:
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "jobs": jobs,
        "job_name": submission.job_name,
        "commit": code.commit,
        "tree": code.tree,
        "changed": bool(code.diff),
        "layout": asdict(submission.layout),
        "auto": list(submission.auto),
    }


def _taken_back(submission: Submission, jobs: list[str], error: BaseException) -> BaseException:
    """Cancel the links that Slurm has taken, the last first, or one of them would start; returns the error with that.

    An OSError here is that of a full disk.
    """
    name = address(submission.run)
    try:
        for job in reversed(jobs):
            slurm.call("scancel", job)
        done = f"cancelled job {', '.join(jobs)}; arpo resume {name} submits it again"
    except UserError as other:
        done = f"{other}: arpo cancel {name} for what was taken ({', '.join(jobs)})"
    if isinstance(error, Interrupted):
        return Interrupted(done)
    if isinstance(error, UserError | OSError):
        return UserError(f"{error}; {done}")
    error.add_note(done)
    return error


@dataclass(frozen=True, slots=True)
class _Before:
    """What a run was before `submit` wrote to it.

    Attributes:
        files: what stood in each that is written; None: it was not there.
        folders: those that were not there.
    """

    files: Mapping[Path, bytes | None]
    folders: Sequence[Path]

    @classmethod
    def of(cls, run: RunDirectory, *more: Path) -> "_Before":
        files = [run.config, run.cluster, *more]
        files += [file.with_name(file.name + ".tmp") for file in files]
        return cls(
            {file: file.read_bytes() if file.exists() else None for file in files},
            [folder for folder in (run.submissions, run.logs) if not folder.exists()],
        )

    def restore(self) -> None:
        """Of a run that never was nothing is left but its inputs, so that the next one has its name."""
        for file, text in self.files.items():
            if text is None:
                file.unlink(missing_ok=True)
            elif not file.exists() or file.read_bytes() != text:
                file.write_bytes(text)
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)


def _nemo_run(home: Path) -> Any:
    """The package, which keeps its files in `home`."""
    if find_spec("nemo_run") is None:
        raise UserError("arpo submit needs nemo-run: pip install 'arpo-megatron[slurm]', or `make setup` in the clone")
    os.environ["NEMORUN_HOME"] = str(home)
    with warnings.catch_warnings():  # of packages that nemo-run imports for other executors
        warnings.simplefilter("ignore")
        import nemo_run

    nemo_run.config.set_nemorun_home(str(home))
    return nemo_run


@contextmanager
def _experiment(submission: Submission, home: Path, code: Code) -> "Iterator[Experiment]":
    """nemo-run's, with one job."""
    nemo_run = _nemo_run(home)
    name = submission.run.path.name
    script = nemo_run.Script(
        path=JOB, m=True, entrypoint=str(_python(submission.profile)), args=[str(submission.run.path)]
    )
    with chdir(ROOT), _nothing_to_read():  # it asks git in the working directory, and its commands read our input
        experiment = nemo_run.Experiment(
            name, id=f"{name}_{time.time_ns()}", log_level="ERROR", clean_mode=True, skip_status_at_exit=True
        )
        with experiment:
            experiment.add(script, executor=_executor(submission, code), name="job", tail_logs=False)
            yield experiment


@contextmanager
def _nothing_to_read() -> Iterator[None]:
    before = sys.stdin
    with Path(os.devnull).open(encoding="utf-8") as nothing:
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = before


def _executor(submission: Submission, code: Code) -> "SlurmExecutor":
    import nemo_run
    from nemo_run.core.execution.slurm import SlurmJobDetails

    profile, layout = submission.profile, submission.layout
    more: dict[str, Any] = dict(profile.sbatch)
    for word in gpu_options(profile, layout):
        name, _, amount = word.removeprefix("--").partition("=")
        more[name.replace("-", "_")] = amount
    if submission.chain > 1:
        more["dependency"] = "singleton"
    # Not as nemo-run's variables: it writes their names in upper case, and some (http_proxy) are in lower case.
    exports = [f"export {k}={shlex.quote(v)}" for k, v in profile.environment.items() if k not in _OWN_VARIABLES]
    return nemo_run.SlurmExecutor(
        account=profile.account,
        partition=profile.partition,
        qos=profile.qos,
        time=profile.time,
        nodes=layout.nodes,
        ntasks_per_node=layout.ranks_per_node,
        exclusive=profile.exclusive or None,
        mem=profile.mem,
        signal=f"USR1@{profile.signal_s}",
        job_name_prefix="",
        job_details=SlurmJobDetails(job_name=submission.job_name, folder=str(submission.run.logs)),
        # One supervisor, beside the container of the roles: it calls srun, which containers lack. On the first node, as
        # planned: Slurm prefers another while the step that nemo-run has just asked for its address is being ended.
        srun_args=["--nodes=1", "--ntasks=1", "--relative=0", "--overlap"],
        container_image=None,
        env_vars=dict(_OWN_VARIABLES),
        additional_parameters=more,
        setup_lines="\n".join([*exports, WAIT_FOR_SRUN]),
        tunnel=nemo_run.LocalTunnel(job_dir=""),
        packager=nemo_run.GitArchivePackager(basepath=str(ROOT), ref=code.tree, include_submodules=False),
        poll_estimated_start_time=False,
    )


def _refusal(error: Exception) -> str:
    result = getattr(error, "result", None)
    text = getattr(result, "stderr", "") or str(error)
    return " ".join(text.replace("sbatch: error:", "").split())
