"""The service is a package of its own: it installs and runs without the trainer and what that needs."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PACKAGE = Path(__file__).resolve().parents[2] / "tools_sandbox"
PROJECT = tomllib.loads((PACKAGE / "pyproject.toml").read_text())
# Imports the installed service, and only it, with the trainer's packages out of reach; answers one call.
PROGRAM = """
import asyncio, sys
for name in ("torch", "transformers", "megatron", "sglang", "arpo_megatron"):
    sys.modules[name] = None
import tools_sandbox
assert tools_sandbox.__file__.startswith(sys.argv[1]), tools_sandbox.__file__
import tools_sandbox.client, tools_sandbox.service.server, tools_sandbox.workers.worker, tools_sandbox.mcp.tools
import tools_sandbox.search.tool, tools_sandbox.browse.tool, tools_sandbox.browse.page, tools_sandbox.bench.search
from tools_sandbox.config import SandboxConfig
from tools_sandbox.service.descriptors import Budget
from tools_sandbox.service.dispatch import Call, ToolService

async def main():
    service = ToolService(SandboxConfig(), Budget(100, 75))
    await service.start()
    print((await service.call(Call("python", {"code": "6 * 7"}, "", 10.0))).text)
    await service.stop()
    service.close()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The service's own distribution, installed into a folder."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for path in (*PACKAGE.rglob("*.py"), PACKAGE / "pyproject.toml"):  # building leaves files beside the sources
        copy = source / path.relative_to(PACKAGE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", target]
    subprocess.run([*pip, source], check=True)
    return target


def test_the_service_runs_without_the_trainer(installed: Path) -> None:
    assert {path.relative_to(installed / "tools_sandbox") for path in (installed / "tools_sandbox").rglob("*.py")} == {
        path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(installed)],
        cwd=installed,
        env={"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "42"), done.stderr


def test_everything_it_imports_is_among_its_requirements() -> None:
    required = {canonicalize_name(Requirement(each).name) for each in PROJECT["project"]["dependencies"]}
    modules = metadata.packages_distributions()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in {each.partition(".")[0] for each in names} - {"tools_sandbox", ""} - sys.stdlib_module_names:
                offered_by = {canonicalize_name(each) for each in modules.get(name, [])}
                assert offered_by & required, f"{path.name} imports {name}, which nothing installs"
