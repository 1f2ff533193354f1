"""Processes whose listening ports other processes attack, and what they use meanwhile."""

from __future__ import annotations

import ipaddress
import json
import os
import resource
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_det.node.switchboard import STRANGERS
from tests.listening import Listening, listening
from tests.wait import DEADLINE_S, wait_for

REPOSITORY = Path(__file__).parents[2]
TAP = Path(__file__).with_name("tap")
FEW_FILES = 1024
"""So many may a process have open on many clusters."""
OTHER_FILES = 40
"""That a process opens and closes by itself, such as those of a checkpoint."""
MEMORY = 150 * 2**20
"""By so much a process may grow, a save included."""


class Recordings:
    """What every process of a job that starts with `variables` sends on its connections."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        python_path = os.pathsep.join(filter(None, [str(TAP), str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        self.variables = {"CHAOS_TAP": str(folder), "PYTHONPATH": python_path}

    def __len__(self) -> int:
        return len(list(self.folder.iterdir()))


@dataclass
class Attack:
    """All kinds at all ports, by a process for each kind and each network."""

    processes: list[subprocess.Popen[bytes]]
    counts: list[Path]

    def until(self, tries: int) -> None:
        """So many connections or packets have come from each process."""
        wait_for(lambda: min(map(_number_in, self.counts)) >= tries, DEADLINE_S, self._state)

    def _state(self) -> str:
        return f"{[_number_in(count) for count in self.counts]}, {[each.poll() for each in self.processes]}"


@contextmanager
def attack(kinds: Collection[str], pids: Collection[int], recordings: Recordings) -> Iterator[Attack]:
    """On the ports of these processes, from every network in which one of them runs."""
    scratch = recordings.folder.with_name("orders")
    scratch.mkdir(exist_ok=True)
    made = Attack([], [])
    with ExitStack() as running:
        for pid, targets in _targets(pids).items():
            for kind in kinds:
                number = len(list(scratch.iterdir()))
                orders, count = scratch / f"{number}.json", scratch / f"{number}.count"
                orders.write_text(json.dumps({"targets": targets, "recordings": str(recordings.folder)}))
                process = running.enter_context(_attacker(pid, kind, orders, count))
                made.processes.append(process)
                made.counts.append(count)
        yield made
        assert [each.poll() for each in made.processes] == [None] * len(made.processes), "an attacker has ended"


@contextmanager
def _attacker(pid: int, kind: str, orders: Path, count: Path) -> Iterator[subprocess.Popen[bytes]]:
    """In the network of that process."""
    enter = [] if _network(pid) == _network(os.getpid()) else ["nsenter", f"--net=/proc/{pid}/ns/net"]
    command = [*enter, sys.executable, "-m", "tests.chaos.attacks", kind, str(orders), str(count)]
    count.touch()
    with subprocess.Popen(command, cwd=REPOSITORY) as process:
        try:
            yield process
        finally:
            process.kill()


def _targets(pids: Collection[int]) -> dict[int, list[tuple[str, int]]]:
    """By one process of each network: all that can be reached from there."""
    inside = {network: pid for pid in sorted(pids, reverse=True) if (network := _network(pid))}
    ports = [(inside[network], each) for pid in pids if (network := _network(pid)) for each in listening(pid)]
    found = {
        pid: sorted({_address(each) for at, each in ports if at == pid or _is_routed(each)}) for pid in inside.values()
    }
    assert any(found.values()), "nothing listens"
    return {pid: targets for pid, targets in found.items() if targets}


def _address(listens: Listening) -> tuple[str, int]:
    address = ipaddress.ip_address(listens.address)
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or ipaddress.ip_address("0.0.0.0")
    return ("127.0.0.1" if address.is_unspecified else str(address)), listens.port


def _is_routed(listens: Listening) -> bool:
    address = ipaddress.ip_address(listens.address)
    return not (address.is_loopback or address.is_unspecified)


def _network(pid: int) -> str:
    """Empty where the process has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return os.readlink(f"/proc/{pid}/ns/net")
    return ""


def _number_in(file: Path) -> int:
    return int(file.read_text() or 0)


def allow_few_files(pids: Collection[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(FEW_FILES, most), most))


@dataclass(frozen=True)
class Used:
    files: dict[int, int]
    """How many are open, by process."""
    memory: dict[int, int]

    @classmethod
    def by(cls, pids: Collection[int]) -> Used:
        """Those that have not ended."""
        made = cls({}, {})
        for pid in pids:
            with suppress(FileNotFoundError, ProcessLookupError):
                files, pages = len(os.listdir(f"/proc/{pid}/fd")), Path(f"/proc/{pid}/statm").read_text().split()[1]
                made.files[pid], made.memory[pid] = files, int(pages) * resource.getpagesize()
        return made

    def check(self, without: Collection[int] = ()) -> None:
        """They use little more now. `without`: processes that hold a store of PyTorch's, which accepts everybody."""
        now = Used.by(self.files)
        for pid, files in now.files.items():
            is_bounded = pid in without or files <= self.files[pid] + STRANGERS + OTHER_FILES
            assert is_bounded, f"process {pid} has {files} open files, {self.files[pid]} before"
            grown = now.memory[pid] - self.memory[pid]
            assert grown <= MEMORY, f"process {pid} has {grown >> 20} MiB more than before"

    def is_back(self) -> bool:
        """No file is left open."""
        return all(files <= self.files[pid] + OTHER_FILES for pid, files in Used.by(self.files).files.items())
