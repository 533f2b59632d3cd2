"""TCP ports: free ones for services, and those at which processes listen."""

import contextlib
import ipaddress
import random
import socket
from pathlib import Path

import psutil

from arpo_megatron.errors import UserError

_CANDIDATES = 10000
"""Number of ports below the kernel's ephemeral range among which free ones are searched."""


def free_ports(count: int, host: str = "127.0.0.1", among: tuple[int, int] | None = None) -> list[int]:
    """Return `count` different TCP ports that are free on this machine's address `host`.

    They lie between the two ports of `among`, by default below the range of ephemeral ports. The kernel hands out
    ephemeral ports to outgoing connections, so one of those could be taken between this check and the start of the
    service.

    Raises:
        UserError: fewer than `count` ports are free.
    """
    ports: list[int] = []
    end = _first_ephemeral_port()
    first, last = among or (end - _CANDIDATES, end - 1)
    for port in random.SystemRandom().sample(range(first, last + 1), last + 1 - first):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise UserError(f"fewer than {count} of the TCP ports {first} to {last} are free on {host}")


def is_loopback(host: str) -> bool:
    """Return whether an address or host name is of this machine alone."""
    return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback


def listening_addresses(pid: int | None = None) -> set[tuple[str, int]]:
    """Return address and port of each TCP socket at which a process listens, by default this one."""
    sockets = psutil.Process(pid).net_connections("tcp")
    return {(each.laddr.ip, each.laddr.port) for each in sockets if each.status == psutil.CONN_LISTEN}


def _first_ephemeral_port() -> int:
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        first = 0
    return first if first > 2 * _CANDIDATES else 32768  # Linux's default; below a lower start there is no room
