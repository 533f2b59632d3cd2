"""Check which hosts reach a job's ports."""

import socket
from collections.abc import Collection, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import psutil

from arpo_megatron.launch.preflight.check import CheckResult, failure, ok, warning


def check_exposure(addresses: Collection[str], trusted: Sequence[str] = ()) -> CheckResult:
    """Check that only this machine and trusted networks can reach a job's ports.

    Args:
        addresses: IP addresses of this machine at which services and ranks listen; empty if the check of the network,
            which finds them, has failed.
        trusted: `trusted_networks` of the cluster profile.
    """
    if not addresses:
        return warning("exposure", "not checked, since the network check failed", "fix what that check reports")
    parsed = {_plain(address) for address in addresses}
    reachable = sorted((each for each in parsed if not each.is_loopback), key=str)
    if not reachable:
        return ok("exposure", "a job listens at 127.0.0.1 only: every user of this machine can reach it")
    networks = [ip_network(network) for network in trusted]
    outside = [each for each in reachable if not any(each in network for network in networks)]
    text = f"services, ranks and weight pushes listen at {', '.join(f'{each} ({_hosts(each)})' for each in reachable)}"
    if not outside:
        return ok("exposure", text)
    if not networks:
        return warning("exposure", text, "ranks and pushes ask for no password: set trusted_networks in the profile")
    fix = "set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME in the profile to an interface of a trusted network"
    return failure("exposure", f"{text}: {', '.join(map(str, outside))} is in none of trusted_networks", fix)


def _plain(address: str) -> IPv4Address | IPv6Address:
    """Parse an address; a name is one of Slurm's for this node."""
    try:
        parsed = ip_address(address)
    except ValueError:
        parsed = ip_address(socket.gethostbyname(address))
    return (parsed.ipv4_mapped or parsed) if isinstance(parsed, IPv6Address) else parsed


def _hosts(address: IPv4Address | IPv6Address) -> str:
    """Return the interface of an address and the hosts that are next to it."""
    if address.is_unspecified:
        return "every network of this machine"
    for interface, own in psutil.net_if_addrs().items():
        for each in own:
            if each.netmask and each.address.partition("%")[0] == str(address):
                bits = int(ip_address(each.netmask)).bit_count()
                return f"{interface}, open to {ip_network(f'{address}/{bits}', strict=False)}"
    return "no interface of this machine"
