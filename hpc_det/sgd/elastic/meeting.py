"""The files of a run with which agents find the driver, the driver learns their addresses, and one driver owns the run.

A run has one driver at a time, on any machine. A driver owns the run by a claim. Claims are numbered, and the highest
one is valid. A claim is made by link(2), which succeeds for one process only, and only after the previous claim was
withdrawn or its driver was found dead. So a killed driver does not block the run, and if several drivers find it dead
at the same time, one of them gets the next claim. Numbers of claims are not reused.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from hpc_det.errors import HpcDetError, UsageError
from hpc_det.node.files import write_first
from hpc_det.node.json_files import json_text, read_json, write_json
from hpc_det.node.lines import Line, NoLine, connect
from hpc_det.node.network import appeared, tries
from hpc_det.node.process import is_running, start_ticks
from hpc_det.sgd.elastic.check_in import CheckIn, Unreachable
from hpc_det.store.run_folder import RunFolder

ANSWER_S = 0.5
"""Seconds to wait for an answer of a driver that may have been killed."""
TRY_S = 5.0
"""Seconds of one attempt to connect. Then the address is read again: a new driver may listen elsewhere."""
MOST_REJECTED = 8
"""Number of addresses that are kept of those whose connections were rejected."""
LOOK_S = 0.2
"""Shortest time in seconds between two searches of the folder for an unknown address. Anyone may try to connect, and
must not cause a search with each attempt.
"""


class DriverAddress(NamedTuple):
    """The address on which a driver listens."""

    host: str
    port: int


def announce(run: RunFolder, host: str, port: int) -> None:
    """Write the address on which the driver of the run listens, for its agents."""
    write_json(run.driver, DriverAddress(host, port)._asdict())


def withdraw(run: RunFolder) -> None:
    """Remove the address of the driver: no agent can connect any more."""
    run.driver.unlink(missing_ok=True)


def announced(run: RunFolder) -> DriverAddress | None:
    """Return the address of the driver of the run; None if there is no driver."""
    data = appeared(run.driver)
    return None if data is None else DriverAddress(**data)


def call_driver(
    run: RunFolder, node: str, identity: dict[str, Any], within_s: float, is_alone: Callable[[], bool] = lambda: False
) -> Line:
    """Connect an agent to its driver with the key of the run, and return the connection.

    `node`: name of the file in which the agent announces its address to the driver, and why it could not connect;
    `is_alone` returns whether no driver will come. Raises Unreachable if connecting has failed for `within_s` seconds,
    and HpcDetError if there is no driver.
    """
    key = run.key()
    here, error = None, ""
    for left_s in tries(within_s):
        if is_alone():
            raise HpcDetError(f"{run.driver}: the driver has exited before this agent could connect")
        if (driver := announced(run)) is None:
            continue
        here = CheckIn.towards(*driver)
        replace(here, error=error).write(run, node)
        try:
            line = connect(*driver, key, identity, min(TRY_S, left_s), listener="the driver")
        except HpcDetError as problem:  # the file may contain the address of an earlier driver
            error = _reason(problem)
            here = replace(here, error=error)
            here.write(run, node)
        else:
            if error:
                here.write(run, node)
            return line
    if here is None:
        raise HpcDetError(
            f"{run.driver}: no driver within {within_s:.0f} s; check that this node sees the driver's folder"
        )
    raise Unreachable(f"{here} (tried for {within_s:g} s)")


def _reason(problem: HpcDetError) -> str:
    """Return why a connection failed: the error of the operating system if there was one."""
    return problem.error.strerror or str(problem.error) if isinstance(problem, NoLine) else str(problem)


def answers(run: RunFolder, driver: DriverAddress) -> bool:
    """Return whether a driver of this run still listens at this address and proves that it has the run's key."""
    name = f"driver-{os.getpid()}"
    try:
        CheckIn.towards(*driver).write(run, name)
        connect(*driver, run.key(), {"role": "driver"}, ANSWER_S, listener="the driver").close()
    except HpcDetError:
        return False
    finally:
        (run.nodes / name).unlink(missing_ok=True)
    return True


class Guests:
    """The addresses from which connections to a driver are accepted.

    If the driver listens on a loopback address (`host`), only this machine may connect; otherwise only the nodes that
    have written their address to the run.
    """

    def __init__(self, run: RunFolder, host: str) -> None:
        """Remove the addresses that agents have written for an earlier driver; agents write them at each connection."""
        self._folder = run.nodes
        self._is_local = ipaddress.ip_address(host).is_loopback
        self._addresses: set[str | None] = set()
        self._next_look = 0.0
        self._rejected: dict[str, None] = {}
        for path in self._files():
            path.unlink(missing_ok=True)

    @property
    def rejected(self) -> list[str]:
        """The first addresses from which connections were rejected, and none was accepted later."""
        return list(self._rejected)

    def are_allowed_from(self, address: str) -> bool:
        """Return whether a connection from this address is accepted."""
        is_allowed = self._is_known(address)
        if is_allowed:
            self._rejected.pop(address, None)
        elif len(self._rejected) < MOST_REJECTED:
            self._rejected[address] = None
        return is_allowed

    def _is_known(self, address: str) -> bool:
        if self._is_local:
            return ipaddress.ip_address(address).is_loopback
        if address not in self._addresses and time.monotonic() >= self._next_look:
            self._addresses = {*map(_address_in, self._files())}
            self._next_look = time.monotonic() + LOOK_S
        return address in self._addresses

    def _files(self) -> list[Path]:
        with suppress(OSError):
            return [path for path in self._folder.iterdir() if not path.name.startswith(".")]
        return []


def _address_in(path: Path) -> str | None:
    """Return the address in the file of a node; None if the file is gone or invalid."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        return str(json.loads(path.read_bytes())["address"])
    return None


@dataclass(frozen=True)
class Claim:
    """The ownership of a run by this driver: the file RUN/drivers/NUMBER.json."""

    run: RunFolder
    number: int

    def withdraw(self) -> None:
        """End the ownership, so that another driver may claim the run."""
        with suppress(FileNotFoundError):  # the whole run was deleted
            # Empty the file instead of deleting it: a slow process must not claim the same number.
            write_json(_path(self.run, self.number), {})


def claim(run: RunFolder, driver: DriverAddress) -> Claim:
    """Claim the run for this driver, which must listen at `driver` already: others connect to check that it is alive.

    Raises UsageError if another driver owns the run.
    """
    number = _highest(run)
    process = {"machine": socket.gethostname(), "pid": os.getpid(), "ticks": start_ticks(os.getpid())}
    while True:
        check_free(run, number)
        number += 1
        if write_first(path := _path(run, number), json_text(path, {**driver._asdict(), **process})):
            if (highest := _highest(run)) == number:
                break
            # Higher claims exist: this number had been used and deleted before, so the claim is void.
            _path(run, number).unlink(missing_ok=True)
            number = highest
    for former in _numbers(run):
        if former < number:
            _path(run, former).unlink(missing_ok=True)
    return Claim(run, number)


def check_free(run: RunFolder, number: int | None = None) -> None:
    """Raise UsageError if the driver of the claim with this number (None: the highest one) is alive."""
    found = read_json(_path(run, _highest(run) if number is None else number))
    if found and _lives(run, found):
        raise UsageError(
            f"{run.path}: another program uses this run; its driver listens on {found['host']}:{found['port']}; wait "
            "for its end, or name another run"
        )


def is_abandoned(run: RunFolder) -> bool:
    """Return whether the driver died without withdrawing its claim; False if it was on another machine."""
    found = read_json(_path(run, _highest(run)))
    return found is not None and found.get("machine") == socket.gethostname() and not _lives(run, found)


def _lives(run: RunFolder, found: dict[str, Any]) -> bool:
    """Return whether the driver of a claim is alive; `found`: the content of the claim's file."""
    # A driver on this machine may be too busy to answer, so its process is looked up. On another machine only an answer
    # proves that the driver is alive.
    if found["machine"] == socket.gethostname() and is_running(found["pid"], found["ticks"]):
        return True
    return answers(run, DriverAddress(found["host"], found["port"]))


def _highest(run: RunFolder) -> int:
    """Return the number of the valid claim; 0 if there is no claim."""
    return max(_numbers(run), default=0)


def _numbers(run: RunFolder) -> list[int]:
    with suppress(FileNotFoundError):  # the whole run was deleted
        return [int(path.stem) for path in run.drivers.iterdir() if path.stem.isdecimal()]
    return []


def _path(run: RunFolder, number: int) -> Path:
    return run.drivers / f"{number}.json"
