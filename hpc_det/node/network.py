"""The address under which other nodes reach this one, what libraries are told of it, and where the ranks of an attempt
meet: node 0 takes a free port and publishes it by an atomic rename.

Ranks are numbered by the plan. c10d's dynamic rendezvous is not used: it unpickles what anybody on the network sends.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import os
import random
import resource
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_det.errors import HpcDetError, UsageError
from hpc_det.node.files import make_folders
from hpc_det.node.json_files import made, read_json, write_json
from hpc_det.node.suspension import AwakeClock

NO_MORE_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of accept(2) after which the connection still waits, and may be accepted later."""
_SIOCGIFADDR = 0x8915  # netdevice(7)
WAIT_S = 300.0
"""Nodes of one job may start minutes apart: prologs, cold file systems."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 1.0
"""Between two looks at the shared folder; thousands of nodes may wait for one that is late."""
LONGEST_TRY_S = 30.0
"""One that takes three times as long was spent suspended (`AwakeClock`)."""
_LOWEST_PORT = 15000


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    host: str
    port: int
    secret: str
    agents_port: int = 0
    """Where node 0's agent waits for the others (hpc_det.launch.watch.peers); 0: it is alone."""


def publish(path: Path, host: str, agents_port: int = 0) -> Rendezvous:
    """Node 0: choose and publish."""
    meeting = Rendezvous(host=host, port=free_port(), secret=secrets.token_hex(16), agents_port=agents_port)
    make_folders(path.parent)
    write_json(path, asdict(meeting), private=True)
    return meeting


def await_rendezvous(path: Path, deadline_s: float = WAIT_S) -> Rendezvous:
    """The other nodes: read what node 0 published. Raises HpcDetError after `deadline_s`."""
    data = awaited(path, deadline_s)
    if data is None:
        raise HpcDetError(
            f"{path}: node 0 published no rendezvous in {deadline_s:.0f} s; do all nodes see this folder?"
        )
    return made(Rendezvous, data, path)


def awaited(path: Path, deadline_s: float) -> Any | None:
    """What stands in the JSON file `path` as soon as it is there; None where it is not by the deadline."""
    for _ in tries(deadline_s):
        with suppress(FileNotFoundError):
            os.listdir(path.parent)  # NFS believes for up to a minute that a name is not there; a listing refreshes it
        data = read_json(path)
        if data is not None:
            return data
    return None


def tries(within_s: float) -> Iterator[float]:
    """One at least, and then more with pauses between them, as long as there is time: how much is left.

    The time in which the process was suspended does not count.
    """
    clock, left_s = AwakeClock(LONGEST_TRY_S), within_s
    for pause in pauses():
        yield left_s
        left_s = within_s - clock.seconds() - pause
        if left_s < 0:
            return
        time.sleep(pause)


def pauses() -> Iterator[float]:
    """Between the looks of one node; those of all nodes do not come at the same moment."""
    dice, longest = _own_dice(), FIRST_PAUSE_S
    while True:
        yield dice.uniform(longest / 2, longest)
        longest = min(1.5 * longest, LONGEST_PAUSE_S)


def free_port() -> int:
    """A TCP port that nothing is bound to, outside the range from which the kernel serves outgoing connections."""
    for port in _candidates():
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise HpcDetError("no free TCP port outside the ephemeral range on this node")


def _candidates() -> Iterable[int]:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [port for port in range(_LOWEST_PORT, 65536) if not first <= port <= last]
    _own_dice().shuffle(ports)
    return ports


def _own_dice() -> random.Random:
    """Programs that were given the same seed would look at the same moments and take the same ports; and what is drawn
    here would change what a program that has a seed draws afterwards.
    """
    return random.Random()


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
