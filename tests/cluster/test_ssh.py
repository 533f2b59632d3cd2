"""Errors of a remote login node are one line; the login node is a real sshd on this machine."""

import getpass
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from arpo_megatron.cluster import ssh
from arpo_megatron.cluster.ssh import LoginNode
from arpo_megatron.errors import UserError
from tests.cluster import sshd
from tests.faults import small_disk
from tests.packages import install
from tests.view.stored_run import make_run


@pytest.fixture(scope="module")
def server(pytestconfig: pytest.Config) -> Iterator[sshd.Sshd]:
    if pytestconfig.getoption("--campaigns") and (why := install(sshd.SSHD, sshd.PACKAGE)):
        pytest.skip(why)
    if not Path(sshd.SSHD).exists():
        pytest.skip("no sshd; `make campaigns` installs one")
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


@pytest.mark.slow_campaign
def test_page_of_a_run_on_the_login_node_is_shown_here(server: sshd.Sshd, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    profile = {"ssh": f"{getpass.getuser()}@127.0.0.1:{server.port}", "identity": str(server.key)}
    profile |= {"python": sys.executable, "runs": str(tmp_path), "account": "none"}
    (tmp_path / "far.yaml").write_text(yaml.safe_dump(profile))
    script = (
        "import sys; from arpo_megatron.cluster import ssh; from arpo_megatron.__main__ import main\n"
        f"ssh._CODE = {str(tmp_path / 'code')!r}\n"
        f"sys.argv = ['arpo', 'view', {str(run.path)!r}, '--cluster', {str(tmp_path / 'far.yaml')!r}]\nmain()"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as viewer:
        assert viewer.stdout is not None and viewer.stderr is not None
        if not (address := viewer.stdout.readline().strip()):
            pytest.fail(viewer.stderr.read())
        with httpx.Client(follow_redirects=True) as client:
            assert "<title>arpo view</title>" in client.get(address).text
            found = client.get(f"{address.partition('?')[0]}data/run").json()
            assert found["state"] == "stopped" or found["step"] == 1
        viewer.terminate()
        viewer.wait(60)
    left = [each for each in psutil.process_iter(["cmdline"]) if str(run.path) in (each.info["cmdline"] or [])]
    assert psutil.wait_procs(left, timeout=30)[1] == [], "the server on the login node ends with the connection"
