"""Who is who among the processes of one trial, by what Linux tells of them (proc(5))."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.chaos.kills.orders import FOLDER

_LAUNCHERS = (
    "hpc_det.launch.direct",
    "torch.distributed.run",
    "deepspeed.launcher.launch",
    "mpirun",
    "mpiexec",
    "tests/e2e/warm/launcher.py",
)


class Processes:
    """As they are now. `kills`: the folder of the orders; `trial`: the trial's folder."""

    def __init__(self, kills: Path, trial: Path) -> None:
        self._trial = trial
        self._mark = f"{FOLDER}={kills}"
        self._words = {pid: _read(pid, "cmdline").split("\0") for pid in _pids()}

    def victims(self, kind: str) -> list[int]:
        """Those below, with "rank 1" for any rank."""
        match kind.split():
            case ["self"]:
                return [os.getpid()]
            case ["rank", number]:
                return self.ranks(int(number))
            case ["ranks"]:
                return self.ranks()
            case ["launcher"]:
                return self._launchers()
            case ["agent"]:
                return self._agents()
            case ["first", "agent"]:
                return self._agents()[:1]
            case ["last", "agent"]:
                return self._agents()[-1:]
            case ["starter"]:
                return self._running("hpc_det.launch.on_nodes", str(self._trial))
            case ["job"]:
                return self._running("hpc_det.launch.job", str(self._trial.parents[1]))
            case ["everything"]:
                return self.marked()
            case ["a", "worker"]:
                return self._workers()[-1:]
            case ["workers"]:
                return self._workers()
            case ["nursery"]:
                return self._nurseries()
            case ["node", "agent"]:
                return self._marked_with("hpc_det.launch.elastic.node")
            case ["driver"]:
                return self._marked_with("driver.py")
        raise ValueError(kind)

    def marked(self) -> list[int]:
        """All of the experiment, also ranks that were forked from a process outside of it."""
        return sorted({pid for pid in self._words if self._mark in _read(pid, "environ").split("\0")} | {*self.ranks()})

    def commands(self) -> dict[int, str]:
        """Of `marked`, those that run."""
        return {pid: " ".join(self._words[pid]) for pid in self.marked() if any(self._words[pid])}

    def ranks(self, number: int | None = None) -> list[int]:
        """Those that print into the log of a rank."""
        which = r"\d+" if number is None else number
        log = re.compile(rf"{re.escape(str(self._trial))}/logs/attempt-\d+/rank-{which}.log")
        return [pid for pid in self._words if log.fullmatch(_prints_to(pid))]

    def _nurseries(self) -> list[int]:
        agents = self._marked_with("hpc_det.launch.elastic.node")
        return [pid for pid in self._marked_with("hpc_det.sgd.rank.nursery") if _ancestors(pid)[0] in agents]

    def _workers(self) -> list[int]:
        """Forked from the nursery, so that all look alike."""
        nurseries = self._nurseries()
        return [pid for pid in self._marked_with("hpc_det.sgd.rank.nursery") if _ancestors(pid)[0] in nurseries]

    def _marked_with(self, word: str) -> list[int]:
        return [pid for pid in self.marked() if any(each.endswith(word) for each in self._words[pid])]

    def _launchers(self) -> list[int]:
        """Below an agent. Some replace their process by torchrun's or MPI's."""
        agents = set(self._agents())
        found = [
            pid for pid, words in self._words.items() if any(each in word for word in words for each in _LAUNCHERS)
        ]
        return [pid for pid in found if agents & set(_ancestors(pid)) and pid not in agents]

    def _agents(self) -> list[int]:
        return self._running("hpc_det.launch.agent", str(self._trial))

    def _running(self, module: str, word: str) -> list[int]:
        """By number. A shell that starts one has both words in a single one."""
        return sorted(pid for pid, words in self._words.items() if module in words and word in words)


def _ancestors(pid: int) -> list[int]:
    found = list[int]()
    while pid > 1:
        status = _read(pid, "stat").rpartition(")")[2].split()
        pid = int(status[1]) if status else 0
        found.append(pid)
    return found


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""


def _prints_to(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/1")
    except OSError:
        return ""
