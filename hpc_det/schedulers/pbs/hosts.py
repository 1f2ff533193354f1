"""The hosts of a PBS job: listing them, starting processes on them, and choosing them so that a job avoids some.

PBS' `select` cannot exclude hosts, so a job that must avoid some hosts names all the hosts that it may use.
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

from hpc_det.errors import count
from hpc_det.node.files import write_atomic
from hpc_det.node.process import ignore_stop_signals
from hpc_det.schedulers.scheduler import CommandError, Run, reading

NODES = ("pbsnodes", "-av", "-F", "json")
STARTERS = ("pbsdsh", "pbs_tmrsh", "mpiexec")
"""Commands that can start a process on each host of a job, the preferred first."""
ORDERS, BEGUN, EXIT = "orders", "begun-", "exit-"
"""Names of files in a HostFolder; BEGUN and EXIT are followed by a rank.

ORDERS contains one order per line: "TERM" sends SIGTERM to the commands, "end" ends them. The process of a rank creates
its BEGUN file when it starts, and writes the exit code of its command to its EXIT file.
"""
POLL_S = 0.5
"""Seconds between two reads of these files, on both sides."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Variables that PBS, a site's hook for GPUs, or the shell sets on a host and that keep their value there. Those of the
# shell are read-only: if sh is bash, an assignment to one ends the script.
_OF_THE_HOST = re.compile(r"PBS_\w+|HOSTNAME|\w+_VISIBLE_DEVICES|UID|EUID|PPID|SHELLOPTS|BASHOPTS")
# Variables that PBS, a login or an enclosing job sets.
_OF_THE_MACHINE = re.compile(
    r"PBS_.*|NCPUS|ENVIRONMENT|TMPDIR|HOME|USER|LOGNAME|SHELL|HOSTNAME|PWD|OLDPWD|SHLVL|_|TERM|DISPLAY|SSH_.*|XDG_.*|"
    r"SUBMITIT_(EXECUTOR|FOLDER|LOCAL_.*|PBS_.*)|HPC_DET_(HOSTS|SLOTS|NODE_RANK)"
)
_RANK_BY_MPIEXEC = "${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-$PALS_RANKID}}"
"""The rank of a process, in shell syntax, from the variables of MPICH's, Open MPI's and HPE's mpiexec."""
# pbs_node_attributes(7B), state: the states of a node that accepts jobs, now or later.
_ALIVE = {"free", "busy", "job-busy", "job-exclusive", "job-sharing", "resv-exclusive"}
_COUNTED = ("ncpus", "ngpus", "mem")
"""The resources of a chunk of which a node has an amount; of others it has a value, or a list of them."""
_OF_PROCESSES = ("mpiprocs", "ompthreads")
"""The resources of a chunk that no node has."""
_UNITS = {"kb": 1, "mb": 2, "gb": 3, "tb": 4}
"""Powers of 1024."""


class TooFewHosts(CommandError):
    """Fewer hosts than a job needs remain after excluding those that it avoids."""


def hosts_in(nodefile: str) -> list[str]:
    """Return the hosts that a PBS_NODEFILE names, each once, in its order."""
    # A host is listed once for every process that its chunk requests (mpiprocs).
    return list(dict.fromkeys(Path(nodefile).read_text(encoding="utf-8").split()))


def lines_of(env: Mapping[str, str]) -> list[str]:
    """Return the lines of PBS_NODEFILE, whose indices `pbsdsh -n` takes."""
    return Path(env["PBS_NODEFILE"]).read_text(encoding="utf-8").split()


def hosts_of(env: Mapping[str, str]) -> list[str]:
    """Return the hosts of the job that `env` belongs to; for a job that gangs share, those of this gang."""
    hosts = hosts_in(env["PBS_NODEFILE"])
    places = env.get("HPC_DET_HOSTS")
    return [hosts[int(place)] for place in places.split(",")] if places else hosts


def starter_on_path(env: Mapping[str, str]) -> str | None:
    """Return the first of STARTERS on the PATH of `env`; None if there is none."""
    return next((name for name in STARTERS if shutil.which(name, path=env.get("PATH"))), None)


def start_command(starter: str, lines: Sequence[str], host: str, rank: int, script: str) -> list[str]:
    """Return the command line that runs `script` on one host, with the rank as its argument."""
    if starter == "pbsdsh":
        where = ["-n", str(lines.index(host)), "--"]
    else:
        where = ["-n", "1", "-host", host] if starter == "mpiexec" else [host]
    return [starter, *where, "/bin/sh", script, str(rank)]


def start_commands(
    starter: str, lines: Sequence[str], hosts: Sequence[str], script: str
) -> Iterator[tuple[range, list[str]]]:
    """Yield command lines that together run `script` on all hosts, each with the ranks of the processes that it starts.

    With mpiexec, one command starts all processes; if a host is lost, mpiexec ends the processes on the others.
    """
    if starter == "mpiexec":
        some = ["-host", ",".join(hosts)] if set(hosts) < set(lines) else []
        yield range(len(hosts)), ["mpiexec", "-n", str(len(hosts)), *some, "/bin/sh", script]
        return
    for rank, host in enumerate(hosts):
        yield range(rank, rank + 1), start_command(starter, lines, host, rank, script)


def start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Run the command line of a starter, and return its process."""
    # In its own session, because PBS sends TERM to the session of the job, which would end the starter at once.
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=ignore_stop_signals)


def start_on_host(starter: str, host: str, rank: int, script: str) -> subprocess.Popen[bytes]:
    """Run `script` on one host of the job that this process belongs to, with the rank as its argument."""
    return start(start_command(starter, lines_of(os.environ), host, rank, script))


class HostFolder:
    """A folder through which a program controls the processes that it starts on the hosts of its job.

    The starters of PBS pass on no environment, print into the log of the job, and do not reliably report exit codes. So
    this folder, which only its owner can read, contains a script with the environment, which runs
    `hpc_det.schedulers.pbs.on_host` on each host, and the files ORDERS, BEGUN and EXIT. All hosts must be able to see
    it. The processes end when the folder is deleted.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def made(cls, path: Path) -> HostFolder:
        """Create the folder, or use an empty folder that exists at `path`."""
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
        """Write a script that runs `command` in the environment `env`, and return its path.

        `name`: the name of the script; `log`: the file that output is appended to; `cwd`: the working folder.
        """
        node = shlex.join([sys.executable, "-m", "hpc_det.schedulers.pbs.on_host", str(self._path)])
        to_log = f" >>{shlex.quote(log)} 2>&1" if log else ""
        there = f"cd {shlex.quote(cwd)} || exit\n" if cwd else ""
        last = f'{there}exec {node} "${{1:-{_RANK_BY_MPIEXEC}}}" {shlex.join(command)}{to_log}\n'
        write_atomic(self._path / name, exports(env) + os.fsencode(last))
        return str(self._path / name)

    def order(self, word: str) -> None:
        """Send an order to all processes."""
        # Appended in place: a host that has the file open sees the new content over NFS, but not that of a replaced
        # file.
        with (self._path / ORDERS).open("a") as file:
            file.write(f"{word}\n")

    def has_begun(self, rank: int) -> bool:
        """Return whether the process of this rank has started on its host."""
        return (self._path / f"{BEGUN}{rank}").exists()

    def forget(self, rank: int) -> None:
        """Delete the mark that the process of this rank has started, before it is started again."""
        (self._path / f"{BEGUN}{rank}").unlink(missing_ok=True)

    def exit_code(self, rank: int) -> int | None:
        """Return the exit code of the command of this rank; None if it still runs, or was killed before it could write
        one.
        """
        try:
            return int((self._path / f"{EXIT}{rank}").read_text())
        except FileNotFoundError:
            return None


def exports(variables: Mapping[str, str]) -> bytes:
    """Return shell lines that set the variables.

    Variables that PBS or the site sets on the host keep their value there.
    """
    # `qsub -V` and `-v` lose or damage values: exported functions, commas, quotes.
    return os.fsencode("".join(_export(*each) for each in sorted(variables.items()) if _NAME.fullmatch(each[0])))


def _export(name: str, value: str) -> str:
    setting = f"export {name}={shlex.quote(value)}\n"
    return f'[ "${{{name}+set}}" ] || {setting}' if _OF_THE_HOST.fullmatch(name) else setting


def of_no_machine(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that can be passed to another host or job: those of no machine, login or job."""
    return {name: value for name, value in variables.items() if not _OF_THE_MACHINE.fullmatch(name)}


@reading("pbsnodes")
def named_hosts(wanted: tuple[str, str | None], exclude: Collection[str], run: Run) -> str:
    """Return a `select` that names one host for each chunk, without the excluded hosts. Free hosts are preferred.

    `wanted` is a `select` with one kind of chunk, and the queue or None. Raises TooFewHosts.
    """
    select, queue = wanted
    number, _, chunk = select.partition(":")
    needed = int(number)
    nodes = _nodes(run)
    excluded = {_short(name) for name in exclude}
    able = {
        host: _is_free(node, chunk)
        for name, node in nodes.items()
        if _can_run(node, chunk, queue)
        and _short(host := node["resources_available"].get("host", name)) not in excluded
    }
    chosen = sorted(able, key=lambda host: not able[host])[:needed]
    if len(chosen) < needed:
        raise TooFewHosts(
            f"qsub: the job needs {count(needed, 'node')}, and {len(chosen)} remain without "
            f"{', '.join(sorted(exclude))}, which were lost or failed the health checks; repair them, or shorten "
            "exclude_nodes_for in the cluster profile"
        )
    return "+".join(f"1:{chunk}:host={host}" for host in chosen)


@reading("pbsnodes")
def down_hosts(hosts: Sequence[str], run: Run) -> list[str]:
    """Return those of `hosts` whose MoM the server cannot reach. Raises CommandError."""
    nodes = _nodes(run)
    down = {
        _short(node.get("resources_available", {}).get("host", name))
        for name, node in nodes.items()
        if "down" in node["state"].split(",")
    }
    return [host for host in hosts if _short(host) in down]


def _nodes(run: Run) -> dict[str, Any]:
    """Return the attributes of each node, by its name."""
    return dict(json.loads(run(NODES)).get("nodes", {}))


def _can_run(node: Mapping[str, Any], chunk: str, queue: str | None) -> bool:
    """Return whether the node can run the chunk, now or after other jobs have ended."""
    is_open = queue is None or node.get("queue", queue) == queue
    return is_open and set(node["state"].split(",")) <= _ALIVE and _holds(node["resources_available"], {}, chunk)


def _is_free(node: Mapping[str, Any], chunk: str) -> bool:
    """Return whether the node can run the chunk now."""
    return bool(node["state"] == "free") and _holds(
        node["resources_available"], node.get("resources_assigned", {}), chunk
    )


def _holds(available: Mapping[str, Any], assigned: Mapping[str, Any], chunk: str) -> bool:
    """Return whether the unassigned resources are enough for the chunk."""
    needs = dict(item.split("=", 1) for item in chunk.split(":"))
    return all(
        amount(available.get(name, 0)) - amount(assigned.get(name, 0)) >= amount(value)
        if name in _COUNTED
        else value.lower() in str(available.get(name, "")).lower().split(",")
        for name, value in needs.items()
        if name not in _OF_PROCESSES
    )


def amount(value: str | int) -> float:
    """Return a count, or a size in bytes."""
    found = re.fullmatch(r"(\d+)([kmgt]b)?", str(value))
    return int(found[1]) * 1024.0 ** _UNITS.get(found[2] or "", 0) if found else 0.0


def _short(host: str) -> str:
    """Return the host name without its domain: PBS prints the domain in some places only."""
    return host.partition(".")[0]
