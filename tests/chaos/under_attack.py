"""Attacks the listening ports of processes, and measures what these processes use meanwhile."""

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
"""Files that a process opens and closes by itself, such as those of a checkpoint."""
MEMORY = 150 * 2**20
"""By how many bytes a process may grow, a save included."""


class Recordings:
    """What every process of a job that starts with `variables` sends on its connections."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        python_path = os.pathsep.join(filter(None, [str(TAP), str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        self.variables = {"CHAOS_TAP": str(folder), "PYTHONPATH": python_path}

    def files(self) -> list[Path]:
        """One for each connection, the oldest first."""
        return sorted(self.folder.iterdir())


@dataclass(frozen=True)
class AttackerProcess:
    kind: str
    process: subprocess.Popen[bytes]
    targets: list[Target]
    needed: int
    """Contacts with each target."""
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
    """All kinds at all ports, by a process for each kind and each network."""

    attackers: list[AttackerProcess]

    def until(self, tries: int) -> None:
        """Each process has made so many connections, or sent so many packets, and has reached each of its targets."""
        wait_for(lambda: all(each.has_made(tries) for each in self.attackers), DEADLINE_S, self._state)

    def _state(self) -> str:
        return "\n".join(each.state() for each in self.attackers)


@contextmanager
def attack(
    kinds: Collection[str], pids: Collection[int], listeners: Mapping[str, Collection[int]], recordings: Recordings
) -> Iterator[Attack]:
    """On the ports of these processes, from every network in which one of them runs.

    `listeners`: ports that have to be among them, by who listens there.
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
    """In the network of that process."""
    enter = [] if _network(pid) == _network(os.getpid()) else ["nsenter", f"--net=/proc/{pid}/ns/net"]
    command = [*enter, sys.executable, "-m", "tests.chaos.attacks", kind, str(orders), str(contacts)]
    contacts.touch()
    with subprocess.Popen(command, cwd=REPOSITORY) as process:
        try:
            yield process
        finally:
            process.kill()


def _targets(pids: Collection[int], listeners: Mapping[str, Collection[int]]) -> dict[int, list[Target]]:
    """By one process of each network: all that can be reached from there."""
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
    """Of whoever listens at all addresses, that of loopback in IPv4: `::` includes it unless somebody forbids that."""
    address = ipaddress.ip_address(listens.address)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    return ("127.0.0.1" if address.is_unspecified else str(address)), listens.port


def _is_routed(listens: Listening) -> bool:
    address = ipaddress.ip_address(listens.address)
    return not (address.is_loopback or address.is_unspecified)


def _network(pid: int) -> str:
    """Empty where the process has ended."""
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
    """How many are open, by process."""
    memory: dict[int, int]

    @classmethod
    def by(cls, pids: Collection[int]) -> Usage:
        """Without processes that have ended."""
        made = cls({}, {})
        for pid in pids:
            with suppress(FileNotFoundError, ProcessLookupError):
                files, pages = len(os.listdir(f"/proc/{pid}/fd")), Path(f"/proc/{pid}/statm").read_text().split()[1]
                made.files[pid], made.memory[pid] = files, int(pages) * resource.getpagesize()
        return made

    def check(self, without: Collection[int] = ()) -> None:
        """Compare with now. `without`: processes that hold a store of PyTorch's, which accepts every connection."""
        now = Usage.by(self.files)
        for pid, files in now.files.items():
            is_bounded = pid in without or files <= self.files[pid] + STRANGERS + OTHER_FILES
            assert is_bounded, f"process {pid} has {files} open files, {self.files[pid]} before"
            grown = now.memory[pid] - self.memory[pid]
            assert grown <= MEMORY, f"process {pid} has {grown >> 20} MiB more than before"

    def is_back(self) -> bool:
        """Return whether these processes have closed the files of the attack."""
        return all(files <= self.files[pid] + OTHER_FILES for pid, files in Usage.by(self.files).files.items())
