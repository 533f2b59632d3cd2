"""Errors of a remote login node are one line; the login node is a real sshd on this machine."""

import getpass
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from arpo_megatron.cluster import ssh
from arpo_megatron.cluster.ssh import LoginNode
from arpo_megatron.errors import UserError
from tests.cluster import sshd
from tests.faults import small_disk

pytestmark = pytest.mark.skipif(not Path(sshd.SSHD).exists(), reason="no sshd; `make test-all` installs one")


@pytest.fixture(scope="module")
def server() -> Iterator[sshd.Sshd]:
    with sshd.sshd() as started:
        yield started


def error_of(server: sshd.Sshd, python: str = "/not/reached") -> str:
    profile = {"python": python}
    node = LoginNode("far", profile, getpass.getuser(), "127.0.0.1", server.port, str(server.key))
    with pytest.raises(UserError) as error:
        ssh._run_remotely(node, "{}")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_unwritable_remote_home_is_one_line(server: sshd.Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(ssh, "_CODE", str(tmp_path / "file" / "code"))
    assert "mkdir: cannot create directory" in error_of(server)


def test_full_remote_disk_is_one_line(server: sshd.Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_disk(tmp_path, 64 * 2**10):
        monkeypatch.setattr(ssh, "_CODE", str(tmp_path / "code"))
        assert re.search(r"cannot write .*/.pack \(.*\): is the disk there full\?", error_of(server))


def test_lost_connection_is_one_line(server: sshd.Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "_CODE", str(tmp_path / "code"))
    (python := tmp_path / "python").write_text("#!/bin/sh\nkill -9 $PPID\n")
    python.chmod(0o755)
    assert error_of(server, str(python)).startswith("127.0.0.1 returned no exit code")
