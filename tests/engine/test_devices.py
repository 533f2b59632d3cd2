"""Names of devices: equal exactly where two processes can share memory."""

import subprocess
import sys

import pytest
import torch

from arpo_megatron.engine.wire.devices import device_name

NAME = (
    "import torch; from arpo_megatron.engine.wire.devices import device_name as name; print(name(torch.device('cpu')))"
)
APART = ["unshare", "--map-root-user", "--mount"]


def test_processes_with_their_own_tmp_share_no_memory() -> None:
    """Containers on one machine are like that: torch's shared memory is reached by a socket in /tmp."""
    own = device_name(torch.device("cpu"))
    beside = subprocess.run([sys.executable, "-c", NAME], capture_output=True, text=True, check=True).stdout.strip()
    assert beside == own
    if subprocess.run([*APART, "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    command = [*APART, "sh", "-c", f'mount -t tmpfs none /tmp && exec {sys.executable} -c "{NAME}"']
    apart = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert apart != own and apart.split("/")[0] == own.split("/")[0], "another place on the same machine"
