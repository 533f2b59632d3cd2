"""A real sshd on this machine, as the login node of a remote cluster."""

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from arpo_megatron.utils.ports import free_ports

SSHD = "/usr/sbin/sshd"
PACKAGE = "openssh-server"


@dataclass(frozen=True)
class Sshd:
    """An sshd that accepts one key of this user."""

    port: int
    key: Path
    log: Path


@contextmanager
def sshd(**variables: str) -> Iterator[Sshd]:
    """Run a server; `variables` are environment variables of its sessions."""
    folder = Path(tempfile.mkdtemp(prefix="sshd-", dir="/tmp"))
    for name in ("host", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (port,) = free_ports(1)
    # sshd accepts one SetEnv line at most.
    given = "SetEnv " + " ".join(f"{name}={value}" for name, value in variables.items()) + "\n" if variables else ""
    (folder / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/key.pub\n"
        f"PidFile none\nStrictModes no\nPasswordAuthentication no\nSubsystem sftp internal-sftp\n{given}"
    )
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    log = folder / "log"
    server = subprocess.Popen([SSHD, "-D", "-f", folder / "config", "-E", log], stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield Sshd(port, folder / "key", log)
    finally:
        server.terminate()
        server.wait()
        shutil.rmtree(folder)
