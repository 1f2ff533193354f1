"""The moms: processes of jobs in separate sessions, found by session as a PBS without cgroups finds them."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

NOT_STARTED = 254
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
PR_SET_CHILD_SUBREAPER = 36
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Program:
    """The process that becomes a session leader."""

    argv: list[str]
    env: Mapping[str, str]
    cwd: Path
    umask: int
    output: Path
    error: Path
    name: str = ""
    """`argv[0]` if it differs from the program: a login shell's begins with `-`."""
    stdin: bytes = b""
    host: str | None = None
    """Its host name, which it has in separate namespaces."""
    hosts: Path | None = None
    network: str | None = None
    """The path of a network namespace."""


def adopt_orphans_and_die_with_parent() -> None:
    """Keep the processes of jobs as descendants of this one, and end this one with the test that started it."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def start(program: Program) -> int:
    """Start a session and return its ID, the PID of its leader. A program that does not start exits with 254, as under
    PBS.

    The process leads its session when this returns, so that signals to the session of a job that ends now reach it.
    """
    reader, writer = os.pipe()
    os.write(writer, program.stdin)
    os.close(writer)
    leads, is_led = os.pipe()
    pid = os.fork()
    if pid:
        os.close(reader)
        os.close(is_led)
        os.read(leads, 1)
        os.close(leads)
        return pid
    try:
        os.setsid()
        os.close(is_led)
        _become(program, reader)
    finally:
        os.write(2, f"{program.argv[0]}: No such file or directory\n".encode())
        os._exit(NOT_STARTED)


def _become(program: Program, stdin: int) -> None:
    for handled in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(handled, signal.SIG_DFL)
    if program.host:
        _enter_host(program.host, program.hosts)
    if program.network:
        _libc.setns(os.open(program.network, os.O_RDONLY | os.O_CLOEXEC), CLONE_NEWNET)
    os.umask(program.umask)
    os.chdir(program.cwd)
    os.dup2(stdin, 0)
    for path, number in ((program.output, 1), (program.error, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), number)
    os.execvpe(program.argv[0], [program.name or program.argv[0], *program.argv[1:]], dict(program.env))


def _enter_host(name: str, hosts: Path | None) -> None:
    _libc.unshare(CLONE_NEWUTS | CLONE_NEWNS)
    _libc.sethostname(name.encode(), len(name.encode()))
    _libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None)
    _libc.mount(str(hosts).encode(), b"/etc/hosts", None, MS_BIND, None)


def members(sessions: Collection[int]) -> list[int]:
    """Return the PIDs of the living processes of these sessions, children before their parents."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and (found := _state_parent_session(int(name))):
            state, parent, session = found
            if session in sessions and state not in "ZX":
                parents[int(name)] = parent
    return sorted(parents, key=lambda pid: _depth(pid, parents), reverse=True)


def _depth(pid: int, parents: Mapping[int, int]) -> int:
    return 1 + _depth(parents[pid], parents) if pid in parents else 0


def _state_parent_session(pid: int) -> tuple[str, int, int] | None:
    """Read proc(5); return None if the process has ended meanwhile."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    state, parent, _, session = (text.rpartition(")")[2].split() or ["X", "0", "0", "0"])[:4]
    return state, int(parent), int(session)


def signal_sessions(sessions: Collection[int], number: int) -> None:
    """Signal all processes of the sessions' own process groups at once, then those in other groups, children first.

    If they were signalled one by one, a script could see its child die, and exit, before its own signal arrives: a real
    PBS is so fast that this was never recorded, but a machine that is busy with tests is not.
    """
    found = members(sessions) if sessions else []
    groups = {pid: _group(pid) for pid in found}
    for group in set(groups.values()) & set(sessions):
        signal_processes([-group], number)
    signal_processes([pid for pid in found if groups[pid] not in sessions], number)


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def signal_processes(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def descendants(root: int) -> dict[int, str]:
    """Return the command lines, by PID, of all living processes below this one."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and (found := _state_parent_session(int(name))) and found[0] not in "ZX":
            parents[int(name)] = found[1]
    return {pid: _command_line(pid) for pid in parents if pid != root and _is_below(pid, root, parents)}


def _is_below(pid: int, root: int, parents: Mapping[int, int]) -> bool:
    while pid in parents and pid != root:
        pid = parents[pid]
    return pid == root


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
    except OSError:
        return ""
