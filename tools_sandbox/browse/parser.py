"""Each page is parsed in a process of its own, forked from one that has loaded the parser.

A page can make its parser take gigabytes or minutes, and nothing but its end stops it. So it has a bounded memory, ends
with its call, and no other page, search or worker waits for it.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import functools
import gc
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools_sandbox.browse.fetch import FetchFailed, Page
from tools_sandbox.browse.page import readable
from tools_sandbox.utils import frames, linux

_MIB = 1 << 20


async def parse(page: Page, memory_mb: int) -> str:
    """As `page.readable`; cancelled, it ends the parser. FetchFailed; OSError: no process can be had.

    memory_mb: what the page may take, in MiB, beyond what the loaded parser does.
    """
    ours, theirs = socket.socketpair()
    ended, lifeline = os.pipe()
    try:
        try:
            socket.send_fds(_forker(), [b"."], [theirs.fileno(), ended])
        finally:
            theirs.close()
            os.close(ended)
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            values = dataclasses.asdict(page) | {"body": base64.b64encode(page.body).decode("ascii")}
            writer.write(frames.encode({"page": values, "memory_mb": memory_mb}))
            answer = await frames.receive(reader)
        finally:
            writer.transport.abort()
    finally:
        ours.close()
        os.close(lifeline)
    if answer is None:
        raise FetchFailed(f"{page.url} cannot be parsed, at least not within {memory_mb} MiB.", lasting=True)
    if "failed" in answer:
        raise FetchFailed(answer["failed"], lasting=answer["lasting"])
    return str(answer["text"])


def _forker() -> socket.socket:
    """The way to the process that parsers are forked from; it ends with this one."""
    process, control = _started()
    if process.poll() is not None:  # killed, for lack of memory say
        control.close()
        _started.cache_clear()
        _, control = _started()
    return control


@functools.cache
def _started() -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "tools_sandbox.browse.parser", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    return process, ours


def start() -> None:
    """Load the parser, in the process that parsers are forked from, ahead of the first page."""
    _started()


def _fork_parsers(control: socket.socket) -> None:
    """A child for each pair of descriptors that comes: its connection, and a pipe whose end is the child's."""
    children = dict[int, int]()
    """Process by pipe."""
    waiting = select.poll()
    waiting.register(control, select.POLLIN)
    while True:
        for ready, _ in waiting.poll():
            if ready == control.fileno():
                _, descriptors, _, _ = socket.recv_fds(control, 1, 2)
                if not descriptors:
                    return  # the worker is gone; the children go with this process
                connection, lifeline = descriptors
                pid = os.fork()
                if pid == 0:
                    control.close()
                    _child(socket.socket(fileno=connection))
                os.close(connection)
                children[lifeline] = pid
                waiting.register(lifeline, select.POLLIN)
            else:
                pid = children.pop(ready)
                waiting.unregister(ready)
                os.close(ready)
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _child(connection: socket.socket) -> None:
    """Parse one page; does not return."""
    try:
        linux.die_with_parent(signal.SIGKILL)
        with connection.makefile("rb") as incoming:
            length = int.from_bytes(incoming.read(4), "big")
            request = json.loads(incoming.read(length))
        page = Page(**request["page"] | {"body": base64.b64decode(request["page"]["body"])})
        loaded = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = loaded + request["memory_mb"] * _MIB
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        answer: dict[str, Any]
        try:
            answer = {"text": readable(page)}
        except FetchFailed as error:
            answer = {"failed": str(error), "lasting": error.lasting}
        connection.sendall(frames.encode(answer))
    except MemoryError:
        pass
    finally:
        os._exit(0)


def main() -> None:
    """Fork parsers for the process whose socket has the descriptor that is the only argument."""
    linux.die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    # An article, so that all that is loaded late and once is loaded here.
    article = b"<html><body><article><p>" + b"This is a sentence of an article. " * 50 + b"</p></article></body></html>"
    readable(Page("http://localhost/", "text/html", None, article, cut=False))
    gc.freeze()
    _fork_parsers(control)


if __name__ == "__main__":
    main()
