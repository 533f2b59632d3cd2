"""`arpo eval`, `arpo export` and `arpo serve` as jobs of their own: one node runs the same command for a run.

The command runs in the container of the profile, with its environment and secrets. A command job takes no lock of the
run: a run can be resumed while one waits.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from arpo_megatron.cluster import slurm
from arpo_megatron.cluster.backend import SERVICE, SlurmBackend, drop_slurm_variables
from arpo_megatron.cluster.code_snapshot import snapshot
from arpo_megatron.cluster.mounts import with_files_mounted
from arpo_megatron.cluster.profile import ClusterProfile, load_profile, save_profile
from arpo_megatron.cluster.submission import Submission
from arpo_megatron.cluster.submissions import record_command
from arpo_megatron.cluster.submit import submit_one
from arpo_megatron.cluster.supervise import read_secrets, report, retry
from arpo_megatron.config import JobConfig
from arpo_megatron.errors import USER_ERROR_EXIT_CODE, UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.plan.node_layout import NodeLayout
from arpo_megatron.utils.ports import free_ports
from arpo_megatron.utils.signals import interrupts_held_back

_EVAL_MEMORY = 0.8
"""Share of a GPU for an engine of an evaluation or a server, which shares the node with no trainer."""


def command_submission(
    run: RunDirectory, profile: ClusterProfile, words: Sequence[str], after: Sequence[str] = ()
) -> Submission:
    """Return the job that runs `arpo WORDS...` for a run, on one node. Nothing is written.

    Args:
        run: the run; all nodes see its directory.
        profile: profile of the cluster.
        words: the command and its arguments, with absolute paths.
        after: jobs that must have ended before.
    """
    run = RunDirectory(run.path.absolute())
    config = resolve.load(run.config)
    return Submission(
        replace(config, run_dir=run.path),
        with_files_mounted(config, profile),
        _one_node(config, profile),
        run,
        command=words[0],
        arguments=(str(run.submissions / f"{words[0]}.yaml"), *words),
        after=tuple(after),
    )


def submit_command(run: RunDirectory, profile: ClusterProfile, words: Sequence[str], after: Sequence[str] = ()) -> str:
    """Submit a `command_submission` and return the id of the job.

    Raises:
        UserError: Slurm refuses the job, or a secret is not set.
    """
    submission = command_submission(run, profile, words, after)
    submission.profile.require_secrets()
    slurm.call("sbatch", "--version")
    submission.logs.mkdir(parents=True, exist_ok=True)  # Slurm does not create it
    submission.run.submissions.mkdir(exist_ok=True)
    save_profile(submission.profile, Path(submission.arguments[0]))
    code = snapshot()
    with interrupts_held_back():
        job = submit_one(submission, code)
        record_command(submission.run, job, submission.job_name, words)
    return job


def run_command(path: Path, profile_path: Path, words: Sequence[str]) -> int:
    """Run an `arpo` command as a step of this job, and return its exit code."""
    run, job_id, node_list = RunDirectory(path), os.environ["SLURM_JOB_ID"], os.environ["SLURM_JOB_NODELIST"]
    drop_slurm_variables()
    try:
        profile, config = load_profile(str(profile_path)), resolve.load(run.config)
        nodes: list[slurm.Node] = retry(lambda: slurm.allocated_nodes(node_list), [])
        if not nodes:
            raise UserError(f"Slurm does not name the nodes {node_list}: submit the command again once `sinfo` answers")
        read_secrets(profile)
        backend = SlurmBackend(profile, _one_node(config, profile), nodes[:1], run, job_id)
        command = [sys.executable, "-m", "arpo_megatron", *words, *_engine_overrides(words[0], config, profile)]
        if words[0] == "serve":
            command += _address_of_server(words, nodes[0], profile)
        with backend.prepared():
            return _run(backend.step(words[0], nodes[:1], 1, backend.python(command), task=SERVICE))
    except UserError as error:
        return report(error, USER_ERROR_EXIT_CODE)


def _run(step: Sequence[str]) -> int:
    """Run the step; TERM (scancel, a preemption) ends it."""
    with subprocess.Popen(step, stdin=subprocess.DEVNULL) as process:
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        while (code := process.poll()) is None:  # not `wait`, in which a handler could wait for its lock
            time.sleep(0.2)
        return code if code >= 0 else 128 - code


def _one_node(config: JobConfig, profile: ClusterProfile) -> NodeLayout:
    return NodeLayout(1, profile.gpus_of(config), 1, 1, 0, config.engine.tensor, colocated=True)


def _address_of_server(words: Sequence[str], node: slurm.Node, profile: ClusterProfile) -> list[str]:
    """Return the options with which a server listens on its node's address, at a port of the profile."""
    port = [] if "--port" in words else [f"--port={free_ports(1, node.address, profile.ports)[0]}"]
    return [f"--host={node.address}", "--token", *port]


def _engine_overrides(command: str, config: JobConfig, profile: ClusterProfile) -> list[str]:
    """Return overrides with which the engines of an evaluation or a server fill the node, whatever the run's layout."""
    gpus = profile.gpus_of(config)
    if command == "export" or not gpus:
        return []
    return [
        "engine.placement=colocated",
        f"engine.replicas={max(1, gpus // config.engine.tensor)}",
        f"engine.memory_fraction={_EVAL_MEMORY}",
    ]
