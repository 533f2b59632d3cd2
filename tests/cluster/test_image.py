"""`make image`: the image is written for pyxis only after its check, and the check compares it with the lock file."""

import os
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from arpo_megatron.launch.preflight.image import check_lock
from tests.cluster.onebox import ROOT

SCRIPT = ROOT / "slurm" / "container" / "build.sh"
STAND_IN = '#!/bin/sh\necho "$(basename "$0") $*" >>"{log}"\n[ "$1" != run ] || exit {code}\n'


def build(folder: Path, *arguments: str, programs: tuple[str, ...], code: int = 0) -> tuple[int, list[str], str]:
    """Run build.sh with stand-ins for these programs; return its exit code, their calls, and its errors."""
    (path := folder / "bin").mkdir()
    for name in programs:
        (path / name).write_text(STAND_IN.format(log=folder / "log", code=code))
        (path / name).chmod(0o755)
    for name in ("bash", "dirname", "basename", "realpath"):
        (path / name).symlink_to(Path("/usr/bin") / name)
    environment = {**os.environ, "PATH": str(path), "DOCKER": programs[0] if programs else "docker"}
    done = subprocess.run([SCRIPT, *arguments], env=environment, capture_output=True, text=True)
    log = folder / "log"
    return done.returncode, log.read_text().splitlines() if log.exists() else [], done.stderr


@pytest.mark.parametrize(("docker", "source"), [("docker", "dockerd"), ("podman", "podman")])
def test_image_is_built_checked_and_written(tmp_path: Path, docker: str, source: str) -> None:
    sqsh = tmp_path / "arpo.sqsh"
    arguments = ("--tag", "mine:1", "--sqsh", str(sqsh))
    code, calls, _ = build(tmp_path, *arguments, programs=(docker, "enroot", "nvidia-smi"))
    assert code == 0
    built, checked, written = calls
    assert built == f"{docker} build --file slurm/container/Dockerfile --tag mine:1 ."
    assert checked.startswith(f"{docker} run --rm --gpus all --volume {ROOT}:/code:ro")
    assert checked.endswith(" mine:1 python -m arpo_megatron.launch.preflight.image")
    assert written == f"enroot import --output {sqsh} {source}://mine:1"


def test_image_that_fails_its_check_is_not_written(tmp_path: Path) -> None:
    arguments = ("--sqsh", str(tmp_path / "arpo.sqsh"))
    code, calls, error = build(tmp_path, *arguments, programs=("docker", "enroot"), code=1)
    assert code == 2 and "image: arpo-megatron:0.1.0 is built, but its check failed" in error
    assert [call.split()[1] for call in calls] == ["build", "run"] and "--gpus" not in calls[1]


@pytest.mark.parametrize(
    ("programs", "arguments", "message"),
    [
        ((), (), "docker is not installed: install docker or podman, or set DOCKER"),
        (("docker",), ("--sqsh", "x.sqsh"), "enroot is not installed here: leave out --sqsh"),
        (("docker", "enroot"), ("--sqsh", "README.md"), "README.md exists already"),
        (("docker",), ("--smoke", "x"), "unknown argument --smoke; usage: "),
    ],
)
def test_what_prevents_an_image_is_reported_before_the_build(
    tmp_path: Path, programs: tuple[str, ...], arguments: tuple[str, ...], message: str
) -> None:
    code, calls, error = build(tmp_path, *arguments, programs=programs)
    assert code == 2 and not calls
    assert error.startswith("image: ") and message in error


def test_packages_are_compared_with_the_lock_file(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text(f"# a comment\npyyaml=={version('pyyaml')}\n")
    assert check_lock(tmp_path / "lock").level == "ok"
    (tmp_path / "lock").write_text("pyyaml==0.1\nno-such-package==1.0\n")
    found = check_lock(tmp_path / "lock")
    assert (found.level, found.text) == (
        "failure",
        f"pyyaml {version('pyyaml')} instead of 0.1, no-such-package is missing",
    )
