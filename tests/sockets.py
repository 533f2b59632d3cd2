"""The sockets at which processes listen, and who can reach them."""

from collections.abc import Iterable
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import psutil


def listening_ports(processes: Iterable[psutil.Process]) -> set[int]:
    """Return the TCP ports at which the processes listen."""
    return {port for _, _, port in _tcp(processes)}


def exposed(processes: Iterable[psutil.Process]) -> list[str]:
    """Return the sockets of the processes that another machine, or through a file another user, can reach."""
    processes = list(processes)
    found = [
        f"{name} listens at {host}:{port}" for name, host, port in _tcp(processes) if not ip_address(host).is_loopback
    ]
    for process in processes:
        with suppress(psutil.Error):  # it has just ended
            paths = {str(each.laddr) for each in process.net_connections("unix")} - {""}
            found += [f"{_name(process)} has the socket {path}" for path in paths if not _private(path)]
    return found


def _tcp(processes: Iterable[psutil.Process]) -> list[tuple[str, str, int]]:
    found = []
    for process in processes:
        with suppress(psutil.Error):
            for each in process.net_connections("inet"):
                if each.status == psutil.CONN_LISTEN:
                    found.append((_name(process), each.laddr.ip, each.laddr.port))
    return found


def _name(process: psutil.Process) -> str:
    return " ".join(process.cmdline()[:4])


def _private(path: str) -> bool:
    """Return whether only the owner may enter the folder of a socket. Abstract ones (@...) have no folder."""
    folders = [folder for folder in Path(path).parents if folder.exists()]
    return path.startswith("/") and any(not folder.stat().st_mode & 0o077 for folder in folders)
