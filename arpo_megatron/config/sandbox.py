"""The tool service."""

from typing import Literal

from pydantic.dataclasses import dataclass

from arpo_megatron.config.fields import STRICT, Positive, PositiveFloat


@dataclass(frozen=True, config=STRICT)
class SandboxConfig:
    """The tool service."""

    python_timeout_s: PositiveFloat = 10.0
    """Wall time of one python call in seconds."""
    python_memory_mb: Positive = 512
    """Address space of one python call in MiB."""
    search_results: Positive = 3
    """Pages a search answers with."""
    preload: tuple[str, ...] = ()
    """Modules imported once, so that every python call finds them warm (numpy, sympy, ...)."""
    isolation: Literal["full", "contained", "process", "limits"] = "contained"
    """Weakest separation of python calls from this machine to put up with; see docs/security.md."""
    sessions: bool = False
    """Python calls of a trajectory go on with the names and files of the call before; a fork copies them."""
