"""Section `sandbox`: the tool service's file, limits, isolation and sessions."""

from pathlib import Path
from typing import Literal

from pydantic.dataclasses import dataclass

from arpo_megatron.config.fields import STRICT, Positive, PositiveFloat


@dataclass(frozen=True, config=STRICT)
class SandboxConfig:
    """The tool service: limits, isolation and sessions of python calls, and the size of search results."""

    file: Path | None = None
    """YAML file of the tool service with more tools and settings (docs/guides/tools.md), merged with the keys below."""
    python_timeout_s: PositiveFloat = 10.0
    """Wall time of one python call in seconds."""
    python_memory_mib: Positive = 512
    """Address space of one python call in MiB."""
    search_results: Positive = 3
    """Number of pages that a search returns."""
    preload: tuple[str, ...] = ()
    """Modules imported once, so that every python call finds them loaded (numpy, sympy, ...)."""
    isolation: Literal["full", "contained", "process", "limits"] = "contained"
    """Weakest accepted isolation of python calls from this machine; see docs/guides/security.md."""
    sessions: bool = False
    """Python calls of a trajectory keep the names and files of the previous call; a fork copies them."""
