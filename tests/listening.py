"""The TCP ports that a process listens on, as the kernel shows them (proc(5), /proc/PID/net/tcp)."""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

_LISTEN = "0A"


class Listening(NamedTuple):
    address: str
    port: int

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback


def listening(pid: int) -> list[Listening]:
    """Return the ports that this process, not its children, listens on; an empty list if it has ended."""
    found: list[Listening] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        own = _sockets(pid)
        for table in ("tcp", "tcp6"):
            with open(f"/proc/{pid}/net/{table}", encoding="ascii") as file:
                rows = [line.split() for line in file][1:]
            found += [_at(row[1]) for row in rows if row[3] == _LISTEN and row[9] in own]
    return found


def is_closed_to_others(pids: Iterable[int]) -> bool:
    """Return whether rank 0 is the only rank of a node that listens, on one loopback port for messages; gloo's ports
    are closed then.
    """
    found = [listening(pid) for pid in pids]
    ports = [len(each) for each in found]
    return ports == [1] + [0] * (len(ports) - 1) and all(each.is_loopback for rank in found for each in rank)


def _sockets(pid: int) -> set[str]:
    """Return the inodes of the process's sockets."""
    inodes = set()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            kind, _, number = os.readlink(f"/proc/{pid}/fd/{descriptor}").partition(":[")
            if kind == "socket":
                inodes.add(number.rstrip("]"))
    return inodes


def _at(shown: str) -> Listening:
    """Parse an address of proc(5): words of 32 bits, each in the machine's byte order."""
    address, port = shown.split(":")
    data = bytes.fromhex(address)
    words = [data[start : start + 4] for start in range(0, len(data), 4)]
    packed = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    return Listening(str(ipaddress.ip_address(packed)), int(port, 16))
