"""Stands between the service and an MCP server: lines of bounded length only.

    python relay.py MOST_BYTES COMMAND [ARGUMENT ...]

The server reads from our standard input itself. Of what it writes, a line that is longer than MOST_BYTES is dropped in
pieces, never held or parsed as a whole; if it answered a request, an error takes its place, so that one call fails and
the connection, with the calls of others on it, goes on. Runs by itself, as a script: it imports nothing of ours.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import IO

TOO_LONG = -32001
"""JSON-RPC error code of what we say instead of a line that is too long."""
_END_BYTES = 300
# Of the outermost object: its first members, or its last one. Inside a string, quotes would be escaped.
_ID = rb'"id"\s*:\s*(-?\d+|"[^"\\]*")\s*'
_BEGIN, _ANSWER = rb'\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?', rb'"(?:result|error)"'
_ID_FIRST = re.compile(_BEGIN + _ID + rb",\s*" + _ANSWER)
_ANSWER_FIRST = re.compile(_BEGIN + _ANSWER)
_ID_LAST = re.compile(rb",\s*" + _ID + rb'(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*$')


def relay(incoming: IO[bytes], outgoing: IO[bytes], most_bytes: int) -> None:
    """Pass lines on until the end."""
    while line := incoming.readline(most_bytes + 1):
        if len(line) > most_bytes and not line.endswith(b"\n"):
            first, last = line[:_END_BYTES], line[-_END_BYTES:]
            while piece := incoming.readline(most_bytes):
                last = (last + piece)[-_END_BYTES:]
                if piece.endswith(b"\n"):
                    break
            line = _instead(first, last, most_bytes)
        outgoing.write(line)
        outgoing.flush()


def _instead(first: bytes, last: bytes, most_bytes: int) -> bytes:
    """The answer to the request whose answer was too long; nothing if it cannot be told which."""
    # A request of the server's own has an id too, which may be that of one of ours.
    found = _ID_FIRST.match(first) or (_ANSWER_FIRST.match(first) and _ID_LAST.search(last))
    if found is None:
        print("tools_sandbox: an MCP server wrote a line that is too long, and answers nobody", file=sys.stderr)
        return b""
    error = {"code": TOO_LONG, "message": f"The answer is too long: more than {most_bytes} bytes."}
    return json.dumps({"jsonrpc": "2.0", "id": json.loads(found[1]), "error": error}).encode() + b"\n"


def main() -> None:
    """Start the server and relay what it writes; end as it does."""
    with subprocess.Popen(sys.argv[2:], stdout=subprocess.PIPE) as server:
        # The server has the only other hold on our input, and ends when that does.
        sys.stdin.close()
        assert server.stdout is not None
        try:
            relay(server.stdout, sys.stdout.buffer, int(sys.argv[1]))
        except BrokenPipeError:  # the service is gone
            server.kill()
    sys.exit(abs(server.returncode))


if __name__ == "__main__":
    main()
