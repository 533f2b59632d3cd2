"""The project's wheel has every module, data file, recipe and cluster profile, and no other top-level package."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("arpo_megatron", "tools_sandbox", "recipes", "slurm/clusters")
BUILD = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the content of the project's wheel."""
    source, wheels, target = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "installed"))
    for name in SOURCES:  # a copy, since building leaves files next to the sources
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    (source / "docs/reference").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", "docs/reference/run-directory.md"):
        shutil.copy(ROOT / name, source / name)
    subprocess.run([sys.executable, "-c", BUILD, wheels], cwd=source, check=True, timeout=300)
    (wheel,) = wheels.glob("arpo_megatron-*.whl")
    with zipfile.ZipFile(wheel) as content:
        content.extractall(target)
    return target


def test_wheel_has_every_file_of_the_packages(installed: Path) -> None:
    homes = {"recipes": "arpo_megatron/recipes", "slurm/clusters": "arpo_megatron/cluster/profiles"}
    wanted = {
        Path(homes.get(name, name)) / path.relative_to(ROOT / name)
        for name in SOURCES
        for path in (ROOT / name).rglob("*")
        if path.is_file() and path.suffix not in {".pyc", ".toml"}
    }
    packages = {path.name: path for path in installed.iterdir() if path.suffix != ".dist-info"}
    assert set(packages) == {"arpo_megatron", "tools_sandbox"}
    found = {
        path.relative_to(installed) for folder in packages.values() for path in folder.rglob("*") if path.is_file()
    }
    assert found == wanted


def test_submit_from_wheel_knows_profiles(installed: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "arpo_megatron", "submit", "quickstart", "--cluster", "h10"]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    profiles = installed / "arpo_megatron/cluster/profiles"
    assert done.returncode == 2, done.stderr
    assert f"unknown cluster 'h10'; did you mean h100?; profiles in {profiles}: h100, h100_venv, onebox" in done.stderr
