"""The file RUN/nodes/NODE of each agent: the address from which it connects, and why it could not connect.

The driver accepts connections from these addresses only (`Guests` in hpc_det.sgd.elastic.meeting), and shows the errors
while it waits for agents.
"""

from __future__ import annotations

import socket
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc_det.errors import HpcDetError, count
from hpc_det.node.json_files import made, read_json, write_json
from hpc_det.node.network import interface_of, routed_from
from hpc_det.store.run_folder import RunFolder

MOST_SHOWN = 3
"""Number of hosts whose errors a message contains."""


@dataclass(frozen=True, kw_only=True)
class CheckIn:
    """The state of an agent's connection to the driver, as the agent has written it."""

    host: str
    """Name of the agent's host."""
    driver: str
    """ADDRESS:PORT of the driver, as the agent has read it."""
    address: str | None
    """The host's own address on the route to the driver; None without a route."""
    interface: str | None = None
    """The interface with this address; None if it is unknown."""
    error: str = ""
    """Why the last attempt to connect failed; empty if none has failed."""

    @classmethod
    def towards(cls, host: str, port: int) -> CheckIn:
        """Return the check-in of an agent on this host, for a driver that listens on `host` and `port`."""
        address = routed_from(host)
        interface = interface_of(address) if address else None
        return cls(host=socket.gethostname(), driver=f"{host}:{port}", address=address, interface=interface)

    def write(self, run: RunFolder, node: str) -> None:
        """Write it for the driver; `node`: the name of the agent's file."""
        write_json(run.nodes / node, asdict(self))

    def __str__(self) -> str:
        origin = f"{self.address} ({self.interface})" if self.interface else self.address or "no interface"
        return f"{self.host} cannot connect from {origin} to the driver at {self.driver}: {self.error}"


class Unreachable(HpcDetError):
    """An agent could not connect to its driver in time."""


def failed(run: RunFolder, besides: Collection[str] = ()) -> dict[str, CheckIn]:
    """Return the check-ins with an error, newest first, by the name of their file; `besides`: names to leave out."""
    found = {}
    for path in sorted(_files(run), key=_changed, reverse=True):
        if path.name not in besides:
            with suppress(OSError, ValueError, HpcDetError):  # being replaced, or written by something else
                found[path.name] = made(CheckIn, read_json(path), path)
    return {name: each for name, each in found.items() if each.error}


def shown(errors: Collection[CheckIn]) -> str:
    """Return the errors as text, the first one of each host, and of at most MOST_SHOWN hosts."""
    by_host = {each.host: str(each) for each in reversed(list(errors))}
    told = list(reversed(by_host.values()))
    more = [f"and {count(len(told) - MOST_SHOWN, 'more host')}"] if len(told) > MOST_SHOWN else []
    return "; ".join([*told[:MOST_SHOWN], *more])


def _files(run: RunFolder) -> list[Path]:
    with suppress(OSError):
        return [path for path in run.nodes.iterdir() if not path.name.startswith(".")]
    return []


def _changed(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0
