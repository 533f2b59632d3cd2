"""Section `data`: the source of training and held-out tasks."""

from pathlib import Path
from typing import Literal

from pydantic.dataclasses import dataclass

from arpo_megatron.config.fields import (
    STRICT,
    Positive,
)


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """Questions to train and to evaluate on: generated from the seed, or read from released files."""

    kind: Literal["generated", "trails", "arpo_parquet"] = "generated"
    """`generated`: calculator and look-up tasks generated from the seed. `trails`: generated tasks with a decision
    after every tool result (`tasks/synthetic/trails.py`). `arpo_parquet`: the released ARPO files."""
    path: Path | None = None
    """Parquet file of training questions (`arpo_parquet`)."""
    search_cache: Path | None = None
    """JSON file of stored searches that serves as the search index (`arpo_parquet`); None: search_cache.json in the
    directory of `path`, if it exists."""
    max_prompt_tokens: Positive = 1536
    """A row with a longer prompt is a bad row: logged, counted and skipped."""
    tasks: Positive = 2000
    """Number of training tasks to generate (`generated`, `trails`)."""
    held_out: Positive = 200
    """Number of tasks kept for evaluation."""

    @property
    def is_generated(self) -> bool:
        """Whether the tasks are generated from the seed."""
        return self.kind != "arpo_parquet"
