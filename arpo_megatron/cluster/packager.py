"""The packager that hands the submitted code to nemo-run."""

from dataclasses import dataclass
from pathlib import Path

from nemo_run.core.packaging.base import Packager

from arpo_megatron.cluster.code_snapshot import git


@dataclass(kw_only=True)
class TreePackager(Packager):  # type: ignore[misc]  # nemo-run has no types
    """Packs one git tree of a clone. Nothing is written in the clone.

    nemo-run's own `GitArchivePackager` extracts the archive into the clone first, where the snapshot of another
    submission finds those files.
    """

    clone: str
    """Root of the clone."""
    tree: str
    """Git object of the tree."""

    def package(self, path: Path, job_dir: str, name: str) -> str:
        """Write the archive `name`.tar.gz into `job_dir` and return its path. Raises UserError if git fails."""
        archive = Path(job_dir) / f"{name}.tar.gz"
        git(Path(self.clone), "archive", "--format=tar.gz", f"--output={archive}", self.tree)
        return str(archive)
