"""Starts one agent on each host of a PBS job, and stays until all of them have ended: what srun does on Slurm.

    python3 -m hpc_det.launch.on_nodes (pbsdsh | pbs_tmrsh | mpiexec) FOLDER COMMAND... TRIAL_FOLDER ATTEMPT WORKER

The starters of PBS hand on no environment, print into the job's own log and tell little of how a process ended, and
TERM ends them at once. So a folder below FOLDER (0700), gone afterwards, holds a script with the environment, which
runs `hpc_det.launch.pbs_node` on each host, the orders to its agents, and the exit code of each.

Exit code 0 when all agents have ended with 0, else that of the first one that has not; the others are ended then.
"""

from __future__ import annotations

import os
import re
import selectors
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hpc_det.errors import UsageError
from hpc_det.node.files import write_atomic
from hpc_det.node.process import STOP_SIGNALS, SignalPipe, adopt_orphans, end_descendants, shielded
from hpc_det.node.suspension import AwakeClock
from hpc_det.schedulers.pbs.scheduler import Pbs
from hpc_det.store.attempt import Failure, failure_now, note_failure
from hpc_det.store.folders import TrialFolder

ORDERS, BEGUN, EXIT = "orders", "begun-", "exit-"
"""The files that both sides know: words for the agents, "TERM" or "end", and by the rank of each that its host has
begun, and its exit code.
"""
POLL_S = 0.5
START_S = 120.0
"""A host that has not begun by then is lost: PBS may leave its job alone for minutes, and a starter would wait on."""
STARTER_LEAVES_S = 5.0
"""How long starters may take to end once the exit code of every agent is there: one whose MoM is dead would wait on."""
LEAVE_S = 15.0
"""How long all may take to leave after the order to end: a starter whose host is lost would wait for ever."""

# What PBS, or a site's hook for GPUs, sets on a host counts there; all else is as in the script.
_OF_THE_HOST = re.compile(r"PBS_\w+|HOSTNAME|\w+_VISIBLE_DEVICES")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RANK_BY_MPIEXEC = "${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-$PALS_RANKID}}"


class OnNodes:
    def __init__(self, folder: Path, hosts: int) -> None:
        self._folder = folder
        self._hosts = hosts
        self._codes: dict[int, int] = {}
        """Of the agents that have ended, by rank, in the order in which they were seen."""
        self._signals = SignalPipe((*STOP_SIGNALS, signal.SIGCHLD))
        self._parent = os.getppid()
        self._running: dict[subprocess.Popen[bytes], range] = {}
        """The starters, and the ranks of the agents that each has started."""
        self.silent: list[int] = []
        """The ranks on hosts that have not begun."""

    def run(self, commands: Iterator[tuple[range, list[str]]]) -> int:
        try:
            self._running = {_started(command): ranks for ranks, command in commands}
        except OSError as error:
            raise UsageError(
                f"cluster.start_agents_with: {error.filename}: {error.strerror}; put its folder on the PATH of jobs "
                "with `setup`, or choose another of pbsdsh, pbs_tmrsh and mpiexec"
            ) from None
        self._watch()
        return 1 if self.silent else next((code for code in self._codes.values() if code), 0)

    @property
    def mute(self) -> list[int]:
        """The ranks of agents that were gone without a word, or that nobody could reach."""
        return [rank for rank in range(self._hosts) if self._codes.get(rank, -1) < 0] if self._is_awaited else []

    @property
    def _is_awaited(self) -> bool:
        """PBS kills the sessions that it knows, and not this one: without its parent it has to leave by itself."""
        return os.getppid() == self._parent

    def _watch(self) -> None:
        clock, start_by, give_up_at = AwakeClock(), START_S, float("inf")
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals.fd, selectors.EVENT_READ)
            while self._running and clock.seconds() < give_up_at and self._is_awaited:
                selector.select(timeout=POLL_S)
                if set(self._signals.received()) & set(STOP_SIGNALS):
                    self._order("TERM")
                self._look()
                if clock.seconds() >= start_by:
                    self._give_silent_up()
                    start_by = float("inf")
                if give_up_at < float("inf"):
                    continue
                if self.silent or any(self._codes.values()):
                    self._order("end")
                    give_up_at = clock.seconds() + LEAVE_S
                elif len(self._codes) == self._hosts:
                    give_up_at = clock.seconds() + STARTER_LEAVES_S

    def _look(self) -> None:
        """Who has ended. The files are read after the processes are seen: an agent's code comes before its end."""
        ended = [process for process in self._running if process.poll() is not None]
        for rank in set(range(self._hosts)) - self._codes.keys():
            if (code := self._code(rank)) is not None:
                self._codes[rank] = code
        for process in ended:
            for rank in self._running.pop(process):
                self._codes.setdefault(rank, -1)

    def _give_silent_up(self) -> None:
        """Nobody waits for those any more."""
        self.silent = [rank for rank in range(self._hosts) if not (self._folder / f"{BEGUN}{rank}").exists()]
        self._running = {process: ranks for process, ranks in self._running.items() if set(ranks) - set(self.silent)}

    def _code(self, rank: int) -> int | None:
        try:
            return int((self._folder / f"{EXIT}{rank}").read_text())
        except FileNotFoundError:
            return None

    def _order(self, word: str) -> None:
        """Appended in place: of a file that they have open before, NFS shows what it says now."""
        with (self._folder / ORDERS).open("a") as file:
            file.write(f"{word}\n")


def _started(command: list[str]) -> subprocess.Popen[bytes]:
    """In a session of its own, where PBS does not send its TERM."""
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=shielded())


def start_commands(
    starter: str, lines: Sequence[str], hosts: Sequence[str], script: str
) -> Iterator[tuple[range, list[str]]]:
    """Command lines that run `script` on the hosts, and the ranks of the agents that each starts."""
    if starter == "mpiexec":
        some = ["-host", ",".join(hosts)] if set(hosts) < set(lines) else []
        yield range(len(hosts)), ["mpiexec", "-n", str(len(hosts)), *some, "/bin/sh", script]
        return
    for rank, host in enumerate(hosts):
        where = ["pbsdsh", "-n", str(lines.index(host)), "--"] if starter == "pbsdsh" else ["pbs_tmrsh", host]
        yield range(rank, rank + 1), [*where, "/bin/sh", script, str(rank)]


def start_script(command: Sequence[str], folder: Path, env: Mapping[str, str], log: str | None) -> bytes:
    """For sh: the environment `env`, and then this host's side of the gang. `log`: where it prints."""
    lines = [_export(name, value) for name, value in env.items() if _NAME.fullmatch(name)]
    node = shlex.join([sys.executable, "-m", "hpc_det.launch.pbs_node", str(folder)])
    to_log = f" >>{shlex.quote(log)} 2>&1" if log else ""
    lines.append(f'exec {node} "${{1:-{_RANK_BY_MPIEXEC}}}" {shlex.join(command)}{to_log}\n')
    return os.fsencode("".join(lines))


def _export(name: str, value: str) -> str:
    setting = f"export {name}={shlex.quote(value)}\n"
    return f'[ "${{{name}+set}}" ] || {setting}' if _OF_THE_HOST.fullmatch(name) else setting


def _own_log() -> str | None:
    """What this process prints into, if that is a file."""
    path = os.readlink("/proc/self/fd/1")
    return path if os.path.isfile(path) else None


def _lost(host: str, said: str, lost: int, hosts: int) -> Failure:
    """The host's own fault, as PBS may see minutes later only, unless most of the gang are lost alike."""
    if lost > hosts / 2:
        return failure_now(None, f"the agent on {host} {said}")
    return Failure(rank=None, host=host, time=time.time(), message=f"its agent {said}", node_lost=True)


def main(argv: list[str]) -> int:
    starter, parent, *command = argv
    trial, attempt = TrialFolder(Path(command[-3])), int(command[-2])
    adopt_orphans()
    lines = Path(os.environ["PBS_NODEFILE"]).read_text().split()
    hosts = Pbs().hosts(os.environ)
    with tempfile.TemporaryDirectory(prefix=".nodes-", dir=parent) as folder:
        script = Path(folder, "start")
        write_atomic(script, start_script(command, Path(folder), os.environ, _own_log()))
        write_atomic(Path(folder, ORDERS), "")
        gang = OnNodes(Path(folder), len(hosts))
        try:
            code = gang.run(start_commands(starter, lines, hosts, str(script)))
        except UsageError as error:
            note_failure(trial, attempt, failure_now(None, str(error), user_error=True))
            code = 1
        lost = [hosts[rank] for rank in gang.mute]
        for rank, host in zip(gang.mute, lost, strict=True):
            said = f"was gone without a word; {starter} may have said why: {trial.job_log}"
            if rank in gang.silent:
                said = f"did not start: {starter} had started nothing there after {START_S:g} s"
            note_failure(trial, attempt, _lost(host, said, len(lost), len(hosts)))
        end_descendants()
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
