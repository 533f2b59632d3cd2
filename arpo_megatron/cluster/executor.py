"""nemo-run's SlurmExecutor for a cluster profile: that of a submission, and one for experiments of nemo-run.

    from arpo_megatron.cluster.executor import slurm_executor

    experiment.add(run.Partial(train, job=job), executor=slurm_executor("h100", nodes=4))

One task of such an executor is the supervisor, as in a job of `arpo submit`; it receives the profile as a variable.
"""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arpo_megatron.cluster.backend import OWN_VARIABLES, gpu_options
from arpo_megatron.cluster.code_snapshot import ROOT, Code, snapshot
from arpo_megatron.cluster.profile import ClusterProfile, load_profile, profile_from_text, profile_text
from arpo_megatron.cluster.submission import Submission
from arpo_megatron.plan.node_layout import NodeLayout

if TYPE_CHECKING:
    from nemo_run import SlurmExecutor

PROFILE_VARIABLE = "ARPO_CLUSTER_PROFILE"
"""Environment variable of a task of `slurm_executor`: the profile. It has no secrets."""
WAIT_FOR_SRUN = "trap : TERM USR1"
"""Line of the batch script. On a signal, the shell then waits for the end of the supervisor, which receives it too."""


def slurm_executor(cluster: str, nodes: int = 1) -> "SlurmExecutor":
    """Return an executor for `run.Experiment.add` with which `train` or `sft` of `cli/nemo.py` runs as a submitted job.

    Account, partition, GPUs, container, environment, secrets, ports, requeues and restarts are those of the profile.
    The code of the clone is packed with the job.

    Args:
        cluster: name or file of the profile. Its `ssh` is not used: the experiment runs on a login node.
        nodes: number of nodes that the job takes.

    Raises:
        UserError: there is no such profile, a secret is not set, or the code is no git clone.
    """
    profile = load_profile(cluster)
    profile.require_secrets()
    python = supervisor_python(profile).parent
    setup = [
        f"export {PROFILE_VARIABLE}={shlex.quote(profile_text(profile))}",
        f"export PATH={shlex.quote(str(python))}:$PATH",  # nemo-run starts `python`
    ]
    layout = NodeLayout(nodes, profile.gpus_per_node, nodes, 1, 0, 1, colocated=True)
    return _executor(profile, layout, snapshot(), setup)


def profile_of_executor() -> ClusterProfile | None:
    """Return the profile of the `slurm_executor` that started this process; None if another executor did."""
    text = os.environ.get(PROFILE_VARIABLE)
    return None if text is None else profile_from_text(text, PROFILE_VARIABLE)


def submission_executor(submission: Submission, code: Code) -> "SlurmExecutor":
    """Return the executor of a job of `arpo submit`."""
    from nemo_run.core.execution.slurm import SlurmJobDetails

    more = {}
    if submission.chain > 1:
        more["dependency"] = "singleton"
    if submission.after:
        more["dependency"] = f"afterany:{':'.join(submission.after)}"
    details = SlurmJobDetails(job_name=submission.job_name, folder=str(submission.logs))
    return _executor(submission.profile, submission.layout, code, more=more, job_details=details)


def supervisor_python(profile: ClusterProfile) -> Path:
    """Return the Python of the supervisor."""
    return (profile.python or Path(sys.executable)).expanduser()


def _executor(
    profile: ClusterProfile,
    layout: NodeLayout,
    code: Code,
    setup: Sequence[str] = (),
    *,
    more: dict[str, Any] | None = None,
    **options: Any,
) -> "SlurmExecutor":
    import nemo_run

    from arpo_megatron.cluster.packager import TreePackager

    parameters: dict[str, Any] = {**profile.sbatch, **(more or {})}
    for option in gpu_options(profile, layout):
        name, _, amount = option.removeprefix("--").partition("=")
        parameters[name.replace("-", "_")] = amount
    # Not as nemo-run's env_vars: it writes their names in upper case, and some (http_proxy) are in lower case.
    exports = [f"export {k}={shlex.quote(v)}" for k, v in profile.environment.items() if k not in OWN_VARIABLES]
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
        # One supervisor, outside the container, which lacks srun. It must be on the first node, as the layout has it:
        # Slurm prefers another node while the step with which nemo-run reads the node's address is ending.
        srun_args=["--nodes=1", "--ntasks=1", "--relative=0", "--overlap"],
        container_image=None,
        env_vars=dict(OWN_VARIABLES),
        additional_parameters=parameters,
        setup_lines="\n".join([*exports, *setup, WAIT_FOR_SRUN]),
        tunnel=nemo_run.LocalTunnel(job_dir=""),
        packager=TreePackager(clone=str(ROOT), tree=code.tree),
        poll_estimated_start_time=False,
        **options,
    )
