"""Attack the listening ports of processes, and measure the resources that these processes use meanwhile."""

from __future__ import annotations

import ipaddress
import json
import os
import resource
import subprocess
import sys
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_det.node.line_server import STRANGERS
from tests.chaos.attacks import COUNTS, Target, contacts_needed
from tests.listening import Listening, listening
from tests.wait import DEADLINE_S, wait_for

REPOSITORY = Path(__file__).parents[2]
TAP = Path(__file__).with_name("tap")
FEW_FILES = 1024
"""The soft limit of open files on many clusters."""
OTHER_FILES = 40
"""Number of files that a process opens and closes in normal work, such as those of a checkpoint."""
MEMORY = 150 * 2**20
"""Largest growth of a process [bytes], a save included."""


class Recordings:
    """Records what every process of a job that starts with `variables` sends on its connections."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        python_path = os.pathsep.join(filter(None, [str(TAP), str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        self.variables = {"CHAOS_TAP": str(folder), "PYTHONPATH": python_path}

    def files(self) -> list[Path]:
        """Return one file per connection, the oldest first."""
        return sorted(self.folder.iterdir())


@dataclass(frozen=True)
class AttackerProcess:
    kind: str
    process: subprocess.Popen[bytes]
    targets: list[Target]
    needed: int
    """Number of contacts with each target that the attack needs."""
    file: Path

    def has_made(self, tries: int) -> bool:
        contacts = self._contacts()
        return sum(contacts) >= tries and min(contacts) >= self.needed

    def state(self) -> str:
        contacts = dict(zip(self.targets, self._contacts(), strict=True))
        return f"{self.kind}: contacts by target: {contacts}, {self.needed} needed; exit code {self.process.poll()}"

    def _contacts(self) -> Sequence[int]:
        return array(COUNTS, self.file.read_bytes()) or [0] * len(self.targets)


@dataclass(frozen=True)
class Attack:
    """Attacks of all kinds on all ports, with one process for each kind and each network."""

    attackers: list[AttackerProcess]

    def until(self, tries: int) -> None:
        """Wait until each process has made this many connections, or sent this many packets, and has reached all its
        targets.
        """
        wait_for(lambda: all(each.has_made(tries) for each in self.attackers), DEADLINE_S, self._state)

    def _state(self) -> str:
        return "\n".join(each.state() for each in self.attackers)


@contextmanager
def attack(
    kinds: Collection[str], pids: Collection[int], listeners: Mapping[str, Collection[int]], recordings: Recordings
) -> Iterator[Attack]:
    """Attack the ports of these processes, from every network in which one of them runs.

    `listeners`: ports that must be among them, by name of the listener.
    """
    scratch = recordings.folder.with_name("orders")
    scratch.mkdir(exist_ok=True)
    recorded = recordings.files()
    made = Attack([])
    with ExitStack() as running:
        for pid, targets in _targets(pids, listeners).items():
            for kind in kinds:
                number = len(list(scratch.iterdir()))
                orders, contacts = scratch / f"{number}.json", scratch / f"{number}.contacts"
                orders.write_text(json.dumps({"targets": targets, "recordings": [*map(str, recorded)]}))
                process = running.enter_context(_started(pid, kind, orders, contacts))
                needed = contacts_needed(kind, recorded)
                made.attackers.append(AttackerProcess(kind, process, targets, needed, contacts))
        yield made
        assert all(each.process.poll() is None for each in made.attackers), f"an attacker has ended\n{made._state()}"


@contextmanager
def _started(pid: int, kind: str, orders: Path, contacts: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start an attacker in the network of process `pid`."""
    enter = [] if _network(pid) == _network(os.getpid()) else ["nsenter", f"--net=/proc/{pid}/ns/net"]
    command = [*enter, sys.executable, "-m", "tests.chaos.attacks", kind, str(orders), str(contacts)]
    contacts.touch()
    with subprocess.Popen(command, cwd=REPOSITORY) as process:
        try:
            yield process
        finally:
            process.kill()


def _targets(pids: Collection[int], listeners: Mapping[str, Collection[int]]) -> dict[int, list[Target]]:
    """Return all ports that can be reached from each network, by one process of the network."""
    inside = {network: pid for pid in sorted(pids, reverse=True) if (network := _network(pid))}
    ports = [(inside[network], each) for pid in pids if (network := _network(pid)) for each in listening(pid)]
    found = {
        pid: sorted({_address(each) for at, each in ports if at == pid or _is_routed(each)}) for pid in inside.values()
    }
    attacked = {port for targets in found.values() for _, port in targets}
    for listener, its_ports in listeners.items():
        assert its_ports, f"{listener} does not listen"
        assert attacked.issuperset(its_ports), f"{listener} listens at {its_ports}, and the attack is on {found}"
    return {pid: targets for pid, targets in found.items() if targets}


def _address(listens: Listening) -> Target:
    """Return the address to attack; for a listener on all addresses, IPv4's loopback: `::` includes it by default."""
    address = ipaddress.ip_address(listens.address)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    return ("127.0.0.1" if address.is_unspecified else str(address)), listens.port


def _is_routed(listens: Listening) -> bool:
    address = ipaddress.ip_address(listens.address)
    return not (address.is_loopback or address.is_unspecified)


def _network(pid: int) -> str:
    """Return the network namespace of a process, or an empty string if the process has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return os.readlink(f"/proc/{pid}/ns/net")
    return ""


def allow_few_files(pids: Collection[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(FEW_FILES, most), most))


@dataclass(frozen=True)
class Usage:
    files: dict[int, int]
    """Number of open files, by process."""
    memory: dict[int, int]

    @classmethod
    def by(cls, pids: Collection[int]) -> Usage:
        """Measure the processes that have not ended."""
        made = cls({}, {})
        for pid in pids:
            with suppress(FileNotFoundError, ProcessLookupError):
                files, pages = len(os.listdir(f"/proc/{pid}/fd")), Path(f"/proc/{pid}/statm").read_text().split()[1]
                made.files[pid], made.memory[pid] = files, int(pages) * resource.getpagesize()
        return made

    def check(self, without: Collection[int] = ()) -> None:
        """Compare with the present usage. `without`: processes that hold a PyTorch store, which accepts every
        connection.
        """
        now = Usage.by(self.files)
        for pid, files in now.files.items():
            is_bounded = pid in without or files <= self.files[pid] + STRANGERS + OTHER_FILES
            assert is_bounded, f"process {pid} has {files} open files, {self.files[pid]} before"
            grown = now.memory[pid] - self.memory[pid]
            assert grown <= MEMORY, f"process {pid} has {grown >> 20} MiB more than before"

    def is_back(self) -> bool:
        """Return whether these processes have closed the files of the attack."""
        return all(files <= self.files[pid] + OTHER_FILES for pid, files in Usage.by(self.files).files.items())
