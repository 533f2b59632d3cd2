"""`arpo doctor --cluster NAME --measure`: speeds of network, filesystem and host copies, kept in the profile."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from arpo_megatron.cluster import slurm
from arpo_megatron.cluster.backend import gpu_options
from arpo_megatron.cluster.code_snapshot import ROOT
from arpo_megatron.cluster.profile import ClusterProfile
from arpo_megatron.errors import UserError
from arpo_megatron.plan.node_layout import NodeLayout
from arpo_megatron.utils.atomic import atomic_write
from tools_sandbox.utils.yaml import NotYamlError, load_yaml

LIMIT_MIN = 10
"""Time limit of the job, in minutes."""


def measure(profile: ClusterProfile, nodes: int) -> dict[str, float]:
    """Run the measurement (`measure_node`) as a job of its own, and return the profile's keys with GB/s.

    Args:
        profile: profile of the cluster.
        nodes: number of nodes; from two on, the network between them is measured.

    Raises:
        UserError: Slurm refuses the job, or a rank fails.
    """
    slurm.call("sinfo", "--version")
    runs = profile.runs.expanduser()
    runs.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".measure-", dir=runs))
    environment = {**os.environ, **profile.environment, "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            command(profile, nodes, folder),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if done.returncode:
        raise UserError(f"the measurement on {nodes} node(s) ended with exit code {done.returncode}: see srun's output")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def command(profile: ClusterProfile, nodes: int, folder: Path) -> list[str]:
    """Return the srun command of a measurement: a task per GPU, or one per node without GPUs."""
    each = profile.gpus_per_node or 1
    layout = NodeLayout(nodes, profile.gpus_per_node, nodes, each, 0, 1, colocated=True)
    named = {"account": profile.account, "partition": profile.partition, "qos": profile.qos, "mem": profile.mem}
    options = [f"--{name}={value}" for name, value in {**named, **profile.sbatch}.items() if value is not None]
    python = str(profile.python.expanduser()) if profile.python else sys.executable
    container: Sequence[str] = ()
    if profile.container is not None:
        python = profile.container_python
        mounts = ",".join([*profile.mounts, *(f"{path}:{path}" for path in (ROOT, folder))])
        names = ",".join(sorted({*profile.environment, "PYTHONPATH"}))
        container = (
            f"--container-image={profile.container}",
            f"--container-mounts={mounts}",
            f"--container-env={names}",
            "--no-container-mount-home",
        )
    return [
        *("srun", "--job-name=arpo-measure", f"--time={LIMIT_MIN}", "--kill-on-bad-exit=1", "--cpu-bind=none"),
        *(f"--nodes={nodes}", f"--ntasks={nodes * each}", f"--ntasks-per-node={each}"),
        *(("--exclusive",) if profile.exclusive else ()),
        *options,
        *gpu_options(profile, layout),
        *profile.srun_args,
        *container,
        *(python, "-m", "arpo_megatron.cluster.measure_node", str(folder), str(int(profile.gpus_per_node > 0))),
    ]


def keep(path: Path, speeds: Mapping[str, float], nodes: int) -> None:
    """Write measured speeds to a profile. The other lines, with their comments, stay as they are.

    Raises:
        UserError: the file does not have one key per line, or cannot be written; the message has the lines to add.
    """
    lines = [
        f"{key}: {speed:.3g}  # arpo doctor --measure, {nodes} node(s), {time.strftime('%Y-%m-%d')}"
        for key, speed in speeds.items()
    ]
    text = path.read_text(encoding="utf-8")
    for line in lines:
        text, count = re.subn(rf"^{line.partition(':')[0]}:.*$", line, text, flags=re.MULTILINE)
        if not count:
            text = f"{text.rstrip()}\n{line}\n"
    try:
        load_yaml(text)
        with atomic_write(path) as file:
            file.write_text(text, encoding="utf-8")
    except (NotYamlError, OSError):
        raise UserError(f"{path} cannot be edited; add to the profile: {', '.join(lines)}") from None
