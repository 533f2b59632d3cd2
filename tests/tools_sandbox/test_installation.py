"""The service as its own package: it installs and runs without the trainer, and offers tools of other packages."""

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

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tools_sandbox"
EXAMPLE = ROOT / "examples" / "count_words_tool"
PROJECT = tomllib.loads((PACKAGE / "pyproject.toml").read_text())
# Imports the installed service while the trainer's packages cannot be imported, and calls two tools.
PROGRAM = """
import asyncio, sys
for name in ("torch", "transformers", "megatron", "sglang", "arpo_megatron"):
    sys.modules[name] = None
import tools_sandbox
assert tools_sandbox.__file__.startswith(sys.argv[1]), tools_sandbox.__file__
import tools_sandbox.client, tools_sandbox.service.server, tools_sandbox.mcp.tools, tools_sandbox.bench.search
import tools_sandbox.search.tool, tools_sandbox.browse.tool, tools_sandbox.browse.page
from tools_sandbox.config import PluginConfig, PythonConfig, ToolServiceConfig
from tools_sandbox.service.descriptors import Budget
from tools_sandbox.service.dispatch import Call, ToolService

async def main():
    plugins = (PluginConfig("count_words", {"shortest": 3}),)
    config = ToolServiceConfig(python=PythonConfig(preload=()), plugins=plugins, workers=1)
    service = ToolService(config, Budget(100, 75))
    await service.start()
    async def call(tool, **arguments):
        return await service.call(Call(tool, arguments, "", 10.0))
    print((await call("python", code="6 * 7")).text)
    for _ in range(2):
        answer = await call("count_words", text="one or two or three")
        print(answer.text, answer.cached)
    print((await call("count_words", txt="one")).text)
    print(service.tools["count_words"].schema()["properties"]["text"]["type"])
    await service.stop()
    service.close()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the service's distribution and the example tool into a folder."""
    sources, target = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("installed")
    for project in (PACKAGE, EXAMPLE):  # copies, since building leaves files next to the sources
        for path in (*project.rglob("*.py"), project / "pyproject.toml"):
            copy = sources / project.name / path.relative_to(project)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-compile", "--target", target]
    projects = [sources / PACKAGE.name, sources / EXAMPLE.name]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *projects], check=True)
    return target


def test_installed_service_runs_without_trainer_and_offers_example_tool(installed: Path) -> None:
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
    assert done.returncode == 0, done.stderr
    python, counted, cached, wrong, kind = done.stdout.splitlines()
    assert (python, counted, cached, kind) == ("42", "3 False", "3 True", "string")
    assert '"text"' in wrong


def test_imports_are_among_requirements() -> None:
    required = {canonicalize_name(Requirement(each).name) for each in PROJECT["project"]["dependencies"]}
    modules = metadata.packages_distributions()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in {each.partition(".")[0] for each in names} - {"tools_sandbox", ""} - sys.stdlib_module_names:
                distributions = {canonicalize_name(each) for each in modules.get(name, [])}
                assert distributions & required, f"{path.name} imports {name}, which no requirement installs"
