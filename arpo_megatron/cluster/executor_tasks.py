"""A job that the tasks of a nemo-run executor start together: one of them runs it, and the others wait for its end.

nemo-run starts a function once per task (`ntasks_per_node` x `nodes`, or the ranks of its torchrun and fault-tolerance
launchers). The processes of a job are started by the job itself, so one task is enough. The others must stay until the
end: nemo-run's `srun --wait=60` ends a step a minute after its first task.
"""

import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from arpo_megatron.cluster.executor import profile_of_executor
from arpo_megatron.cluster.profile import ClusterProfile, save_profile
from arpo_megatron.cluster.submissions import submissions_of
from arpo_megatron.cluster.submit import prepare_submission
from arpo_megatron.cluster.supervise import supervise
from arpo_megatron.config import JobConfig
from arpo_megatron.config.io import save_config
from arpo_megatron.errors import UserError
from arpo_megatron.hardware.placement import gpu_count
from arpo_megatron.jobs import choose_run, run_directory
from arpo_megatron.utils.atomic import read_json, write_json

_NUMBER_AND_COUNT = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), ("SLURM_PROCID", "SLURM_NTASKS"))
"""Variables with the number of a task, and with the number of all tasks."""
_TASKS_OF = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
)
"""Variables that name the tasks which were started together."""
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables of a launcher's ranks. Processes of the job would take themselves for such a rank."""
_OF_LAUNCHER_FT = ("FAULT_TOL_", "FT_RANK_MONITOR_")
"""Beginnings of the variables that nemo-run's launcher `ft` sets for its tasks."""
_REFUSED = {
    "ft": "it ends ranks that send it no heartbeats",
    "slurm_ray": "it keeps the nodes for Ray, which a job does not use",
    "slurm_template": "its shell does not pass Slurm's signals on",
    "torchrun": "on several nodes its first rank may be on any of them",
}
"""Launchers of nemo-run that cannot start a job, with the reason. torchrun is refused on several nodes only."""
_CLASSES = {"SlurmRay": "slurm_ray", "SlurmTemplate": "slurm_template"}
"""Launchers that set no variables, by the class that nemo-run writes instead of the name."""
_POLL_S = 0.5
_LEAVE_S = 30.0
"""How long the first task waits for the others at the end. A job may fail before the others have begun."""


@contextmanager
def first_task(folder: Path) -> Iterator[bool]:
    """Yield True in the first task of an executor. In the others, wait until that block has ended and yield False.

    Args:
        folder: directory that all tasks share. If a task is too late, a folder with a few empty files remains there.
    """
    number, count = _number_and_count()
    names = [os.environ[name] for name in _TASKS_OF if name in os.environ]
    for name in _OF_A_RANK:
        os.environ.pop(name, None)
    if not names or count == 1:  # no launcher, or nothing to share
        yield True
        return
    here = folder / f".tasks-{'-'.join(names)}".replace("/", "-")
    here.mkdir(parents=True, exist_ok=True)
    ended = here / "ended"
    if number:
        while not ended.exists():
            time.sleep(_POLL_S)
        (here / str(number)).touch()
        yield False
        return
    try:
        yield True
    finally:
        ended.touch()
        deadline = time.monotonic() + _LEAVE_S
        while (late := len(list(here.iterdir())) < count) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if not late:  # a late task must find `ended`, or it would wait for ever
            shutil.rmtree(here, ignore_errors=True)


def _number_and_count() -> tuple[int, int]:
    """Return the number of this task and of all tasks; (0, 1) without a launcher."""
    for number, count in _NUMBER_AND_COUNT:
        if number in os.environ and count in os.environ:
            return int(os.environ[number]), int(os.environ[count])
    return 0, 1


def check_launcher() -> None:
    """Raise UserError in a task of a launcher of nemo-run that cannot start a job."""
    launcher = _launcher()
    if (why := _REFUSED.get(launcher)) is None:
        return
    where = " on several nodes" if launcher == "torchrun" else ""
    instead = "; `restarts` in the profile of slurm_executor() restarts failed jobs" if launcher == "ft" else ""
    raise UserError(f"nemo-run's launcher {launcher} cannot start a job{where}: {why}. Leave out launcher={instead}")


def _launcher() -> str:
    """Return the launcher of this task if it may be one of `_REFUSED`, else an empty text.

    nemo-run writes the executor to DIR/NAME_executor.yaml, next to DIR/NAME_fn_or_script, the last argument of a task.
    """
    if any(name.startswith(_OF_LAUNCHER_FT) for name in os.environ):
        return "ft"
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:  # torchrun's number of nodes
        return "torchrun"
    task = Path(sys.argv[-1])
    executor = task.with_name(f"{task.name.removesuffix('_fn_or_script')}_executor.yaml")
    if executor == task or not executor.is_file():
        return ""
    found = re.search(r"^launcher:(?:\s+_target_:)?\s+(?:[\w.]+\.)?(\w+)$", executor.read_text("utf-8"), re.MULTILINE)
    name = found[1] if found else ""
    return _CLASSES.get(name, name if name in _CLASSES.values() else "")


def nodes_of_executor() -> int:
    """Return the number of nodes of the Slurm allocation around this process; 1 outside Slurm."""
    return int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))


def run_on_allocation(config: JobConfig, *, resume: bool, only_sft: bool = False) -> None:
    """Run a job on all nodes of the allocation that a nemo-run executor made, with this task as the supervisor.

    A job that Slurm has requeued continues its run.

    Args:
        config: config of the job.
        resume: continue the newest run of this config.
        only_sft: end after the cold start.

    Raises:
        UserError: the job does not fit the nodes, or srun is missing, as in a container.
        SystemExit: the job failed; its code is the exit code of the supervisor.
    """
    if shutil.which("srun") is None:
        raise UserError(
            "srun is not on the PATH of this task, and a job on several nodes starts its processes with it: "
            "run the executor without container_image, or use arpo submit"
        )
    profile = profile_of_executor() or _plain_profile(config)
    requeued = _requeued_run((config.run_dir.absolute().parent if config.run_dir else profile.runs).expanduser())
    if requeued is not None:
        config = replace(config, run_dir=requeued)
    again = resume or requeued is not None
    submission = prepare_submission(config, profile, nodes=nodes_of_executor(), resume=again, only_sft=only_sft)
    run = submission.run
    if not again:
        choose_run.fresh(submission.config)
    save_config(submission.config, run.config)
    run.logs.mkdir(exist_ok=True)
    run.submissions.mkdir(exist_ok=True)
    save_profile(submission.profile, run.cluster)
    if requeued is None:
        write_json(
            run.submissions / f"{len(submissions_of(run)) + 1}.json",
            submission.record([os.environ["SLURM_JOB_ID"]], os.environ.get("SLURM_JOB_NAME", "")),
        )
    if code := supervise(run.path, (), only_sft=only_sft):
        raise SystemExit(code)


def _plain_profile(config: JobConfig) -> ClusterProfile:
    """Return a profile for an executor that has none: the nodes as they are, without containers and requeues."""
    gpus = int(os.environ.get("SLURM_GPUS_ON_NODE") or gpu_count(config.platform))
    where = (config.run_dir or Path.cwd() / run_directory.RUNS).absolute()
    return ClusterProfile(
        account=os.environ.get("SLURM_JOB_ACCOUNT", "none"),
        runs=where.parent if config.run_dir else where,
        gpus_per_node=gpus,
        # `gres` fits an allocation however its GPUs were requested.
        gpu_request="gres" if "SLURM_GPUS_ON_NODE" in os.environ else "none",
        python=Path(sys.executable),
        requeue=False,
    )


def _requeued_run(base: Path) -> Path | None:
    """Return the run in `base` that this job began before Slurm requeued it; None if it began none."""
    if not int(os.environ.get("SLURM_RESTART_COUNT", "0")):
        return None
    for record in base.glob("*/submissions/[0-9]*.json"):
        found = read_json(record, "delete it")
        if os.environ["SLURM_JOB_ID"] in found["jobs"] and os.environ.get("SLURM_JOB_NAME", "") == found["job_name"]:
            return record.parents[1]
    return None
