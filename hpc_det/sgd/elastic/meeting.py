"""How the agents of a run find its driver, which addresses may call it, and whose run it is: by files of the run.

A run is one driver's at a time, on whatever machine. Claims are numbered, and the highest counts. Each is made by
link(2), which succeeds for one process only, and only by one that has found the claim before it withdrawn, or its
driver dead. So a driver that was KILLed keeps nobody out, and of several that find it dead at the same time one comes
next. The number of a claim is never given again.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hpc_det.errors import HpcDetError, UsageError
from hpc_det.node.files import write_first
from hpc_det.node.json_files import read_json, write_json
from hpc_det.node.lines import Line, connect
from hpc_det.node.network import awaited, tries
from hpc_det.node.process import is_running, start_ticks
from hpc_det.store.run_folder import RunFolder

ANSWER_S = 0.5
"""For a driver that may have been killed."""
TRY_S = 5.0
"""Then the file is read again: the driver may have been started anew, elsewhere."""
LOOK_S = 0.2
"""At most so often the folder is looked through for the address of an unknown caller: anybody may knock."""


class DriverAddress(NamedTuple):
    host: str
    port: int


def announce(run: RunFolder, host: str, port: int) -> None:
    """The driver listens there from now on."""
    write_json(run.driver, DriverAddress(host, port)._asdict())


def withdraw(run: RunFolder) -> None:
    """Nobody shall call any more."""
    run.driver.unlink(missing_ok=True)


def await_driver(run: RunFolder, within_s: float) -> DriverAddress:
    """Raises HpcDetError where no driver has announced itself by then."""
    data = awaited(run.driver, within_s)
    if data is None:
        raise HpcDetError(f"{run.driver}: no driver in {within_s:.0f} s; does this node see the driver's folder?")
    return DriverAddress(**data)


def call_driver(run: RunFolder, node: str, identity: dict[str, Any], within_s: float) -> Line:
    """An agent's line to its driver, with the run's own key; `node` is the name of the file that lets it in.

    Raises HpcDetError where there is none in time.
    """
    key = run.key()
    for left_s in tries(within_s):
        driver = await_driver(run, left_s)
        _check_in(run, node, driver)
        try:
            return connect(*driver, key, identity, min(TRY_S, left_s), listener="the driver")
        except HpcDetError as error:  # it may be a former driver that is written there
            problem = error
    raise problem


def answers(run: RunFolder, driver: DriverAddress) -> bool:
    """Whether it still listens: only it can show that it holds the key of the run."""
    name = f"driver-{os.getpid()}"
    try:
        _check_in(run, name, driver)
        connect(*driver, run.key(), {"role": "driver"}, ANSWER_S, listener="the driver").close()
    except HpcDetError:
        return False
    finally:
        (run.nodes / name).unlink(missing_ok=True)
    return True


def _check_in(run: RunFolder, node: str, driver: DriverAddress) -> None:
    write_json(run.nodes / node, {"address": _address_towards(driver)})


def _address_towards(driver: DriverAddress) -> str:
    """Of the interface from which this node speaks to the driver. Connecting UDP sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(driver)
        except OSError as error:
            raise HpcDetError(f"{driver.host}: this node has no way to the driver: {error.strerror}") from None
        return str(probe.getsockname()[0])


class Guests:
    """Who may call a driver that listens on `host`: only this machine, or all nodes that have checked in."""

    def __init__(self, run: RunFolder, host: str) -> None:
        """Those who checked in with a former driver are forgotten: they check in again."""
        self._folder = run.nodes
        self._is_local = ipaddress.ip_address(host).is_loopback
        self._addresses: set[str | None] = set()
        self._next_look = 0.0
        for path in self._files():
            path.unlink(missing_ok=True)

    def are_allowed_from(self, address: str) -> bool:
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
    with suppress(OSError, ValueError, LookupError, TypeError):
        return str(json.loads(path.read_bytes())["address"])
    return None


@dataclass(frozen=True)
class Claim:
    run: RunFolder
    number: int

    def withdraw(self) -> None:
        """The run is nobody's now. The file stays: whoever is slow shall not take its number."""
        with suppress(FileNotFoundError):  # the whole run is gone
            write_json(_path(self.run, self.number), {})


def claim(run: RunFolder, driver: DriverAddress) -> Claim:
    """For a driver that listens there already: others ask it. Raises UsageError where another one has the run."""
    number = _highest(run)
    process = {"machine": socket.gethostname(), "pid": os.getpid(), "ticks": start_ticks(os.getpid())}
    while True:
        check_free(run, number)
        number += 1
        if write_first(_path(run, number), json.dumps({**driver._asdict(), **process})):
            if (highest := _highest(run)) == number:
                break
            _path(run, number).unlink(missing_ok=True)  # its number was over long ago
            number = highest
    for former in _numbers(run):
        if former < number:
            _path(run, former).unlink(missing_ok=True)
    return Claim(run, number)


def check_free(run: RunFolder, number: int | None = None) -> None:
    """Raises UsageError where the driver of the claim with this number, the highest if None, still lives."""
    found = read_json(_path(run, _highest(run) if number is None else number))
    if found and _lives(run, found):
        raise UsageError(
            f"{run.path}: another program drives this run, on {found['host']}:{found['port']}; wait for it, or name "
            "another run"
        )


def is_abandoned(run: RunFolder) -> bool:
    """Whether its driver has died without a word; of one on another machine that is never sure."""
    found = read_json(_path(run, _highest(run)))
    return found is not None and found.get("machine") == socket.gethostname() and not _lives(run, found)


def _lives(run: RunFolder, found: dict[str, Any]) -> bool:
    """A process of this machine may be too busy to answer. Of another one no more than the answer can be known."""
    if found["machine"] == socket.gethostname() and is_running(found["pid"], found["ticks"]):
        return True
    return answers(run, DriverAddress(found["host"], found["port"]))


def _highest(run: RunFolder) -> int:
    return max(_numbers(run), default=0)


def _numbers(run: RunFolder) -> list[int]:
    with suppress(FileNotFoundError):  # the whole run is gone
        return [int(path.stem) for path in run.drivers.iterdir() if path.stem.isdecimal()]
    return []


def _path(run: RunFolder, number: int) -> Path:
    return run.drivers / f"{number}.json"
