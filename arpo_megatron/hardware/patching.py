"""Patches of installed libraries: what is changed, and why.

There are three kinds:

- `Replace` gives an attribute another function, where the original needs CUDA, NCCL or a GPU's kernels.
- `PresetAttribute` sets an attribute that a CUDA call would set later.
- `Retarget` exchanges string literals ("cuda", "torch.cuda.FloatTensor") and names of attributes (`.is_cuda`) in the
  code object of one function, in place, so modules that imported the function by name see the change.

A target that does not exist is an error: the table does not fit the installed version.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from types import CodeType, FunctionType
from typing import Any

from arpo_megatron.errors import UserError


@dataclass(frozen=True, slots=True)
class Replace:
    """Patch: `module:attribute` becomes `function`, because of `reason`."""

    target: str
    function: Callable[..., Any]
    reason: str

    def apply(self) -> None:
        """Set the attribute; UserError if it does not exist."""
        *path, name = _split(self.target)
        owner = _resolve(self.target, path)
        if not callable(getattr(owner, name, None)):
            raise _drifted(self.target, "no such function")
        setattr(owner, name, self.function)


@dataclass(frozen=True, slots=True)
class PresetAttribute:
    """Patch: `module:attribute`, None until its first use, becomes `value`, because of `reason`."""

    target: str
    value: object
    reason: str

    def apply(self) -> None:
        """Set the attribute; UserError if it does not exist or already has a value."""
        *path, name = _split(self.target)
        owner = _resolve(self.target, path)
        if getattr(owner, name, self) is not None:
            raise _drifted(self.target, "not an attribute that waits for a value")
        setattr(owner, name, self.value)


@dataclass(frozen=True, slots=True)
class Retarget:
    """Patch: string literals and names of attributes in `module:function` are exchanged, because of `reason`."""

    target: str
    literals: Mapping[str, str]
    reason: str
    names: Mapping[str, str] = field(default_factory=dict)

    def apply(self) -> None:
        """Exchange them; UserError if the function, a literal or a name does not exist."""
        found = inspect.unwrap(_resolve(self.target, _split(self.target)))
        function = getattr(found, "__func__", found)
        if not isinstance(function, FunctionType):
            raise _drifted(self.target, "no such function")
        seen: set[str] = set()
        code = _exchange(function.__code__, self.literals, self.names, seen)
        if missing := (self.literals.keys() | self.names.keys()) - seen:
            raise _drifted(self.target, f"{min(missing)!r} not found")
        function.__code__ = code


Patch = Replace | PresetAttribute | Retarget


def apply(patches: Sequence[Patch]) -> None:
    """Apply a table of patches in order."""
    for patch in patches:
        patch.apply()


def check_version(package: str, *checked: str) -> str:
    """Return the installed version of a package. Raises UserError unless there is a checked table of patches for it.

    Args:
        package: name of the distribution.
        checked: its versions with a table; the first one is pinned.
    """
    try:
        found = version(package)
    except PackageNotFoundError:
        raise UserError(f"{package} is not installed: pip install --no-deps {package}=={checked[0]}") from None
    if found not in checked:
        raise UserError(
            f"{package} {found} is not checked on a CPU (only {' and '.join(checked)}): "
            f"pip install --no-deps {package}=={checked[0]}"
        )
    return found


def _split(target: str) -> list[str]:
    return target.partition(":")[2].split(".")


def _resolve(target: str, path: list[str]) -> Any:
    found: Any = importlib.import_module(target.partition(":")[0])
    for name in path:
        found = getattr(found, name, None)
    return found


def _drifted(target: str, why: str) -> UserError:
    return UserError(f"CPU platform layer: {target}: {why}; install the pinned versions (make setup)")


def _exchange(value: Any, literals: Mapping[str, str], names: Mapping[str, str], seen: set[str]) -> Any:
    """Exchange literals in a value, also in nested tuples and code objects; `seen` collects what is found."""
    if isinstance(value, str) and value in literals:
        seen.add(value)
        return literals[value]
    if isinstance(value, tuple):
        return tuple(_exchange(item, literals, names, seen) for item in value)
    if isinstance(value, CodeType):
        seen |= names.keys() & set(value.co_names)
        return value.replace(
            co_consts=tuple(_exchange(item, literals, names, seen) for item in value.co_consts),
            co_names=tuple(names.get(name, name) for name in value.co_names),
        )
    return value
