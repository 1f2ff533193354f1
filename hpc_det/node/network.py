"""The address under which the other nodes reach this one, and what libraries are told of it."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import resource
import socket
import struct
from collections.abc import Iterable, MutableMapping

from hpc_det.errors import UsageError

NO_MORE_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of accept(2) after which the connection still waits, and may be accepted later."""
_SIOCGIFADDR = 0x8915  # netdevice(7)


def limit_look_ups(environment: MutableMapping[str, str]) -> None:
    """Every store connection looks its peer's name up; without an answer that costs 5 s each (pytorch #159007).

    The resolver reads the variable when a process first asks it (resolver(5)).
    """
    environment.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def allow_many_files() -> None:
    """As many as this process may have: a connection is an open file, and 1,024 are the usual soft limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def own_address(
    nodes: int, wanted: str | None, setting: str = "cluster.dtrain_network_interface"
) -> tuple[str, str | None]:
    """An IPv4 address, and the interface that libraries must be told of: the wanted one, or the one that is found.

    Without a wish it is needed where the host's name leads to loopback: Debian's stock /etc/hosts resolves a host's own
    name to 127.0.1.1; gloo then binds that and no peer connects. Raises UsageError where the wanted one is not there,
    by the name of the `setting` that wants it.
    """
    if nodes == 1:
        return "127.0.0.1", None
    if wanted:
        return _address_of(wanted, setting), wanted
    resolved = _resolve(socket.gethostname())
    if resolved and not ipaddress.ip_address(resolved).is_loopback:
        return resolved, None
    routed = _routed_from("192.0.2.1")  # reserved for documentation (RFC 5737)
    by_interface = ((name, _interface_address(name)) for _, name in socket.if_nameindex())
    for interface, address in sorted(by_interface, key=lambda item: item[1] != routed):
        if address and not ipaddress.ip_address(address).is_loopback:
            return address, interface
    return resolved or "127.0.0.1", None


def address_towards(hosts: Iterable[str]) -> str | None:
    """The IPv4 address from which this host speaks to the first of `hosts` that is another one and has a known address.

    A login node's own name, and its default route, may lead to networks that the nodes of jobs do not have.
    """
    for host in hosts:
        resolved = _resolve(host)
        own = _routed_from(resolved) if resolved else None
        if own and own != resolved and not ipaddress.ip_address(own).is_loopback:
            return own
    return None


def variables(interface: str) -> dict[str, str]:
    """How gloo and NCCL are told of it, by their own names."""
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def loopback_interface() -> str | None:
    """Its name; None where it has no IPv4 address."""
    return next((name for _, name in socket.if_nameindex() if _interface_address(name) == "127.0.0.1"), None)


def _address_of(interface: str, setting: str) -> str:
    address = _interface_address(interface)
    if address is None:
        there = {name: _interface_address(name) for _, name in socket.if_nameindex()}
        shown = ", ".join(f"{name} ({its})" for name, its in there.items() if its) or "none"
        raise UsageError(f"{setting}: {socket.gethostname()} has no {interface!r} with an IPv4 address; it has {shown}")
    return address


def _routed_from(address: str) -> str | None:
    """The address from which this host would speak to `address`. Connecting UDP sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _resolve(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None


def _interface_address(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:  # an interface without an IPv4 address
            return None
    return socket.inet_ntoa(answer[20:24])
