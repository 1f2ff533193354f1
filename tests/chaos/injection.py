"""Faults in the system calls of a process: see faults.c, which is compiled when a test asks for it.

A zygote is one Python process that has loaded faults.c and what scenarios need. It forks a process for each fault,
which takes milliseconds, where a new one would take seconds to load torch.
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
    """As in faults.c."""

    COUNT = 0
    KILL_BEFORE = 1
    KILL_AFTER = 2
    KILL_WITHIN = 3
    """Only half of a write is done."""
    FAIL = 4
    SHORT = 5
    """Only half of a write is done, and the process goes on."""
    SIGNAL = 6
    """The process gets the signal `error`, and goes on."""


@dataclass(frozen=True)
class Fault:
    how: FaultKind = FaultKind.COUNT
    at: int = 0
    """The number of a change, from 1."""
    error: int = 0
    times: int = 1
    """How many changes in a row fail."""


@dataclass(frozen=True)
class Run:
    """One run of a scenario."""

    made: int
    """Changes below the folder, of all its processes."""
    killed: bool
    """Whether one of its processes was."""
    failed: str | None
    """The traceback of what the scenario has raised."""
    failed_flushes: int
    """How often a file or folder could not be flushed."""
    said: list[tuple[int, Any]]
    """By `say`: after so many recorded changes, what."""


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
    """`run` from one thread at a time."""

    def __init__(self, library: Path, modules: list[str], traced_by: Sequence[str] = ()) -> None:
        """`traced_by`: a command that runs the command which follows it."""
        environment = {**os.environ, "LD_PRELOAD": str(library), LIBRARY: str(library)}
        command = [*traced_by, sys.executable, "-m", "tests.chaos.injection", *modules]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )

    def run(self, scenario: str, folder: Path, fault: Fault, records: Path | None = None, /, **arguments: Any) -> Run:
        """`scenario`: `module:function`, called as function(folder, say, **arguments) with faults below `folder`."""
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
    """Never returns."""

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
