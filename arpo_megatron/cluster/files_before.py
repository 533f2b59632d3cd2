"""The files of a run before a submission, which restores them if Slurm refuses the job."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from arpo_megatron.jobs.run_directory import RunDirectory


@dataclass(frozen=True, slots=True)
class FilesBefore:
    """The files and folders of a run before a submission wrote to it."""

    files: Mapping[Path, bytes | None]
    """Content of each file that is written; None if it did not exist."""
    folders: Sequence[Path]
    """Folders that did not exist."""

    @classmethod
    def read(cls, run: RunDirectory, *more: Path) -> "FilesBefore":
        """Remember the files of the run that a submission writes, and `more`."""
        files = [run.config, run.cluster, *more]
        files += [file.with_name(file.name + ".tmp") for file in files]
        return cls(
            {file: file.read_bytes() if file.exists() else None for file in files},
            [folder for folder in (run.submissions, run.logs) if not folder.exists()],
        )

    def restore(self) -> None:
        """Restore the files. Of a new run only its inputs remain, so that the next one gets its name."""
        for file, text in self.files.items():
            if text is None:
                file.unlink(missing_ok=True)
            elif not file.exists() or file.read_bytes() != text:
                file.write_bytes(text)
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)
