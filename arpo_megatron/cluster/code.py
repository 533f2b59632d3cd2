"""What runs is what was submitted: commit, uncommitted changes and new files, as one git tree that is packed."""

import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from arpo_megatron.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Code:
    """A state of the working tree.

    Attributes:
        commit: HEAD.
        tree: git object that holds every file as it is now, those that git ignores aside.
        diff: from the commit to the tree; empty where nothing was changed.
    """

    commit: str
    tree: str
    diff: str


def snapshot(root: Path = ROOT) -> Code:
    """The code in the working tree; neither the tree nor git's index is touched.

    Raises:
        UserError: `root` is not a git clone.
    """
    if not (root / ".git").exists():
        raise UserError(f"{root} is no git clone: submit from one, so that it is known what ran")
    with tempfile.TemporaryDirectory() as folder:
        index = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
        commit = _git(root, "rev-parse", "HEAD").strip()
        _git(root, "read-tree", commit, env=index)
        _git(root, "add", "--all", env=index)
        tree = _git(root, "write-tree", env=index).strip()
    return Code(commit, tree, _git(root, "diff", "--binary", commit, tree))


def _git(root: Path, *words: str, env: Mapping[str, str] | None = None) -> str:
    try:
        done = subprocess.run(
            ["git", *words], cwd=root, env={**os.environ, **(env or {})}, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise UserError("git is not installed, and the submitted code is packed with it") from None
    if done.returncode:
        raise UserError(f"git {words[0]} in {root}: {' '.join(done.stderr.split())}")
    return done.stdout
