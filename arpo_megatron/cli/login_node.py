"""`python -m arpo_megatron.cli.login_node`: run the command that `cluster.ssh` sends to the login node.

Standard input has one JSON line with `arguments`, `files` and `environment`. An argument that names one of the files is
replaced by the path of a temporary copy. With `until_closed`, the command ends when standard input is closed, so that a
lost connection leaves no server behind.
"""

import json
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path


def main() -> None:
    """Run `arpo` with the arguments, files and environment from standard input."""
    payload = json.loads(sys.stdin.readline())
    os.environ |= payload["environment"]
    if payload.get("until_closed"):
        threading.Thread(target=_end_with_input, daemon=True).start()
    from arpo_megatron.__main__ import main as arpo

    with tempfile.TemporaryDirectory(prefix="arpo-") as folder:
        for name, text in payload["files"].items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        arguments = [str(Path(folder) / each) if each in payload["files"] else each for each in payload["arguments"]]
        sys.argv = ["arpo", *arguments]
        arpo()


def _end_with_input() -> None:
    while sys.stdin.readline():
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
