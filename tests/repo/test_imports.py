"""Imports: packages keep to their docstrings, the command line needs no torch, `pip install .` alone is enough."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_TORCH = """
import sys
import arpo_megatron.cli.main
from arpo_megatron.jobs import resolve
for name in resolve.recipe_names():
    resolve.resolve(name, overrides=["seed=3"])
print(*sorted({"torch", "transformers", "megatron", "sglang"} & set(sys.modules)))
"""
WITHOUT_EXTRAS = """
import importlib, pkgutil, sys
extras = "sglang sglang_router sgl_kernel transformer_engine triton zmq nemo_run leptonai paramiko matplotlib pytest"
for name in extras.split():
    sys.modules[name] = None  # importing it raises ImportError
import arpo_megatron, tools_sandbox
for package in (arpo_megatron, tools_sandbox):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ImportError:
                print(module.name)
"""
WITHOUT_TORCH_AT_MODULE_LEVEL = """
import importlib, pkgutil, sys
for name in ("torch", "megatron", "sglang"):
    sys.modules[name] = None  # importing it raises ImportError
for package in "algorithms evaluation jobs launch packing plan rewards rollout serving tasks view".split():
    package = importlib.import_module(f"arpo_megatron.{package}")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        try:
            importlib.import_module(module.name)
        except ImportError:
            print(module.name)
"""
NEEDS_AN_EXTRA = {
    "arpo_megatron.actor.head_kernel",
    "arpo_megatron.cli.nemo",
    "arpo_megatron.cluster.packager",
    "arpo_megatron.engine.server.entropy_kernel",
    "arpo_megatron.engine.server.kernels",
}
"""Loaded by nemo-run, by `arpo submit`, by trainer and engine on a GPU, and by `arpo bench kernels`."""
OTHER_INTERPRETER = {"arpo_megatron.tasks.environments.verifiers.worker"}
"""Runs where `verifiers` is installed; no module of ours imports it."""


def run(program: str) -> set[str]:
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_command_line_imports_no_torch() -> None:
    assert run(WITHOUT_TORCH) == set()


def test_lower_packages_import_no_torch() -> None:
    """Packages of the command line, the rollout process and servers import torch inside functions only."""
    assert run(WITHOUT_TORCH_AT_MODULE_LEVEL) == OTHER_INTERPRETER


def test_modules_import_without_extras() -> None:
    assert run(WITHOUT_EXTRAS) <= NEEDS_AN_EXTRA | OTHER_INTERPRETER


LISTED_BY_THE_LAYERS = ("layer", "below", "every package", "what `studies` may")
"""Words of an import rule that names no packages; the contract of the layers checks it."""
OTHER_RULES = {"arpo_megatron", "arpo_megatron.recipes"}
"""The root and the recipes have contracts of their own."""


def test_packages_import_what_their_docstrings_allow() -> None:
    documented = {
        ".".join(path.relative_to(ROOT).parent.parts): ast.get_docstring(ast.parse(path.read_text())) or ""
        for root in ("arpo_megatron", "tools_sandbox")
        for path in (ROOT / root).rglob("__init__.py")
        if "recipes" not in path.parts
    }
    graph = grimp.build_graph("arpo_megatron", "tools_sandbox")
    wrong = set[str]()
    for module in graph.modules:
        package = module if module in documented else module.rpartition(".")[0]
        rule = documented.get(package, "").partition("ay import")[2]
        if package in OTHER_RULES or any(words in rule for words in LISTED_BY_THE_LAYERS):
            continue
        distribution = package.partition(".")[0]
        allowed = [f"{name}." for name in (package, *re.findall(r"`([\w.]+)`", rule))]
        for imported in graph.find_modules_directly_imported_by(module):
            names = (f"{imported}.", f"{imported.removeprefix(f'{distribution}.')}.")
            if not any(name.startswith(tuple(allowed)) for name in names):
                wrong.add(f"{package} imports {imported}, which its docstring does not allow")
    assert not wrong, "\n".join(sorted(wrong))
