"""Section `sandbox`: the tool service's file, limits, isolation and sessions."""

import re
from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from arpo_megatron.config.fields import STRICT, Positive, PositiveFloat


@dataclass(frozen=True, config=STRICT)
class SandboxConfig:
    """The tool service: limits, isolation and sessions of python calls, and the size of search results."""

    urls: tuple[str, ...] = ()
    """Tool services that run already, on CPU-only nodes for example, as http://HOST:PORT; the job then starts none. The
    environment variable TOOLS_SANDBOX_TOKEN has their token. Tools, limits and isolation are those of their own files;
    of the other keys of this section only `sessions` has an effect. A resumed run may use other services."""
    replicas: Positive = 1
    """Tool services of a job, on one node after the other. All calls of a task go to one of them, so its trajectories
    share answers; another one takes them while it gives no answer."""
    file: Path | None = None
    """YAML file of the tool service with more tools and settings (docs/guides/tools.md), merged with the keys below."""
    python_timeout_s: PositiveFloat = 10.0
    """Wall time of one python call in seconds."""
    python_memory_mib: Positive = 512
    """Address space of one python call in MiB."""
    python_total_memory_mib: Positive | None = None
    """Memory of all python calls of a tool service in MiB: only as many run at a time as fit with `python_memory_mib`
    each. None: 16 calls, or two per CPU if those are more."""
    search_results: Positive = 3
    """Number of pages that a search returns."""
    preload: tuple[str, ...] = ()
    """Modules imported once, so that every python call finds them loaded (numpy, sympy, ...)."""
    isolation: Literal["full", "contained", "process", "limits"] = "contained"
    """Weakest accepted isolation of python calls from this machine; see docs/guides/security.md."""
    sessions: bool = False
    """Python calls of a trajectory keep the names and files of the previous call; a fork copies them."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if wrong := [url for url in self.urls if not re.fullmatch(r"https?://[^/\s]+:\d+", url)]:
            raise ValueError(f"sandbox.urls: {wrong[0]!r} does not have the form http://HOST:PORT")
        if self.urls and (self.file is not None or self.replicas > 1):
            key = "replicas" if self.file is None else "file"
            raise ValueError(f"sandbox.{key} is for services that the job starts: remove it, or sandbox.urls")
        return self
