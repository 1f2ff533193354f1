"""This node's address for other nodes, settings for network libraries, and the rendezvous of an attempt's ranks.

For the rendezvous node 0 chooses a free port and publishes it by an atomic rename. The plan numbers the ranks. c10d's
dynamic rendezvous is not used: it unpickles what anyone on the network sends.
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
"""Errors of accept(2) after which the connection is still queued and can be accepted later."""
_SIOCGIFADDR = 0x8915  # netdevice(7)
WAIT_S = 300.0
"""Seconds to wait for a file of another node; prologs and cold file systems may let nodes start minutes apart."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 1.0
"""Seconds between two checks of the shared folder, at first and at most; thousands of nodes may wait for a late one."""
LONGEST_TRY_S = 30.0
"""Longest duration of one try in seconds. More than three times as long counts as a suspension (`AwakeClock`)."""
_LOWEST_PORT = 15000


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """The address and the secret that node 0 publishes for the ranks and agents of an attempt."""

    host: str
    port: int
    """The port of torch.distributed's store."""
    secret: str
    """Hexadecimal digits, from which the keys of connections are derived."""
    agents_port: int = 0
    """The port at which node 0's agent accepts the other agents (hpc_det.launch.watch.peers); 0 if there are none."""


def publish(path: Path, host: str, agents_port: int = 0) -> Rendezvous:
    """Choose a port and a secret, and write the rendezvous to `path`; called on node 0."""
    meeting = Rendezvous(host=host, port=free_port(), secret=secrets.token_hex(16), agents_port=agents_port)
    make_folders(path.parent)
    write_json(path, asdict(meeting), private=True)
    return meeting


def await_rendezvous(path: Path, deadline_s: float = WAIT_S) -> Rendezvous:
    """Return the rendezvous that node 0 published; called on the other nodes. Raises HpcDetError after `deadline_s`."""
    data = awaited(path, deadline_s)
    if data is None:
        raise HpcDetError(
            f"{path}: node 0 published no rendezvous in {deadline_s:.0f} s; check that all nodes share this folder"
        )
    return made(Rendezvous, data, path)


def awaited(path: Path, deadline_s: float) -> Any | None:
    """Wait until the JSON file `path` exists and return its content; None if it does not appear within `deadline_s`."""
    for _ in tries(deadline_s):
        data = appeared(path)
        if data is not None:
            return data
    return None


def appeared(path: Path) -> Any | None:
    """Return the content of the JSON file `path`, which another node may have just written; None if it is missing."""
    with suppress(FileNotFoundError):
        os.listdir(path.parent)  # NFS caches for up to a minute that a name is missing; a listing refreshes this
    return read_json(path)


def tries(within_s: float) -> Iterator[float]:
    """Yield the seconds that are left, then pause, again and again until `within_s` is over.

    The pauses grow (`pauses`). Time for which the process is suspended does not count.
    """
    clock, left_s = AwakeClock(LONGEST_TRY_S), within_s
    for pause in pauses():
        yield left_s
        left_s = within_s - clock.seconds() - pause
        if left_s < 0:
            return
        time.sleep(pause)


def pauses() -> Iterator[float]:
    """Yield growing pauses in seconds, with jitter, so that the nodes do not all poll at the same moment."""
    dice, longest = _own_dice(), FIRST_PAUSE_S
    while True:
        yield dice.uniform(longest / 2, longest)
        longest = min(1.5 * longest, LONGEST_PAUSE_S)


def free_port() -> int:
    """Return an unused TCP port outside the range that the kernel uses for outgoing connections. Raises HpcDetError."""
    for port in _candidates():
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise HpcDetError("no free TCP port on this node outside /proc/sys/net/ipv4/ip_local_port_range")


def _candidates() -> Iterable[int]:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    # Between this choice and the rank's bind, the kernel could give an ephemeral port to another connection.
    ports = [*range(_LOWEST_PORT, first), *range(max(last + 1, _LOWEST_PORT), 65536)]
    begin = int(_own_dice().random() * len(ports))  # shuffling 38,000 ports would take 20 ms
    return ports[begin:] + ports[:begin]


def _own_dice() -> random.Random:
    """Return a random generator that is independent of the program's seed."""
    # With the shared generator, programs with the same seed would choose the same ports and pauses, and drawing here
    # would change the numbers that a seeded program draws later.
    return random.Random()


def limit_look_ups(environment: MutableMapping[str, str]) -> None:
    """Shorten the timeout of name look-ups in `environment`, unless it is already set."""
    # Each connection to torch's store looks up its peer's name, which costs 5 s without an answer (pytorch #159007).
    # The resolver reads the variable at a process's first look-up (resolver(5)).
    environment.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def allow_files(needed: int) -> None:
    """Raise the limit of open files to `needed`, or to the hard limit if that is lower."""
    # Each connection is an open file, and the default limit is 1,024.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if resource.RLIM_INFINITY != soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def allow_many_files() -> None:
    """Raise the limit of open files to the most that this process may have."""
    # Each connection is an open file, and the usual soft limit is 1,024.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def own_address(
    nodes: int, wanted: str | None, setting: str = "cluster.dtrain_network_interface"
) -> tuple[str, str | None]:
    """Return this node's IPv4 address, and the name of the interface to set for libraries, or None if they find it.

    `wanted`: the interface that the configuration key `setting` names. Raises UsageError if it does not exist or has no
    IPv4 address.
    """
    if nodes == 1:
        return "127.0.0.1", None
    if wanted:
        return _address_of(wanted, setting), wanted
    # Libraries need the interface if the host's name resolves to loopback: Debian's stock /etc/hosts maps a host's own
    # name to 127.0.1.1, gloo binds that address, and no peer can connect.
    resolved = _resolve(socket.gethostname())
    if resolved and not ipaddress.ip_address(resolved).is_loopback:
        return resolved, None
    routed = routed_from("192.0.2.1")  # reserved for documentation (RFC 5737)
    for interface, address in sorted(interfaces().items(), key=lambda item: item[1] != routed):
        if not ipaddress.ip_address(address).is_loopback:
            return address, interface
    return resolved or "127.0.0.1", None


def address_towards(hosts: Iterable[str]) -> str | None:
    """Return this host's IPv4 address on the route to the first of `hosts` that is another host and resolves, or
    None.
    """
    # A login node's own name, and its default route, may lead to networks that compute nodes do not have.
    for host in hosts:
        resolved = _resolve(host)
        own = routed_from(resolved) if resolved else None
        if own and own != resolved and not ipaddress.ip_address(own).is_loopback:
            return own
    return None


def is_this_host(name: str) -> bool:
    """Return whether a host name or address is one of this host."""
    resolved = _resolve(name)
    return resolved is not None and routed_from(resolved) == resolved


def variables(interface: str) -> dict[str, str]:
    """Return the environment variables that set the interface for gloo and NCCL."""
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def loopback_interface() -> str | None:
    """Return the name of the loopback interface, or None if it has no IPv4 address."""
    return interface_of("127.0.0.1")


def interfaces() -> dict[str, str]:
    """Return the IPv4 addresses of this host's interfaces, by the name of the interface."""
    found = ((name, _interface_address(name)) for _, name in socket.if_nameindex())
    return {name: address for name, address in found if address}


def interface_of(address: str) -> str | None:
    """Return the name of this host's interface with this IPv4 address, or None if it is not the first one of any."""
    return next((name for name, its in interfaces().items() if its == address), None)


def shown_interfaces() -> str:
    """Return the interfaces of this host as text for messages: "NAME (ADDRESS), ..."."""
    return ", ".join(f"{name} ({address})" for name, address in interfaces().items()) or "none"


def routed_from(address: str) -> str | None:
    """Return this host's own IPv4 address on the route to `address`, or None if there is no route."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # connect(2) of a UDP socket only selects a route; it sends nothing.
        probe.connect((address, 9))
        return str(probe.getsockname()[0])
    return None


def _address_of(interface: str, setting: str) -> str:
    address = _interface_address(interface)
    if address is None:
        raise UsageError(
            f"{setting}: {socket.gethostname()} has no interface {interface!r} with an IPv4 address; it has "
            f"{shown_interfaces()}"
        )
    return address


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
