"""The addresses that a model may reach: the public internet except this machine, and networks the operator allows."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from typing import Any

from tools_sandbox.config import ConfigError

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# IANA's special-purpose registries, written out: Python's `is_global` changes between its patch releases.
_NOT_PUBLIC_V4 = [
    ipaddress.IPv4Network(each)
    for each in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
        "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.168.0.0/16", "192.175.48.0/24",
        "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/3",
        # Metadata and DNS of a cloud, under an address that looks public.
        "168.63.129.16/32",
    )
]  # fmt: skip
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_NOT_PUBLIC_V6 = [
    ipaddress.IPv6Network(each)
    for each in (
        # In order: protocols such as Teredo, examples, 6to4 (gateways unpack it), the AS112 sink, examples.
        "2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20",
    )
]  # fmt: skip
_WITH_IPV4_INSIDE = [ipaddress.IPv6Network(each) for each in ("::ffff:0:0/96", "64:ff9b::/96")]
"""Mapped addresses and those that a NAT64 gateway unpacks. The IPv4 address in their last 32 bits decides."""


class AddressRefused(OSError):  # noqa: N818 - a decision
    """The address may not be reached."""


class AddressPolicy:
    """The rule that decides which addresses may be reached.

    allowed: networks in CIDR notation that may be reached although they are not public or belong to this machine.
    denied: public networks that may not be reached, except for what `allowed` names.
    """

    def __init__(self, allowed: Sequence[str], denied: Sequence[str] = ()) -> None:
        """Raises ConfigError if an entry is not a network."""
        self._allowed = _networks("allow_networks", allowed)
        self._denied = _networks("deny_networks", denied)

    def permits(self, address: str) -> bool:
        """Return True if connections to this numeric address are allowed."""
        # A scope ("fe80::1%eth0") names an interface. Such an address is never public.
        numeric = _inner(ipaddress.ip_address(address.partition("%")[0]))
        if any(numeric in network for network in self._allowed):
            return True
        if any(numeric in network for network in self._denied):
            return False
        return _is_public(numeric) and not _is_own(numeric)

    def checked_socket(self, address_info: tuple[Any, ...]) -> socket.socket:
        """Return a socket for one result of getaddrinfo. Raises AddressRefused if its address is not permitted.

        Every connection of the tool passes here, after name resolution and with the address that is connected to.
        A second resolution, a redirect or an odd spelling of an address therefore cannot bypass the check.
        """
        family, kind, protocol, _, target = address_info
        if not self.permits(target[0]):
            raise AddressRefused(f"{target[0]} is not on the public internet, or not to be read")
        return socket.socket(family, kind, protocol)


def _networks(key: str, named: Sequence[str]) -> list[_Network]:
    try:
        return [ipaddress.ip_network(each) for each in named]
    except ValueError as error:
        raise ConfigError(f"browse.{key}: {error}") from error


def _inner(address: _Address) -> _Address:
    """Return the address that a connection to `address` reaches: the IPv4 address inside it, if it has one."""
    if any(address in network for network in _WITH_IPV4_INSIDE):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _is_own(address: _Address) -> bool:
    """Return whether the address belongs to this machine, also if it is public: only such addresses can be bound."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(address), 0))
        except OSError:
            return False
    return True


def _is_public(address: _Address) -> bool:
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_V4)
    return address in _GLOBAL_UNICAST and not any(address in network for network in _NOT_PUBLIC_V6)
