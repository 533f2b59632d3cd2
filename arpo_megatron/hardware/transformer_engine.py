"""The form of Transformer Engine that this process uses: with its extension, emulated, or none.

TE is two packages: its Python (`transformer-engine`, small, for any machine) and its extension for CUDA
(`transformer-engine-torch`, compiled). Megatron decides on import whether TE exists, so `prepare` comes before that.
"""

import os
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from arpo_megatron.errors import UserError

CHECKED_TRANSFORMER_ENGINE = "2.11.0"
"""The version whose Python the emulation replaces the extension of, and whose private functions the trainer calls."""
EMULATION_VARIABLE = "ARPO_TE_EMULATION"
"""`1` in the environment of ranks that run TE's Python on a CPU (see te_emulation)."""
INSTALL_EXTENSION = "pip install --no-build-isolation 'arpo-megatron[gpu]'"
"""The command that builds the extension against the installed torch; an isolated build takes the newest torch."""

IMPORT_LIMIT_S = 300.0
"""Limit of the import that checks the extension; on a slow file system it takes minutes."""


def prepare() -> None:
    """Make TE importable as this process needs it: with its extension, emulated, or not at all.

    Without an extension the Python alone raises RuntimeError on import, which Megatron does not expect.

    Raises:
        UserError: TE is to be emulated and is not installed, or in another version.
    """
    if is_emulated():
        from arpo_megatron.hardware.te_emulation import patches

        patches.install()
    elif not extension_installed():
        sys.modules.setdefault("transformer_engine", None)  # type: ignore[arg-type]  # importing it: ImportError


def is_emulated() -> bool:
    """Return whether this process runs TE's Python over the emulated extension."""
    return os.environ.get(EMULATION_VARIABLE) == "1"


@cache
def extension_installed() -> bool:
    """Return whether TE's extension for CUDA is installed. Passes over packs ask this often."""
    found = find_spec("transformer_engine")
    if found is None or found.origin is None:
        return False
    package = Path(found.origin).parent
    # The places where TE looks for it (transformer_engine/common/__init__.py).
    folders = (package.parent, package, package / "wheel_lib")
    return any(any(folder.glob("transformer_engine_torch*.so")) for folder in folders)


def extension_fault() -> str | None:
    """Return what a job on GPUs needs installed to use TE, with the command; None if TE's extension loads."""
    if not extension_installed():  # its Python alone serves the emulation
        return f"transformer-engine[pytorch] {CHECKED_TRANSFORMER_ENGINE} ({INSTALL_EXTENSION})"
    if (found := _installed_version()) != CHECKED_TRANSFORMER_ENGINE:
        return f"transformer-engine {CHECKED_TRANSFORMER_ENGINE} instead of {found} ({INSTALL_EXTENSION})"
    if error := _import_error():
        return f"a transformer-engine for this torch ({INSTALL_EXTENSION}): {error}"
    return None


@cache
def _import_error() -> str | None:
    """Import TE in a process of its own: an extension for another torch fails here, and may end the process."""
    command = [sys.executable, "-c", "import transformer_engine.pytorch"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"the import took more than {IMPORT_LIMIT_S:g} s"
    if not done.returncode:
        return None
    return (done.stderr.splitlines() or [f"the import ended with exit code {done.returncode}"])[-1][:200]


def _installed_version() -> str | None:
    """Return the version of TE's Python, without the suffix of a build."""
    try:
        return version("transformer-engine").split("+")[0]
    except PackageNotFoundError:
        return None


def check_emulation() -> None:
    """Raise UserError, with the command that installs it, unless TE's Python has the version that can be emulated."""
    if (found := _installed_version()) != CHECKED_TRANSFORMER_ENGINE:
        has = f"transformer-engine {found} is installed" if found else "transformer-engine is not installed"
        raise UserError(
            f"FP8 on a CPU needs the Python of transformer-engine {CHECKED_TRANSFORMER_ENGINE}, but {has}: "
            "pip install 'arpo-megatron[emulation]'"
        )
