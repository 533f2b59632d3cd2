"""Section `data`: the source of training and held-out tasks."""

from collections.abc import Callable
from dataclasses import field, replace
from pathlib import Path
from typing import Literal, Self

from pydantic.dataclasses import dataclass

from arpo_megatron.config.fields import (
    STRICT,
    Positive,
    PositiveFloat,
)


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """Questions to train and to evaluate on: generated from the seed, or read from files."""

    kind: Literal["generated", "trails", "long_trails", "early_trails", "files"] = "generated"
    """`generated`: calculator and look-up tasks generated from the seed. `trails`: generated tasks with a decision
    after every tool result (`tasks/synthetic/trails.py`); `long_trails`: after the last of five pages only;
    `early_trails`: before the first result only. `files`: questions of `path`."""
    path: Path | dict[str, PositiveFloat] | None = field(default=None, hash=False)
    """Training questions (`files`): a Parquet, JSON lines, JSON or CSV file, or the directory of a Hugging Face
    dataset. A table of several such paths with weights is a mixture, e.g. {math.parquet: 0.7, qa.jsonl: 0.3}."""
    reader: str = "auto"
    """Reader of `path`: `auto`, the name of an installed one, or FILE.py:CLASS (docs/guides/extending.md)."""
    split: str = "train"
    """Split of a dataset directory."""
    columns: dict[Literal["question", "answer", "kind", "hint"], str] = field(default_factory=dict, hash=False)
    """Columns of the file that hold question (text or messages), answer, kind (mathematics if it names math, gsm8k or
    aime) and hint (a worked solution, for `algorithm.selector=hinted`), e.g. {question: task, answer: result.value};
    usual names are found without it."""
    verifier: Literal["math", "qa"] | None = None
    """How answers are verified without a column of kinds: as mathematics or as words. None: a number, a tuple or LaTeX
    is mathematics."""
    search_cache: Path | None = None
    """JSON file of stored searches that serves as the search index (`files`); None: search_cache.json in the
    directory of `path`, if it exists."""
    max_prompt_tokens: Positive = 1536
    """A row with a longer prompt is a bad row: logged, counted and skipped."""
    tasks: Positive = 2000
    """Number of training tasks to generate (all kinds but `files`)."""
    held_out: Positive = 200
    """Number of tasks kept for evaluation."""

    @property
    def is_generated(self) -> bool:
        """Whether the tasks are generated from the seed."""
        return self.kind != "files"

    @property
    def sources(self) -> tuple[tuple[Path, float], ...]:
        """Paths of the question files with their weights; empty without `path`."""
        if self.path is None:
            return ()
        if isinstance(self.path, Path):
            return ((self.path, 1.0),)
        return tuple((Path(path), weight) for path, weight in self.path.items())

    def with_paths(self, change: Callable[[Path], Path]) -> Self:
        """Return the section with every path of the question files changed."""
        path = self.path
        if isinstance(path, dict):
            path = {str(change(Path(each))): weight for each, weight in path.items()}
        return replace(self, path=change(path) if isinstance(path, Path) else path)
