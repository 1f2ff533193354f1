"""The hosts of a job of PBS: those that it has, how processes are started on them, and which ones a job avoids.

`select` knows no "not", so for a job that keeps away from some hosts all the others are named.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_det.node.files import write_atomic
from hpc_det.node.process import ignore_stop_signals
from hpc_det.schedulers.scheduler import CommandError, Run, reading

NODES = ("pbsnodes", "-av", "-F", "json")
STARTERS = ("pbsdsh", "pbs_tmrsh", "mpiexec")
"""What can start a process on each host of a job, the best first."""
ORDERS, BEGUN, EXIT = "orders", "begun-", "exit-"
"""The files of a HostFolder: words for the processes, "TERM" or "end", and by the rank of each that its host has begun,
and its exit code.
"""
POLL_S = 0.5
"""How often both sides look at these files."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What PBS, a site's hook for GPUs, or the shell sets on a host counts there; all else is as in the script. Those of the
# shell are read-only: where sh is bash, setting one ends the script.
_OF_THE_HOST = re.compile(r"PBS_\w+|HOSTNAME|\w+_VISIBLE_DEVICES|UID|EUID|PPID|SHELLOPTS|BASHOPTS")
# What PBS, a login or an outer job sets.
_OF_THE_MACHINE = re.compile(
    r"PBS_.*|NCPUS|ENVIRONMENT|TMPDIR|HOME|USER|LOGNAME|SHELL|HOSTNAME|PWD|OLDPWD|SHLVL|_|TERM|DISPLAY|SSH_.*|XDG_.*|"
    r"SUBMITIT_(EXECUTOR|FOLDER|LOCAL_.*|PBS_.*)|HPC_DET_(HOSTS|SLOTS|NODE_RANK)"
)
_RANK_BY_MPIEXEC = "${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-$PALS_RANKID}}"
# pbs_node_attributes(7B), state: what a node can be in that takes jobs now or later.
_ALIVE = {"free", "busy", "job-busy", "job-exclusive", "job-sharing", "resv-exclusive"}
_COUNTED = ("ncpus", "ngpus", "mem")
_UNITS = {"kb": 1, "mb": 2, "gb": 3, "tb": 4}


class TooFewHosts(CommandError):
    """Fewer hosts than a job needs are left without those that it avoids."""


def hosts_in(nodefile: str) -> list[str]:
    """Each once: PBS_NODEFILE, which every host has, names one for every process that a chunk asks for (mpiprocs)."""
    return list(dict.fromkeys(Path(nodefile).read_text(encoding="utf-8").split()))


def lines_of(env: Mapping[str, str]) -> list[str]:
    """The lines of PBS_NODEFILE, whose numbers pbsdsh takes."""
    return Path(env["PBS_NODEFILE"]).read_text(encoding="utf-8").split()


def hosts_of(env: Mapping[str, str]) -> list[str]:
    """The hosts of the job that `env` belongs to; of a shared job those of this gang."""
    hosts = hosts_in(env["PBS_NODEFILE"])
    places = env.get("HPC_DET_HOSTS")
    return [hosts[int(place)] for place in places.split(",")] if places else hosts


def starter_on_path(env: Mapping[str, str]) -> str | None:
    """The best of STARTERS that `env` finds; None: none of them."""
    return next((name for name in STARTERS if shutil.which(name, path=env.get("PATH"))), None)


def start_command(starter: str, lines: Sequence[str], host: str, rank: int, script: str) -> list[str]:
    """The command line that runs `script` on one host, with the rank of the process there."""
    if starter == "pbsdsh":
        where = ["-n", str(lines.index(host)), "--"]
    else:
        where = ["-n", "1", "-host", host] if starter == "mpiexec" else [host]
    return [starter, *where, "/bin/sh", script, str(rank)]


def start_commands(
    starter: str, lines: Sequence[str], hosts: Sequence[str], script: str
) -> Iterator[tuple[range, list[str]]]:
    """Command lines that run `script` on all the hosts, and the ranks of the processes that each starts.

    One mpiexec starts all of them; where a host is lost, it ends the others.
    """
    if starter == "mpiexec":
        some = ["-host", ",".join(hosts)] if set(hosts) < set(lines) else []
        yield range(len(hosts)), ["mpiexec", "-n", str(len(hosts)), *some, "/bin/sh", script]
        return
    for rank, host in enumerate(hosts):
        yield range(rank, rank + 1), start_command(starter, lines, host, rank, script)


def start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """A starter, in a session of its own, where PBS does not send the TERM that would end it at once."""
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=ignore_stop_signals)


def start_on_host(starter: str, host: str, rank: int, script: str) -> subprocess.Popen[bytes]:
    """Run `script` on one host of the job that this process belongs to, with the rank of the process there."""
    return start(start_command(starter, lines_of(os.environ), host, rank, script))


class HostFolder:
    """What a program shares with the processes that it starts on hosts of its job: a folder that all of them see.

    The starters of PBS hand on no environment, print into the job's own log and tell little of how a process ended. So
    the folder, for its owner alone, holds a script with the environment, which runs `hpc_det.schedulers.pbs.on_host` on
    each host, and what passes between the two sides: ORDERS, BEGUN, EXIT. Processes end when the folder is gone.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def made(cls, path: Path) -> HostFolder:
        """A new one at `path`, or in the empty folder that is there."""
        path.mkdir(mode=0o700, exist_ok=True)
        write_atomic(path / ORDERS, "")
        return cls(path)

    def write_script(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        name: str = "start",
        log: str | None = None,
        cwd: str | None = None,
    ) -> str:
        """The path of a script that runs `command` in the environment `env`. `log`: where to print."""
        node = shlex.join([sys.executable, "-m", "hpc_det.schedulers.pbs.on_host", str(self._path)])
        to_log = f" >>{shlex.quote(log)} 2>&1" if log else ""
        there = f"cd {shlex.quote(cwd)} || exit\n" if cwd else ""
        last = f'{there}exec {node} "${{1:-{_RANK_BY_MPIEXEC}}}" {shlex.join(command)}{to_log}\n'
        write_atomic(self._path / name, exports(env) + os.fsencode(last))
        return str(self._path / name)

    def order(self, word: str) -> None:
        """Appended in place: of a file that they have open before, NFS shows what it says now."""
        with (self._path / ORDERS).open("a") as file:
            file.write(f"{word}\n")

    def has_begun(self, rank: int) -> bool:
        return (self._path / f"{BEGUN}{rank}").exists()

    def forget(self, rank: int) -> None:
        """Before it is started again."""
        (self._path / f"{BEGUN}{rank}").unlink(missing_ok=True)

    def exit_code(self, rank: int) -> int | None:
        """None: the process has not ended, or was gone before it could leave its code."""
        try:
            return int((self._path / f"{EXIT}{rank}").read_text())
        except FileNotFoundError:
            return None


def exports(variables: Mapping[str, str]) -> bytes:
    """Shell lines that set the variables: `qsub -V` and `-v` lose or break values (exported functions, commas, quotes).

    What PBS or a site sets on the host itself stays as it is there.
    """
    return os.fsencode("".join(_export(*each) for each in sorted(variables.items()) if _NAME.fullmatch(each[0])))


def _export(name: str, value: str) -> str:
    setting = f"export {name}={shlex.quote(value)}\n"
    return f'[ "${{{name}+set}}" ] || {setting}' if _OF_THE_HOST.fullmatch(name) else setting


def of_no_machine(variables: Mapping[str, str]) -> dict[str, str]:
    """Those that belong to no machine, no login and no job, so that they can go from one to another."""
    return {name: value for name, value in variables.items() if not _OF_THE_MACHINE.fullmatch(name)}


@reading("pbsnodes")
def named_hosts(wanted: tuple[str, str | None], exclude: Collection[str], run: Run) -> str:
    """`wanted`, a `select` of one kind of chunk and its queue, as one chunk for each of so many hosts.

    Those that are free come first. Raises TooFewHosts where too few are left.
    """
    select, queue = wanted
    count, _, chunk = select.partition(":")
    nodes = _nodes(run)
    excluded = {_short(name) for name in exclude}
    able = {
        host: _is_free(node, chunk)
        for name, node in nodes.items()
        if _can_run(node, chunk, queue)
        and _short(host := node["resources_available"].get("host", name)) not in excluded
    }
    chosen = sorted(able, key=lambda host: not able[host])[: int(count)]
    if len(chosen) < int(count):
        raise TooFewHosts(
            f"qsub: {count} nodes are needed, and {len(chosen)} are left without {', '.join(sorted(exclude))}, which "
            "were lost or failed the checks; mend them, or shorten exclude_nodes_for in the cluster profile"
        )
    return "+".join(f"1:{chunk}:host={host}" for host in chosen)


@reading("pbsnodes")
def down_hosts(hosts: Sequence[str], run: Run) -> list[str]:
    """Those of `hosts` whose MoM the server does not reach. Raises CommandError."""
    nodes = _nodes(run)
    down = {
        _short(node.get("resources_available", {}).get("host", name))
        for name, node in nodes.items()
        if "down" in node["state"].split(",")
    }
    return [host for host in hosts if _short(host) in down]


def _nodes(run: Run) -> dict[str, Any]:
    """The attributes of each node, by its name."""
    return dict(json.loads(run(NODES)).get("nodes", {}))


def _can_run(node: Mapping[str, Any], chunk: str, queue: str | None) -> bool:
    is_open = queue is None or node.get("queue", queue) == queue
    return is_open and set(node["state"].split(",")) <= _ALIVE and _holds(node["resources_available"], {}, chunk)


def _is_free(node: Mapping[str, Any], chunk: str) -> bool:
    return bool(node["state"] == "free") and _holds(
        node["resources_available"], node.get("resources_assigned", {}), chunk
    )


def _holds(available: Mapping[str, Any], assigned: Mapping[str, Any], chunk: str) -> bool:
    needs = dict(item.split("=", 1) for item in chunk.split(":"))
    return all(
        _amount(available.get(name, 0)) - _amount(assigned.get(name, 0)) >= _amount(needs[name])
        for name in _COUNTED
        if name in needs
    )


def _amount(value: str | int) -> float:
    """A count, or a size in bytes."""
    found = re.fullmatch(r"(\d+)([kmgt]b)?", str(value))
    return int(found[1]) * 1024.0 ** _UNITS.get(found[2] or "", 0) if found else 0.0


def _short(host: str) -> str:
    """Nodes are named with their domain in one place and without it in another."""
    return host.partition(".")[0]
