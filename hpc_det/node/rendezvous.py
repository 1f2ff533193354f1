"""Where the ranks of an attempt meet: node 0 takes a free port and publishes it by an atomic rename.

Ranks are numbered by the plan. c10d's dynamic rendezvous is not used: it unpickles what anybody on the network sends.
"""

from __future__ import annotations

import os
import random
import secrets
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_det.errors import HpcDetError
from hpc_det.node.awake import AwakeClock
from hpc_det.node.files import read_json, write_json
from hpc_det.node.modes import make_folders
from hpc_det.node.shape import made

WAIT_S = 300.0
"""Nodes of one job may start minutes apart: prologs, cold file systems."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 1.0
"""Between two looks at the shared folder; thousands of nodes may wait for one that is late."""
LONGEST_TRY_S = 30.0
"""One that takes three times as long was spent suspended (hpc_det.node.awake)."""
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
