"""Where tasks come from."""

from pathlib import Path
from typing import Literal

from pydantic.dataclasses import dataclass

from arpo_megatron.config.fields import (
    STRICT,
    Positive,
)


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """Where tasks come from."""

    kind: Literal["generated", "trails", "arpo_parquet"] = "generated"
    """`generated`: calculator and look-up tasks made from the seed. `trails`: made likewise, with a decision behind
    every tool result (`tasks/synthetic/trails.py`). `arpo_parquet`: the released ARPO files."""
    path: Path | None = None
    """Parquet file of training questions (`arpo_parquet`)."""
    search_cache: Path | None = None
    """JSON file of stored searches that serves as the search index (`arpo_parquet`); None: search_cache.json beside
    `path` where there is one."""
    max_prompt_tokens: Positive = 1536
    """A longer prompt is a bad row: counted, named and skipped."""
    tasks: Positive = 2000
    """How many training tasks to make (`generated`, `trails`)."""
    held_out: Positive = 200
    """How many tasks are kept for evaluation only."""

    @property
    def is_generated(self) -> bool:
        """Whether the tasks are made from the seed."""
        return self.kind != "arpo_parquet"
