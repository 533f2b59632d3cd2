"""What runs is what was submitted: commit, uncommitted changes and new files, as one git tree that is packed."""

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
"""Names of files in which passwords and keys are kept. Who reads the run directory reads what is packed."""


@dataclass(frozen=True, slots=True)
class Code:
    """A state of the working tree.

    Attributes:
        commit: HEAD.
        tree: git object that holds every file as it is now, those that git ignores aside.
        diff: from the commit to the tree, as git prints it, in whatever encodings the files have; empty where nothing
            was changed.
    """

    commit: str
    tree: str
    diff: bytes


def snapshot(root: Path = ROOT) -> Code:
    """The code in the working tree; neither the tree nor git's index is touched.

    Raises:
        UserError: `root` is not a git clone, or there is a new file that looks like one for secrets.
    """
    if not (root / ".git").exists():
        raise UserError(f"{root} is no git clone: submit from one, so that it is known what ran")
    with tempfile.TemporaryDirectory() as folder:
        index = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
        commit = git(root, "rev-parse", "HEAD").decode().strip()
        git(root, "read-tree", commit, env=index)
        git(root, "add", "--all", env=index)
        tree = git(root, "write-tree", env=index).decode().strip()
    # Without renames: an example that was moved and filled in is a new file too.
    for name in git(root, "diff", "--name-only", "--no-renames", "--diff-filter=A", "-z", commit, tree).split(b"\0"):
        path = Path(os.fsdecode(name))
        if any(fnmatch(path.name, pattern) for pattern in SECRET_FILES):
            raise UserError(
                f"{root / path} is new and may hold secrets, and all new files are packed with the job: name it in "
                ".gitignore or .git/info/exclude, or commit it"
            )
    return Code(commit, tree, git(root, "diff", "--binary", commit, tree))


def git(root: Path, *words: str, env: Mapping[str, str] | None = None, given: bytes | None = None) -> bytes:
    """What git says in the clone at `root`, with more variables and something to read. Raises UserError."""
    try:
        done = subprocess.run(
            ["git", *words], cwd=root, env={**os.environ, **(env or {})}, input=given, capture_output=True, check=False
        )
    except FileNotFoundError:
        raise UserError("git is not installed, and the submitted code is packed with it") from None
    if done.returncode:
        raise UserError(f"git {words[0]} in {root}: {' '.join(done.stderr.decode(errors='replace').split())}")
    return done.stdout
