"""docs/internals/versions.md has a row for each function of megatron-core that the code uses, public or not."""

import ast
import importlib.metadata
import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("library_calls", ROOT / "scripts" / "library_calls.py")
assert SPEC is not None and SPEC.loader is not None
library_calls = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(library_calls)
USED = library_calls.uses("megatron")


def private_calls() -> dict[str, set[str]]:
    """Return the methods that are not public and are called on others' objects, in files that import Megatron."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "arpo_megatron").rglob("*.py")):
        tree = ast.parse(path.read_text())
        if not any(name.startswith("megatron.") for name in library_calls.imported(tree)):
            continue
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Attribute(value=owner, attr=name)) if re.match(r"_[a-z]", name) and ast.unparse(
                    owner
                ) not in ("self", "cls"):
                    found.setdefault(name, set()).add(path.name)
    return found


def test_private_methods_that_are_called_on_objects_are_in_the_table_of_methods() -> None:
    calls = private_calls()
    assert "_make_forward_pre_hook" in calls
    assert not {name: files for name, files in calls.items() if name not in {path.split(".")[-1] for _, path in USED}}


def test_the_page_has_file_and_line_of_each_function_in_the_installed_version() -> None:
    page = (ROOT / "docs/internals/versions.md").read_text()
    rows = dict(re.findall(r"^\| `(core\.[\w.]+)` \|[^|]+\| ([^|]+) \|", page, re.MULTILINE))
    package = importlib.metadata.distribution("megatron-core").locate_file("")
    places = {}
    for module, path in USED:
        place = library_calls.locate(Path(str(package)), module, path)
        assert place is not None, f"{module}.{path} is not in the installed megatron-core"
        file, _, line = place[0].removeprefix("megatron/core/").removesuffix("/__init__.py").partition(":")
        places[f"{module}.{path}".removeprefix("megatron.")] = file.removesuffix(".py") + (f":{line}" if line else "")
    assert rows == places
