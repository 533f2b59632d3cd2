"""Packages that `make slurm-demo` installs start no service of a machine that has an init; where they cannot be had,
that is said."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import sshd
from tests.cluster.onebox import ROOT


@pytest.mark.parametrize(("before", "code"), [(None, 0), ("#!/bin/sh\nexit 104\n", 0), (None, 100)])
def test_services_are_held_back_while_packages_are_installed(tmp_path: Path, before: str | None, code: int) -> None:
    """apt-get is stood in for, because this machine's packages are left alone: it asks as a package's script does."""
    policy, said = tmp_path / "policy-rc.d", tmp_path / "said"
    if before is not None:
        policy.write_text(before)
    (apt := tmp_path / "apt-get").write_text(
        f'#!/bin/sh\n[ "$1" = update ] && exit\n{policy} munge start; echo "$? $*" >{said}; exit {code}\n'
    )
    apt.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "POLICY": str(policy)}
    assert subprocess.run([sshd.INSTALL, "munge"], env=environment).returncode == code
    assert said.read_text() == "101 install -y --no-install-recommends munge\n"
    assert (policy.read_text() if policy.exists() else None) == before


@pytest.mark.parametrize("slurm", [True, False])
def test_a_campaign_that_is_not_run_says_why(tmp_path: Path, slurm: bool) -> None:
    """Without Slurm and without apt-get none can be had; with it, it takes too long to be run by the way."""
    bash = shutil.which("bash")
    assert bash is not None
    (tmp_path / "bash").symlink_to(bash)
    if slurm:
        for program in ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol"):
            (tmp_path / program).write_text("#!/bin/sh\n")
            (tmp_path / program).chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/cluster/test_campaign.py"],
        cwd=ROOT,
        env={**os.environ, "PATH": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    reason = "about an hour of this machine: make test-slurm" if slurm else "no Slurm: onebox: .* is not installed: "
    found = re.findall(rf"^SKIPPED \[\d+\] tests/cluster/test_campaign.py\S*: {reason}", done.stdout, re.MULTILINE)
    assert done.returncode == 0 and found, done.stdout
    assert re.search(r"^\d+ skipped in ", done.stdout, re.MULTILINE), done.stdout
