"""One demo, trained once, for all end-to-end tests."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.jobs import ARPO, SEED


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The figures of `arpo demo --seed 7`, run in an empty directory; paths in them are absolute."""
    place = tmp_path_factory.mktemp("demo")
    done = subprocess.run([*ARPO, "demo", "--seed", str(SEED)], cwd=place, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, f"arpo demo failed; logs in {place}/runs/*/logs\n{done.stderr[-3000:]}"
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    figures["screen"] = done.stderr
    for name in ("run_dir", "export_dir"):
        figures[name] = str(place / figures[name])
    return figures


@pytest.fixture
def warm_run(demo: dict[str, Any], tmp_path: Path) -> Path:
    """A run directory in which the cold start is done already, so that `arpo train` in it begins with the ARPO loop."""
    run = tmp_path / "run"
    run.mkdir()
    for name in ("initial_model", "sft"):
        shutil.copytree(Path(demo["run_dir"]) / name, run / name)
    return run
