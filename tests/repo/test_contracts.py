"""The arrows between packages: the contracts in pyproject.toml hold, and each of them notices who breaks it."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("arpo_megatron", "tools_sandbox", "recipes")
LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")
VIOLATIONS = {
    "tree.py knows nobody": {"arpo_megatron/tree.py": "from arpo_megatron import errors"},
    "only actor and weights import megatron": {
        "arpo_megatron/train.py": "import megatron.core",
        "arpo_megatron/bench/pack.py": "from megatron.core import parallel_state",
    },
    "only rollout imports sglang": {"arpo_megatron/launch/services.py": "import sglang"},
    "layers of the tool service": {"tools_sandbox/config.py": "from tools_sandbox import tool"},
    "the tool service stands alone": {"tools_sandbox/__main__.py": "import arpo_megatron.errors"},
    "tree, config and recipes need no torch": {"recipes/quickstart.py": "import torch"},
}


def lint_imports(place: Path) -> str:
    """What import-linter says of the packages in `place`."""
    done = subprocess.run(
        [LINT_IMPORTS, "--no-cache"], cwd=place, capture_output=True, text=True, env={"NO_COLOR": "1", "COLUMNS": "200"}
    )
    return done.stdout + done.stderr


@pytest.fixture
def copied_packages(tmp_path: Path) -> Path:
    """The packages and their contracts, to be broken."""
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_every_contract_notices_who_breaks_it(copied_packages: Path) -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert {contract["name"] for contract in contracts} == set(VIOLATIONS)
    before = lint_imports(copied_packages)
    for name, files in VIOLATIONS.items():
        assert f"{name} KEPT" in before, before
        for file, line in files.items():
            with (copied_packages / file).open("a") as source:
                source.write(f"\n{line}\n")
    after = lint_imports(copied_packages)
    for name, files in VIOLATIONS.items():
        assert f"{name} BROKEN" in after, after
        for file in files:
            assert file.removesuffix(".py").replace("/", ".") in after, f"{file} was not noticed\n{after}"


def test_the_command_line_answers_without_torch() -> None:
    program = (
        "import sys, arpo_megatron.cli.main\n"
        "from arpo_megatron.jobs import resolve\n"
        "for name in resolve.recipe_names(): resolve.resolve(name, overrides=['seed=3'])\n"
        "print(*sorted({'torch', 'transformers', 'megatron', 'sglang'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
