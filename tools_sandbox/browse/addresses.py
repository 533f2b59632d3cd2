"""Which addresses a model may reach: the public internet without this machine, and what the operator names."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from typing import Any

from tools_sandbox.config import ConfigError

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# The special-purpose registries of IANA, written out: what Python calls global changes between its patch releases.
_NOT_PUBLIC_V4 = [
    ipaddress.IPv4Network(each)
    for each in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
        "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.168.0.0/16", "192.175.48.0/24",
        "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/3",
        # A cloud's metadata and DNS under an address that looks public.
        "168.63.129.16/32",
    )
]  # fmt: skip
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_NOT_PUBLIC_V6 = [
    ipaddress.IPv6Network(each)
    for each in (
        # Protocols, Teredo among them; examples; 6to4, which gateways unpack; the AS112 sink; examples again.
        "2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20",
    )
]  # fmt: skip
_WITH_IPV4_INSIDE = [ipaddress.IPv6Network(each) for each in ("::ffff:0:0/96", "64:ff9b::/96")]
"""Mapped addresses, and what a NAT64 gateway unpacks: as public as the IPv4 address in their last 32 bits."""


class AddressRefused(OSError):  # noqa: N818 - a decision
    """The address is not one that may be reached."""


class AddressPolicy:
    """allowed: networks in CIDR notation that may be reached although they are not public or are this machine's.
    denied: those that may not although they are public, and not allowed by name."""

    def __init__(self, allowed: Sequence[str], denied: Sequence[str] = ()) -> None:
        """ConfigError: an entry is no network."""
        self._allowed = _networks("allow_networks", allowed)
        self._denied = _networks("deny_networks", denied)

    def permits(self, address: str) -> bool:
        """True if a connection to this numeric address may be made."""
        # A scope ("fe80::1%eth0") names an interface: never public.
        numeric = ipaddress.ip_address(address.partition("%")[0])
        if any(numeric in network for network in self._allowed):
            return True
        if any(numeric in network for network in self._denied):
            return False
        return _is_public(numeric) and not _is_own(numeric)

    def checked_socket(self, address_info: tuple[Any, ...]) -> socket.socket:
        """A socket for one result of getaddrinfo, made only if its address is permitted; AddressRefused otherwise.

        This is where every connection of the tool passes, after the name was resolved and with the very address that
        is connected to, so neither a second resolution nor a redirect nor an odd spelling gets around it.
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


def _is_own(address: _Address) -> bool:
    """Whether the address is one of this machine's, which may be public: only such can be bound."""
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
    if any(address in network for network in _WITH_IPV4_INSIDE):
        return _is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return address in _GLOBAL_UNICAST and not any(address in network for network in _NOT_PUBLIC_V6)
