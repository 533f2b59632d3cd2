"""Measured speeds of a cluster, kept in its profile."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from arpo_megatron.cli.cluster import app
from arpo_megatron.cluster.measure import command, keep
from arpo_megatron.cluster.profile import load_profile
from arpo_megatron.errors import UserError
from tests.cluster.onebox import Onebox
from tests.cluster.stand_in import profile


def test_kept_speeds_replace_their_keys_only(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("# ours\naccount: a\nruns: /r   # shared\nnetwork_gb_s: 1  # guess\n")
    keep(file, {"network_gb_s": 41.234, "filesystem_gb_s": 3.5}, 2)
    lines = file.read_text().splitlines()
    assert lines[:3] == ["# ours", "account: a", "runs: /r   # shared"]
    assert [line.partition("#")[0].strip() for line in lines[3:]] == ["network_gb_s: 41.2", "filesystem_gb_s: 3.5"]
    assert load_profile(str(file)).network_gb_s == 41.2


def test_profile_that_cannot_be_edited_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(before := '{"account": "a", "runs": "/r"}')
    with pytest.raises(UserError, match=r"add to the profile: network_gb_s: 41.2 "):
        keep(file, {"network_gb_s": 41.2}, 2)
    assert file.read_text() == before


def test_measurement_has_a_task_per_gpu_and_the_profiles_options() -> None:
    words = command(
        profile(partition="p", container="/i.sqsh", container_python="py", srun_args=["--mpi=none"], sbatch={"x": "y"}),
        2,
        Path("/shared/m"),
    )
    assert {"--ntasks=16", "--ntasks-per-node=8", "--gpus-per-node=8", "--partition=p", "--mpi=none", "--x=y"} <= {
        *words
    }
    assert any("/shared/m:/shared/m" in word for word in words if word.startswith("--container-mounts="))
    assert words[-5:] == ["py", "-m", "arpo_megatron.cluster.measure_node", "/shared/m", "1"]


def test_measurement_without_a_profile_is_refused() -> None:
    with pytest.raises(UserError, match="--measure needs --cluster NAME"):
        CliRunner().invoke(app, ["doctor", "--measure"], catch_exceptions=False)


@pytest.mark.slurm_campaign
def test_speeds_between_two_nodes_are_measured(box: Onebox, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_CONF", "PYTHONPATH"):
        monkeypatch.setenv(name, box.environment[name])
    name = box.profile("measured", gpus_per_node=0, gpu_request="none")
    Path(name).write_text(yaml.safe_dump(json.loads(Path(name).read_text())))  # a key per line
    done = subprocess.run(
        [sys.executable, "-m", "arpo_megatron", "doctor", "--cluster", name, "--measure"],
        env=box.environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = load_profile(name)
    assert found.network_gb_s is not None and 0.01 < found.network_gb_s < 100
    assert found.filesystem_gb_s != 2.0 and found.host_copy_gb_s is None
    assert not list(box.runs.glob(".measure-*"))
