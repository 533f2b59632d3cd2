"""The metrics of a run as TensorBoard event files (RUN_DIR/tensorboard)."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


class TensorBoardWriter:
    """Writes the numbers of each step. The steps that a resumed run repeats replace the old ones.

    Args:
        directory: where the event files are.
        prefix: set before all names.
    """

    def __init__(self, directory: Path, prefix: str = "") -> None:
        self._directory, self._prefix = directory, prefix
        self._writer: Any = None

    def log(self, row: Mapping[str, Any]) -> None:
        """Write the row of a step (`row["step"]`). A row that the disk refuses is lost: it must not end a run."""
        from tensorboardX import SummaryWriter

        step = int(row["step"])
        with suppress(OSError):
            if self._writer is None:
                self._writer = SummaryWriter(str(self._directory), purge_step=step, filename_suffix=f".{step}")
            for name, value in row.items():
                if isinstance(value, int | float) and name != "step":
                    self._writer.add_scalar(self._prefix + name, value, step)
            self._writer.flush()

    def close(self) -> None:
        with suppress(OSError):
            if self._writer is not None:
                self._writer.close()
