"""Relay between the service and an MCP server, which passes on only lines of bounded length.

    python relay.py MAX_BYTES COMMAND [ARGUMENT ...]

The server reads from our standard input directly. If it writes a line longer than MAX_BYTES, the relay drops the line
in pieces, without holding or parsing it as a whole. If the line answered a request, an error takes its place: that
call fails, and the connection with its other calls survives. Runs as a script and imports only the standard library.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import IO

TOO_LONG = -32001
"""JSON-RPC error code of the message that replaces a too long line."""
_END_BYTES = 300
# The id is among the first members of the outermost object, or its last member. Inside a string, quotes are escaped.
_ID = rb'"id"\s*:\s*(-?\d+|"[^"\\]*")\s*'
_BEGIN, _ANSWER = rb'\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?', rb'"(?:result|error)"'
_ID_FIRST = re.compile(_BEGIN + _ID + rb",\s*" + _ANSWER)
_ANSWER_FIRST = re.compile(_BEGIN + _ANSWER)
_ID_LAST = re.compile(rb",\s*" + _ID + rb'(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*$')


def relay(incoming: IO[bytes], outgoing: IO[bytes], max_bytes: int) -> None:
    """Pass on lines until the input ends."""
    while line := incoming.readline(max_bytes + 1):
        if len(line) > max_bytes and not line.endswith(b"\n"):
            first, last = line[:_END_BYTES], line[-_END_BYTES:]
            while piece := incoming.readline(max_bytes):
                last = (last + piece)[-_END_BYTES:]
                if piece.endswith(b"\n"):
                    break
            line = _replacement(first, last, max_bytes)
        outgoing.write(line)
        outgoing.flush()


def _replacement(first: bytes, last: bytes, max_bytes: int) -> bytes:
    """Return an error for the request that the line answered, or nothing if the request is unknown."""
    # Requests of the server also have ids, which may equal ids of ours.
    found = _ID_FIRST.match(first) or (_ANSWER_FIRST.match(first) and _ID_LAST.search(last))
    if found is None:
        print("tools_sandbox: an MCP server wrote a too long line that answers no request; dropped", file=sys.stderr)
        return b""
    error = {"code": TOO_LONG, "message": f"The answer is too long: more than {max_bytes} bytes."}
    return json.dumps({"jsonrpc": "2.0", "id": json.loads(found[1]), "error": error}).encode() + b"\n"


def main() -> None:
    """Start the server, relay its output, and exit with its code."""
    with subprocess.Popen(sys.argv[2:], stdout=subprocess.PIPE) as server:
        # The server now holds the only copy of our standard input, and ends when that is closed.
        sys.stdin.close()
        assert server.stdout is not None
        try:
            relay(server.stdout, sys.stdout.buffer, int(sys.argv[1]))
        except BrokenPipeError:  # the service has gone
            server.kill()
    sys.exit(abs(server.returncode))


if __name__ == "__main__":
    main()
