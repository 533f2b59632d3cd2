"""A server that speaks the OpenAI chat protocol, as real HTTP, and answers by a rule of the test.

A double, because a real model cannot be made to give known verdicts, or to be fooled, echo, fail or go away on demand.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Rule = Callable[[str], str | int | bytes | Iterator[bytes]]
"""Answer to the user message: a reply, an HTTP status, or a body as it is, whole or by pieces."""


@dataclass
class ChatServer:
    """Address, behaviour and received questions of the server."""

    url: str
    rule: Rule
    asked: list[dict[str, Any]] = field(default_factory=list)


def part(text: str, name: str) -> str:
    """Return one of the marked parts of a question."""
    found = re.search(rf"\[begin {name} (\w+)\]\n(.*?)\n\[end {name} \1\]", text, re.DOTALL)
    assert found, text
    return found[2]


def verdict(text: str, word: str) -> str:
    """Return a reply with the verdict `word`."""
    code = re.findall(r"`VERDICT (\w+): ", text)[-1]
    return f"I have looked at it.\nVERDICT {code}: {word}"


@contextmanager
def chat_server(rule: Rule, port: int = 0) -> Iterator[ChatServer]:
    """Serve until the end of the `with` block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            known.asked.append(body)
            answer = known.rule(body["messages"][-1]["content"])
            if isinstance(answer, bytes | Iterator):
                return self.write(iter([answer]) if isinstance(answer, bytes) else answer)
            status = 200 if isinstance(answer, str) else answer
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": answer}}
            reply = {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"], "choices": [choice]}
            data = json.dumps(reply if status == 200 else {"error": {"message": "no"}}).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            with suppress(ConnectionError):  # the client has disconnected
                self.end_headers()
                self.wfile.write(data)
            return None

        def write(self, pieces: Iterator[bytes]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            with suppress(ConnectionError):
                for piece in pieces:
                    self.wfile.write(piece)
                    self.wfile.flush()

        def log_message(self, *_arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        known = ChatServer(f"http://127.0.0.1:{server.server_port}/v1", rule)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield known
        finally:
            server.shutdown()
            thread.join()
