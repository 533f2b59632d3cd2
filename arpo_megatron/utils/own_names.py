"""Requests of web sites to a server of this machine, known by their Host and Origin headers."""

import ipaddress
import socket


def is_own_name(header: str, host: str = "localhost") -> bool:
    """Whether a Host header is an IP address, localhost, `host`, or the name of this machine.

    A site of the internet cannot use an address: the browser would send the name that the address bar shows. Without
    this check it could reach the server through a name of its own that resolves to this machine (DNS rebinding).
    """
    name = header[1 : header.find("]")] if header.startswith("[") else header.rpartition(":")[0] or header
    if name.lower() in {"localhost", host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_same_origin(origin: str | None, header: str | None) -> bool:
    """Whether an Origin header, which browsers send with scripts' requests, is absent or has the host of `header`."""
    return origin is None or origin.partition("://")[2] == header
