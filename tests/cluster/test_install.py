"""Package installation for `make slurm-demo` starts no service, and a missing Slurm is reported."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.onebox import ROOT
from tests.packages import INSTALL


@pytest.mark.parametrize(("before", "code"), [(None, 0), ("#!/bin/sh\nexit 104\n", 0), (None, 100)])
def test_package_installation_starts_no_service(tmp_path: Path, before: str | None, code: int) -> None:
    """A stand-in for apt-get calls policy-rc.d like a package's script."""
    policy, log = tmp_path / "policy-rc.d", tmp_path / "log"
    if before is not None:
        policy.write_text(before)
    (apt := tmp_path / "apt-get").write_text(
        f'#!/bin/sh\n[ "$3" = update ] && exit\n{policy} munge start; echo "$? $*" >{log}; exit {code}\n'
    )
    apt.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "POLICY": str(policy)}
    assert subprocess.run([INSTALL, "munge"], env=environment).returncode == code
    assert log.read_text() == "101 -o DPkg::Lock::Timeout=300 install -y --no-install-recommends munge\n"
    assert (policy.read_text() if policy.exists() else None) == before


def test_slurm_campaign_is_skipped_with_the_reason_if_slurm_is_not_installable(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    (tmp_path / "bash").symlink_to(bash)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--campaigns",
            "tests/cluster/test_faults.py",
        ],
        cwd=ROOT,
        env={**os.environ, "PATH": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    reason = "no Slurm: onebox: .* is not installed: "
    found = re.findall(rf"^SKIPPED \[\d+\] tests/cluster/test_faults.py\S*: {reason}", done.stdout, re.MULTILINE)
    assert done.returncode == 0 and found, done.stdout
    assert re.search(r"^\d+ skipped in ", done.stdout, re.MULTILINE), done.stdout
