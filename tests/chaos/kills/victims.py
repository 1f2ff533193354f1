"""Find the processes of one trial or TorchTrainer, by kind."""

from __future__ import annotations

import os
from pathlib import Path

from tests import processes
from tests.chaos.kills.orders import FOLDER

_LAUNCHERS = (
    "hpc_det.launch.direct",
    "torch.distributed.run",
    "deepspeed.launcher.launch",
    "mpirun",
    "mpiexec",
    "tests/e2e/warm/launcher.py",
)
_FORK_SERVER, _NODE_AGENT = "hpc_det.node.fork_server", "hpc_det.sgd.elastic.node"


class Processes:
    """`kills`: the folder of the orders; `trial`: the trial's folder."""

    def __init__(self, kills: Path, trial: Path) -> None:
        self._trial = trial
        self._mark = f"{FOLDER}={kills}"

    def victims(self, kind: str) -> list[int]:
        """Return the PIDs of running processes of one of the kinds below; "rank 1" may be any rank."""
        match kind.split():
            case ["self"]:
                return [os.getpid()]
            case ["rank", number]:
                return processes.ranks(self._trial, rank=int(number))
            case ["ranks"]:
                return processes.ranks(self._trial)
            case ["launcher"]:
                return self._launchers()
            case ["agent"]:
                return processes.agents(self._trial)
            case ["first", "agent"]:
                return processes.agents(self._trial)[:1]
            case ["last", "agent"]:
                return processes.agents(self._trial)[-1:]
            case ["starter"]:
                return processes.running("hpc_det.launch.on_nodes", self._trial)
            case ["job"]:
                return processes.running("hpc_det.launch.job", self._trial.parents[1])
            case ["everything"]:
                return self.marked()
            case ["a", "worker"]:
                return self._workers()[-1:]
            case ["workers"]:
                return self._workers()
            case ["fork", "server"]:
                return self._fork_servers()
            case ["node", "agent"]:
                return self._marked_with(_NODE_AGENT)
            case ["driver"]:
                return self._marked_with("driver.py")
        raise ValueError(kind)

    def marked(self) -> list[int]:
        """Return all processes of the experiment, also ranks that were forked from a process outside of it."""
        marked = {pid for pid in processes.pids() if self._mark in processes.words(pid, "environ")}
        return sorted(marked | {*processes.ranks(self._trial)})

    def commands(self) -> dict[int, str]:
        """Return the command lines of the `marked` processes that run."""
        commands = {pid: " ".join(processes.words(pid, "cmdline")) for pid in self.marked()}
        return {pid: command for pid, command in commands.items() if command}

    def _launchers(self) -> list[int]:
        """Return the launchers below an agent. Some replace their process by torchrun or MPI; `direct` is forked from
        the agent or its fork server, and has their command line.
        """
        agents = {*processes.agents(self._trial)}
        found = [pid for pid in processes.pids() if any(each in word for word in _command(pid) for each in _LAUNCHERS)]
        launchers = [pid for pid in found if agents & {*processes.ancestors(pid)} and pid not in agents]
        servers = {pid for pid in self._marked_with(_FORK_SERVER) if _parent(pid) in agents}
        forked = [pid for pid in processes.pids() if _parent(pid) in agents | servers and pid not in servers]
        return launchers + [pid for pid in forked if _command(pid) == _command(_parent(pid))]

    def _fork_servers(self) -> list[int]:
        agents = self._marked_with(_NODE_AGENT)
        return [pid for pid in self._marked_with(_FORK_SERVER) if processes.ancestors(pid)[0] in agents]

    def _workers(self) -> list[int]:
        """Return the workers, which are forked from the fork server, so that all have the same command line."""
        fork_servers = self._fork_servers()
        return [pid for pid in self._marked_with(_FORK_SERVER) if processes.ancestors(pid)[0] in fork_servers]

    def _marked_with(self, word: str) -> list[int]:
        return [pid for pid in self.marked() if any(each.endswith(word) for each in _command(pid))]


def _parent(pid: int) -> int:
    """Return the PID of the parent; 0 if the process has ended."""
    return next(iter(processes.ancestors(pid)), 0)


def _command(pid: int) -> list[str]:
    return processes.words(pid, "cmdline")
