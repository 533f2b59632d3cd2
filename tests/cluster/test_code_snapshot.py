"""The code snapshot has the working tree, in any encoding, and no secrets."""

import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from arpo_megatron.cluster.code_snapshot import ROOT, snapshot
from arpo_megatron.cluster.packager import TreePackager
from arpo_megatron.errors import UserError


@pytest.fixture
def clone(tmp_path: Path) -> Callable[..., str]:
    """A git command for a repository at `tmp_path` with one commit."""

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout

    git("init", "-q")
    for name, text in {"kept.py": "1\n", "changed.py": "1\n", "gone.py": "1\n", ".gitignore": "out/\n"}.items():
        (tmp_path / name).write_text(text)
    git("add", ".")
    git("commit", "-qm", "first")
    return git


def test_snapshot_has_the_working_tree(tmp_path: Path, clone: Callable[..., str]) -> None:
    assert snapshot(tmp_path).diff == b""
    (tmp_path / "changed.py").write_text("2\n")
    (tmp_path / "gone.py").unlink()
    (tmp_path / "new.py").write_text("3\n")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "big").write_text("4\n")
    before = clone("status", "--short")
    code = snapshot(tmp_path)
    packed = clone("ls-tree", "-r", "--name-only", code.tree).split()
    assert packed == [".gitignore", "changed.py", "kept.py", "new.py"]
    assert clone("show", f"{code.tree}:changed.py") == "2\n"
    assert code.commit == clone("rev-parse", "HEAD").strip()
    assert all(line in code.diff for line in (b"+2", b"+3", b"deleted file mode"))
    assert clone("status", "--short") == before
    with pytest.raises(UserError, match="is not a git clone"):
        snapshot(tmp_path / "out")


def test_archive_has_the_snapshot_and_packing_writes_nothing_in_the_clone(
    tmp_path: Path, clone: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    (tmp_path / "new.py").write_text("3\n")
    folder = tmp_path_factory.mktemp("job")
    packager = TreePackager(clone=str(tmp_path), tree=snapshot(tmp_path).tree)
    before = tmp_path.stat().st_mtime_ns  # changes with each file that is created or removed
    with tarfile.open(packager.package(tmp_path, str(folder), "code")) as archive:
        assert archive.getnames() == [".gitignore", "changed.py", "gone.py", "kept.py", "new.py"]
    assert tmp_path.stat().st_mtime_ns == before


def test_snapshot_accepts_any_encoding(tmp_path: Path, clone: Callable[..., str]) -> None:
    text = "Grüße\n".encode("latin-1")
    (tmp_path / "changed.py").write_bytes(text)
    (tmp_path / "neu-\udcfc.py").write_text("a name that is no UTF-8")
    assert b"+" + text in snapshot(tmp_path).diff


@pytest.mark.parametrize("name", [".env", "tools/.env.local", "cluster.pem", "id_ed25519"])
def test_snapshot_refuses_secret_files(tmp_path: Path, clone: Callable[..., str], name: str) -> None:
    secret = tmp_path / name
    secret.parent.mkdir(exist_ok=True)
    secret.write_text("WANDB_API_KEY=abc123\n")
    with pytest.raises(UserError, match=f"{name} is new, may hold secrets"):
        snapshot(tmp_path)
    (tmp_path / ".git" / "info" / "exclude").write_text(name)
    assert b"abc123" not in snapshot(tmp_path).diff
    secret.unlink()
    example = tmp_path / "example"
    example.write_text("# fill in and rename\n" * 9)
    clone("add", "example")
    clone("commit", "-qm", "an example")
    (tmp_path / ".git" / "info" / "exclude").write_text("")
    example.rename(secret)  # git sees the change of a known file
    secret.write_text(secret.read_text() + "WANDB_API_KEY=abc123\n")
    with pytest.raises(UserError, match=f"{name} is new, may hold secrets"):
        snapshot(tmp_path)
    ignored = subprocess.run(["git", "check-ignore", "--no-index", "-q", ".env"], cwd=ROOT)
    assert ignored.returncode == 0, "a clone of this project ignores it"


def test_missing_git_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="git is not installed"):
        snapshot()
