"""The address under which the other nodes reach this one."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

_SIOCGIFADDR = 0x8915  # netdevice(7)


def own_address(nodes: int) -> tuple[str, str | None]:
    """An IPv4 address, and the interface that gloo must be told of where the host's name leads to loopback.

    Debian's stock /etc/hosts resolves a host's own name to 127.0.1.1; gloo then binds that and no peer connects.
    """
    if nodes == 1:
        return "127.0.0.1", None
    resolved = _resolve(socket.gethostname())
    if resolved and not ipaddress.ip_address(resolved).is_loopback:
        return resolved, None
    routed = _default_route_address()
    by_interface = ((name, _interface_address(name)) for _, name in socket.if_nameindex())
    for interface, address in sorted(by_interface, key=lambda item: item[1] != routed):
        if address and not ipaddress.ip_address(address).is_loopback:
            return address, interface
    return resolved or "127.0.0.1", None


def _default_route_address() -> str | None:
    """The address from which this host would speak to the world: bridges of containers come after it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation (RFC 5737); connecting UDP sends nothing
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
