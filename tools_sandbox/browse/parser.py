"""Parsing of pages, each in its own process, which is forked from one that has loaded the parser.

A page can make its parser take gigabytes or minutes, and only the end of the process stops that. Each process therefore
has bounded memory and ends with its call. Other pages, searches and the worker do not wait for it.
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
    """Return `page.readable(page)`, computed in a new process. If cancelled, kill the process.

    memory_mb: memory in MiB that the page may take beyond the loaded parser.
    Raises FetchFailed for a bad page, OSError if no process can be started.
    """
    ours, theirs = socket.socketpair()
    ended, lifeline = os.pipe()
    try:
        try:
            socket.send_fds(_running_forker(), [b"."], [theirs.fileno(), ended])
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


def _running_forker() -> socket.socket:
    """Return the socket to the process that forks parsers. That process ends with this one."""
    process, control = _start_forker()
    if process.poll() is not None:  # killed, for example by a lack of memory
        control.close()
        _start_forker.cache_clear()
        _, control = _start_forker()
    return control


@functools.cache
def _start_forker() -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "tools_sandbox.browse.parser", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    return process, ours


def start() -> None:
    """Start the process that forks parsers, ahead of the first page."""
    _start_forker()


def _fork_parsers(control: socket.socket) -> None:
    """Fork a child for each pair of descriptors that arrives: its connection, and the pipe that bounds its life."""
    children = dict[int, int]()
    """Process id by descriptor of its pipe."""
    waiting = select.poll()
    waiting.register(control, select.POLLIN)
    while True:
        for ready, _ in waiting.poll():
            if ready == control.fileno():
                _, descriptors, _, _ = socket.recv_fds(control, 1, 2)
                if not descriptors:
                    return  # the worker has gone; the children die with this process
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
    """Parse one page. Does not return."""
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
    """Fork parsers for the process at the other end of the socket, whose descriptor is the only argument."""
    linux.die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    # Parse one article, so that everything the library loads late is loaded before the first fork.
    article = b"<html><body><article><p>" + b"This is a sentence of an article. " * 50 + b"</p></article></body></html>"
    readable(Page("http://localhost/", "text/html", None, article, cut=False))
    gc.freeze()
    _fork_parsers(control)


if __name__ == "__main__":
    main()
