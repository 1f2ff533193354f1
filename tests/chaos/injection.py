"""Inject faults into the system calls of a process: see faults.c, which is compiled when a test needs it.

A zygote is one Python process that has loaded faults.c and the imports of scenarios. It forks a process for each fault,
which takes milliseconds, while a new process would take seconds to load torch.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import IntEnum
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).with_name("faults.c")
LIBRARY = "FAULTS_LIBRARY"


class FaultKind(IntEnum):
    """The kinds of faults, with the numbers of faults.c."""

    COUNT = 0
    KILL_BEFORE = 1
    KILL_AFTER = 2
    KILL_WITHIN = 3
    """The process is killed after half of a write."""
    FAIL = 4
    SHORT = 5
    """Only half of a write is done, and the process continues."""
    SIGNAL = 6
    """The process receives the signal `error`, and continues."""


@dataclass(frozen=True)
class Fault:
    how: FaultKind = FaultKind.COUNT
    at: int = 0
    """Number of the change, from 1."""
    error: int = 0
    times: int = 1
    """Number of changes in a row that fail."""


@dataclass(frozen=True)
class Run:
    """The result of one run of a scenario."""

    made: int
    """Number of changes below the folder by all of its processes."""
    killed: bool
    """Whether one of its processes was killed."""
    failed: str | None
    """The traceback of the scenario's exception."""
    failed_flushes: int
    """Number of failed flushes of files and folders."""
    said: list[tuple[int, Any]]
    """The values given to `say`, each with the number of changes recorded before it."""


@cache
def compiled(folder: Path) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler, which faults.c needs (apt-get install gcc)")
    library = folder / "faults.so"
    command = [compiler, "-shared", "-fPIC", "-O2", "-Wall", "-o", str(library), str(SOURCE), "-ldl", "-lpthread"]
    subprocess.run(command, check=True)
    return library


class Zygote:
    """Forks a process for each `run`. Not thread-safe."""

    def __init__(self, library: Path, modules: list[str], traced_by: Sequence[str] = ()) -> None:
        """`traced_by`: a command that runs the command that follows it."""
        environment = {**os.environ, "LD_PRELOAD": str(library), LIBRARY: str(library)}
        command = [*traced_by, sys.executable, "-m", "tests.chaos.injection", *modules]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )

    def run(self, scenario: str, folder: Path, fault: Fault, records: Path | None = None, /, **arguments: Any) -> Run:
        """Run `scenario` and return its result. `module:function` is called as function(folder, say, **arguments), with
        faults below `folder`.
        """
        request = {
            "scenario": scenario,
            "folder": str(folder),
            "fault": asdict(fault),
            "records": records and str(records),
            "arguments": arguments,
        }
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return Run(**{**answer, "said": [(made, what) for made, what in answer["said"]]})

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


@contextmanager
def zygote(folder: Path, *modules: str, traced_by: Sequence[str] = ()) -> Iterator[Zygote]:
    made = Zygote(compiled(folder), [*modules], traced_by)
    try:
        yield made
    finally:
        made.close()


# --- in the zygote


def _serve(modules: list[str]) -> None:
    for module in modules:
        import_module(module)
    library = ctypes.CDLL(os.environ[LIBRARY])
    for line in sys.stdin:
        print(json.dumps(_forked(library, json.loads(line))), flush=True)


def _forked(library: ctypes.CDLL, request: Mapping[str, Any]) -> Mapping[str, Any]:
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(read)
        os.dup2(2, 1)
        _play(library, request, write)
    os.close(write)
    with os.fdopen(read, "rb") as lines:
        said = [json.loads(line) for line in lines if line.endswith(b"\n")]
    status = os.waitpid(pid, 0)[1]
    end = said.pop() if said and "failed" in said[-1] else {"failed": f"it ended with wait status {status}"}
    killed = library.faults_killed() > 0
    failed = None if killed and os.WIFSIGNALED(status) else end["failed"]
    said = [(each["after"], each["what"]) for each in said]
    return {
        "made": library.faults_made(),
        "killed": killed,
        "failed": failed,
        "failed_flushes": library.faults_failed_flushes(),
        "said": said,
    }


def _play(library: ctypes.CDLL, request: Mapping[str, Any], pipe: int) -> None:
    """Run the scenario, and exit."""

    def send(line: Mapping[str, Any]) -> None:
        os.write(pipe, f"{json.dumps(line)}\n".encode())

    def say(what: Any) -> None:
        send({"after": library.faults_recorded(), "what": what})

    failed = None
    try:
        module, _, name = request["scenario"].partition(":")
        scenario: Callable[..., None] = getattr(import_module(module), name)
        fault, records = Fault(**request["fault"]), request["records"]
        below = os.path.realpath(request["folder"]).encode()
        begun = library.faults_begin(
            below,
            records and records.encode(),
            fault.how,
            ctypes.c_long(fault.at),
            fault.error,
            ctypes.c_long(fault.times),
        )
        assert begun
        scenario(Path(request["folder"]), say, **request["arguments"])
    except BaseException:
        failed = traceback.format_exc()
    library.faults_end()
    send({"failed": failed})
    os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1:])
