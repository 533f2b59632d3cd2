"""Which addresses a model may reach: the public internet, and what the operator names."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from typing import Any

from tools_sandbox.config import ConfigError

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class AddressRefused(OSError):  # noqa: N818 - a decision
    """The address is not one that may be reached."""


class AddressPolicy:
    """allowed: networks in CIDR notation that may be reached although they are not public."""

    def __init__(self, allowed: Sequence[str]) -> None:
        """ConfigError: an entry is no network."""
        try:
            self._allowed: list[_Network] = [ipaddress.ip_network(each) for each in allowed]
        except ValueError as error:
            raise ConfigError(f"browse.allow_networks: {error}") from error

    def permits(self, address: str) -> bool:
        """True if a connection to this numeric address may be made."""
        # A scope ("fe80::1%eth0") names an interface: never public.
        numeric = ipaddress.ip_address(address.partition("%")[0])
        if any(numeric in network for network in self._allowed):
            return True
        return all(each.is_global and not each.is_multicast for each in (numeric, *_embedded(numeric)))

    def checked_socket(self, address_info: tuple[Any, ...]) -> socket.socket:
        """A socket for one result of getaddrinfo, made only if its address is permitted; AddressRefused otherwise.

        This is where every connection of the tool passes, after the name was resolved and with the very address that
        is connected to, so neither a second resolution nor a redirect nor an odd spelling gets around it.
        """
        family, kind, protocol, _, target = address_info
        if not self.permits(target[0]):
            raise AddressRefused(f"{target[0]} is not on the public internet")
        return socket.socket(family, kind, protocol)


def _embedded(address: _Address) -> list[_Address]:
    """IPv4 addresses that an IPv6 address stands for: a gateway on the way may unpack them."""
    if isinstance(address, ipaddress.IPv4Address):
        return []
    found: list[_Address] = [each for each in (address.ipv4_mapped, address.sixtofour) if each is not None]
    if address.teredo is not None:
        found += address.teredo
    if address in _NAT64:
        found.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return found
