"""Find each function that the code imports from a library, patches or hooks in unpacked versions of it, and its drift.

    pip download --no-deps megatron-core==0.16.1 && unzip megatron_core-*.whl -d old     (and the other version in new)
    python scripts/library_calls.py megatron old new

prints a Markdown table: the name, what uses it, its file and line in each version, and whether it is gone, takes other
arguments, or has another body. Nothing is imported from the versions.
"""

import ast
import hashlib
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
_TARGET = re.compile(r"^(?P<module>[\w.]+):(?P<path>[\w.]+)$")
_DEPTH = 6
"""Largest number of re-exports that are followed."""
_HOOK = re.compile(r'"(sglang\.srt[\w.]+)\.(\w+\.\w+)"')
METHODS = {
    "megatron": (
        "megatron.core.dist_checkpointing.strategies.torch:_replace_sharded_keys_with_state_dict_keys",
        "megatron.core.dist_checkpointing.strategies.torch:_replace_state_dict_keys_with_sharded_keys",
        "megatron.core.dist_checkpointing.strategies.torch:_restore_dict_types",
        "megatron.core.dist_checkpointing.strategies.torch:_unwrap_pyt_sharded_tensor",
        "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel._make_forward_pre_hook",
        "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.finish_param_sync",
        "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_grad_sync",
        "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_param_sync",
        "megatron.core.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding._apply_scaling",
        "megatron.core.optimizer.cpu_offloading.hybrid_optimizer:"
        "HybridDeviceOptimizer._sync_hdo_state_to_sub_optimizers",
        "megatron.core.optimizer.cpu_offloading.hybrid_optimizer:"
        "HybridDeviceOptimizer._sync_sub_optimizers_state_to_hdo",
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._get_main_param_and_optimizer_states",
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._get_model_param_range_map",
        "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate",
        "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate_shapes",
    )
}
"""Functions that are reached through an object or a module's alias: all that are not public, and methods that our code
replaces or calls on objects of classes that are not public."""


def uses(library: str) -> dict[tuple[str, str], set[str]]:
    """Return (module, path) of each name of the library that our code uses, with the files that use it."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for path in sorted((ROOT / "arpo_megatron").rglob("*.py")):
        text = path.read_text()
        where = path.relative_to(ROOT / "arpo_megatron").as_posix()
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == library:
                for alias in node.names:
                    found[node.module or "", alias.name].add(where)
        if any(name.startswith(f"{library}.") for name in imported(tree)):
            reached = _reached(tree)
            for target in METHODS.get(library, ()):
                module, _, name = target.partition(":")
                if name.rpartition(".")[2] in reached:
                    found[module, name].add(where)
        strings = {
            target.id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name) and isinstance(node.value.value, str)
        }
        for node in ast.walk(tree):
            text_of = _text(node, strings)
            if (
                not text_of.endswith(".")
                and (match := _TARGET.match(text_of))
                and match["module"].split(".")[0] == library
            ):
                found[match["module"], match["path"]].add(f"{where} (patched)")
        if library == "sglang":
            for module, name in _HOOK.findall(text):
                found[module, name].add(f"{where} (hooked)")
    return found


def imported(tree: ast.AST) -> set[str]:
    """Return the modules that a file imports."""
    nodes = list(ast.walk(tree))
    return {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module} | {
        alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
    }


def _reached(tree: ast.AST) -> set[str]:
    """Return the names of attributes of objects and of methods that classes define, and so may override."""
    nodes = list(ast.walk(tree))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)} | {
        node.name for node in nodes if isinstance(node, ast.FunctionDef)
    }


def _text(node: ast.AST, strings: dict[str, str]) -> str:
    """Return the string of a constant, or of the sum of a named prefix and a constant; "" for others."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.left, ast.Name) and isinstance(node.right, ast.Constant):
        return strings.get(node.left.id, "") + str(node.right.value)
    return ""


def locate(root: Path, module: str, path: str, seen: int = 0) -> tuple[str, ast.AST] | None:
    """Return file:line and the definition of a name, following re-exports; None if it is gone."""
    base = root / Path(*module.split("."))
    first, *rest = path.split(".")
    if (inner := _file(base / first)) is not None and seen < _DEPTH:
        if rest:
            return locate(root, f"{module}.{first}", ".".join(rest), seen + 1)
        return str(inner.relative_to(root)), ast.Pass()
    file = _file(base)
    if file is None or seen > _DEPTH:
        return None
    body = list(ast.walk(ast.parse(file.read_text())))
    if (found := _defined(body, path)) is not None:
        return f"{file.relative_to(root)}:{found.lineno}", found  # type: ignore[attr-defined]  # it has a place
    for node in body:
        if isinstance(node, ast.ImportFrom) and any((a.asname or a.name) in (first, "*") for a in node.names):
            name = next((a.name for a in node.names if (a.asname or a.name) == first), first)
            package = module if file.name == "__init__.py" else module.rpartition(".")[0]
            parts = package.split(".")[: len(package.split(".")) - max(0, node.level - 1)] if node.level else []
            source = ".".join([*parts, *([node.module] if node.module else [])])
            if there := locate(root, source, ".".join([name, *rest]), seen + 1):
                return there
    return None


def _file(base: Path) -> Path | None:
    return next((file for file in (base.with_suffix(".py"), base / "__init__.py") if file.exists()), None)


def _defined(body: Sequence[ast.AST], path: str) -> ast.AST | None:
    """Return the definition of a dotted name in a module; None if the module does not define it."""
    first, *rest = path.split(".")
    found = next((node for node in body if first in _names(node)), None)
    for name in rest:
        if found is not None:
            found = next((node for node in ast.walk(found) if name in _names(node)), None)
    return found


def _names(node: ast.AST) -> set[str]:
    """Return the names that a definition or an assignment gives a value."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    own = {node.name} if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else set[str]()
    return own | {t.id for t in targets if isinstance(t, ast.Name)}


def drift(old: ast.AST, new: ast.AST) -> str:
    """Say how a definition has changed."""
    arguments = [ast.dump(n.args) if isinstance(n, ast.FunctionDef) else "" for n in (old, new)]
    if arguments[0] != arguments[1]:
        return "other arguments"
    bodies = [hashlib.sha1(ast.dump(n).encode(), usedforsecurity=False).digest() for n in (old, new)]
    return "same" if bodies[0] == bodies[1] else "changed"


def main() -> None:
    """Print a Markdown table of the library's functions and how they changed."""
    library, *roots = sys.argv[1:]
    trees = [Path(root) for root in roots]
    print(f"| name | used by | {' | '.join(tree.name for tree in trees)} | drift |")
    print("| --- " * (len(trees) + 3) + "|")
    for (module, path), where in sorted(uses(library).items()):
        places = [locate(tree, module, path) for tree in trees]
        there = [place[1] for place in places if place is not None]
        change = "gone" if None in places else drift(there[0], there[-1])
        cells = [place[0] if place else "-" for place in places]
        print(f"| `{module}.{path}` | {', '.join(sorted(where))} | {' | '.join(cells)} | {change} |")


if __name__ == "__main__":
    main()
