"""Processes whose listening ports other processes attack, and what they use meanwhile."""

from __future__ import annotations

import ipaddress
import json
import os
import resource
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
    """By a process of each network: all that can be reached from there."""
    ports = {pid: listening(pid) for pid in pids}
    networks = {_network(pid): pid for pid in pids if ports[pid]} or {_network(pid): pid for pid in pids}
    found: dict[int, list[tuple[str, int]]] = {}
    for network, inside in networks.items():
        reached = [
            _address(each) for pid, its in ports.items() for each in its if _network(pid) == network or _is_routed(each)
        ]
        found[inside] = sorted(set(reached))
    return {inside: targets for inside, targets in found.items() if targets}


def _address(listens: Listening) -> tuple[str, int]:
    address = ipaddress.ip_address(listens.address)
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or ipaddress.ip_address("0.0.0.0")
    return ("127.0.0.1" if address.is_unspecified else str(address)), listens.port


def _is_routed(listens: Listening) -> bool:
    address = ipaddress.ip_address(listens.address)
    return not (address.is_loopback or address.is_unspecified)


def _network(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


def _number_in(file: Path) -> int:
    return int(file.read_text() or 0)


def allow_few_files(pids: Collection[int]) -> None:
    for pid in pids:
        _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(FEW_FILES, most), most))


@dataclass(frozen=True)
class Used:
    files: dict[int, int]
    memory: dict[int, int]

    @classmethod
    def by(cls, pids: Sequence[int]) -> Used:
        files = {pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in pids}
        memory = {pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() for pid in pids}
        return cls(files, memory)

    def check(self, now: Used, without: Collection[int] = ()) -> None:
        """`without`: processes whose files PyTorch's store fills, up to what they may have."""
        grown = {pid: size >> 20 for pid, size in now.memory.items() if size > self.memory[pid] + MEMORY}
        assert not grown, f"MiB by process: {grown}; before: {self.memory}"
        most = {
            pid: FEW_FILES if pid in without else count + STRANGERS + OTHER_FILES for pid, count in self.files.items()
        }
        assert all(now.files[pid] <= most[pid] for pid in most), f"{now.files} open files, {self.files} before"

    def is_back(self, now: Used) -> bool:
        """No file is left open."""
        return all(now.files[pid] <= count + OTHER_FILES for pid, count in self.files.items())
