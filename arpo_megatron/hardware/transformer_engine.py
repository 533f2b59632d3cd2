"""The form of Transformer Engine that this process uses: with its extension, emulated, or none.

TE is two packages: its Python (`transformer-engine`, small, for any machine) and its extension for CUDA
(`transformer-engine-torch`, compiled). Megatron decides on import whether TE exists, so `prepare` comes before that.
"""

import os
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


def check_emulation() -> None:
    """Raise UserError, with the command that installs it, unless TE's Python has the version that can be emulated."""
    try:
        found = f"transformer-engine {version('transformer-engine')} is installed"
    except PackageNotFoundError:
        found = "transformer-engine is not installed"
    if found != f"transformer-engine {CHECKED_TRANSFORMER_ENGINE} is installed":
        raise UserError(
            f"FP8 on a CPU needs the Python of transformer-engine {CHECKED_TRANSFORMER_ENGINE}, but {found}: "
            "pip install 'arpo-megatron[emulation]'"
        )
