"""The submitted code: commit, uncommitted changes and new files, packed as one git tree."""

import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from arpo_megatron.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
SECRET_FILES = (".env", ".env.*", "*.env", ".netrc", "*.pem", "*.key", "id_rsa", "id_ecdsa", "id_ed25519")
"""Names of files that hold passwords and keys. Everyone who can read the run directory can read the packed code."""


@dataclass(frozen=True, slots=True)
class Code:
    """A state of the working tree."""

    commit: str
    """HEAD."""
    tree: str
    """Git object with the current content of every file that git does not ignore."""
    diff: bytes
    """Output of git diff from the commit to the tree, in the files' own encodings; empty if nothing was changed."""


def snapshot(root: Path = ROOT) -> Code:
    """Record the code in the working tree. Neither the tree nor git's index is changed.

    Raises:
        UserError: `root` is not a git clone, or a new file looks as if it held secrets.
    """
    if not (root / ".git").exists():
        raise UserError(f"{root} is not a git clone: submit from a clone, so that the run records its code")
    with tempfile.TemporaryDirectory() as folder:
        index = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
        commit = git(root, "rev-parse", "HEAD").decode().strip()
        git(root, "read-tree", commit, env=index)
        git(root, "add", "--all", env=index)
        tree = git(root, "write-tree", env=index).decode().strip()
    # Without renames, because an example that was moved and filled in is a new file too.
    for name in git(root, "diff", "--name-only", "--no-renames", "--diff-filter=A", "-z", commit, tree).split(b"\0"):
        path = Path(os.fsdecode(name))
        if any(fnmatch(path.name, pattern) for pattern in SECRET_FILES):
            raise UserError(
                f"{root / path} is new, may hold secrets, and would be packed with the job: add it to .gitignore or "
                ".git/info/exclude, or commit it"
            )
    return Code(commit, tree, git(root, "diff", "--binary", commit, tree))


def git(root: Path, *arguments: str, env: Mapping[str, str] | None = None, stdin: bytes | None = None) -> bytes:
    """Return the output of a git command in the clone at `root`. Raises UserError if it fails."""
    environment = {**os.environ, **(env or {})}
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, env=environment, input=stdin, capture_output=True, check=False
        )
    except FileNotFoundError:
        raise UserError("git is not installed; it is needed to pack the submitted code") from None
    if done.returncode:
        raise UserError(f"git {arguments[0]} in {root}: {' '.join(done.stderr.decode(errors='replace').split())}")
    return done.stdout
