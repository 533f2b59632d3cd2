"""A Slurm for the tests of a module, and the training that they disturb."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.onebox import SCRIPT, Onebox
from tests.cluster.training import Undisturbed, train_undisturbed


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Onebox]:
    """A Slurm with two nodes. Tests are skipped if it is not installed and cannot be."""
    if not shutil.which("slurmctld", path=os.environ["PATH"] + ":/usr/sbin"):
        done = subprocess.run([SCRIPT, "install"], capture_output=True, text=True, timeout=180)
        if done.returncode:
            pytest.skip(f"no Slurm: {' '.join(done.stderr.split())[-200:]}")
    slurm = Onebox.start(tmp_path_factory.mktemp("runs"))
    yield slurm
    slurm.stop()


@pytest.fixture(scope="module")
def calm(box: Onebox, once: Callable[[str, Callable[[Path], None]], Path]) -> Undisturbed:
    """The training without disturbance; one run of pytest has it once."""
    return Undisturbed.read(once("undisturbed", lambda folder: train_undisturbed(box, folder)))
