"""`python -m arpo_megatron.cli.login_node`: the command that standard input holds, on the login node."""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


def main() -> None:
    """On the login node: run the command that standard input holds."""
    payload = json.loads(sys.stdin.readline())
    os.environ |= payload["environment"]
    from arpo_megatron.__main__ import main as arpo
    from arpo_megatron.cluster.ssh import _words

    with tempfile.TemporaryDirectory(prefix="arpo-") as folder:
        sys.argv = ["arpo", *_words(payload["words"], payload["files"], Path(folder))]
        arpo()
