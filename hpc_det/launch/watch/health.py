"""What a node is asked before its ranks start: its devices, its memory, the folders that the run needs, its clock.

Each check is a process of its own, since one that asks a dead file server never comes back, and could not even be
killed: its silence is then its answer. All of them together take a few milliseconds on a healthy node.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

from hpc_det.launch.node_folders import NodeFolders
from hpc_det.launch.watch.gpus import device_problem
from hpc_det.node import full_disk
from hpc_det.plan.job_plan import JobPlan
from hpc_det.store.folders import TrialFolder

ANSWER_S = 20.0
"""A check that takes longer has failed."""
LEAST_MEMORY_MB = 512
CLOCK_S = 60.0
"""Clocks further apart than this are wrong: ends of jobs and orders of failures are read off them."""


class Problem(NamedTuple):
    text: str
    is_shared: bool = False
    """The run folder is full: every other node would say the same, and the node is not to blame."""


Check = Callable[[], Problem | None]


def problems_of_node(trial: TrialFolder, plan: JobPlan, folders: NodeFolders, env: Mapping[str, str]) -> list[Problem]:
    """What is wrong with this node for a gang of `plan`; after `ANSWER_S` at the latest."""
    checks: dict[str, Check] = {
        "memory": _memory,
        str(trial.path): partial(folder_problem, trial.path, shared=True),
        **{folder: partial(folder_problem, Path(folder), shared=False) for folder in filter(None, folders)},
    }
    if plan.slot_type == "gpu":
        checks["GPUs"] = partial(_devices, plan.ranks_per_node, env)
    return answers(checks, ANSWER_S)


def answers(checks: Mapping[str, Check], within_s: float) -> list[Problem]:
    """What the checks find, all at the same time; a silent one is a problem, under its name."""
    end = time.monotonic() + within_s
    running = {name: _start(check) for name, check in checks.items()}
    found = [_answer(name, *process, end, within_s) for name, process in running.items()]
    return [problem for problem in found if problem]


def _memory() -> Problem | None:
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) // 1024 for line in lines if line.startswith("MemAvailable:"))
    if available >= LEAST_MEMORY_MB:
        return None
    return Problem(f"{available} MB of memory are left there, less than {LEAST_MEMORY_MB} MB")


def _devices(needed: int, env: Mapping[str, str]) -> Problem | None:
    text = device_problem(needed, env)
    return Problem(text) if text else None


def folder_problem(folder: Path, *, shared: bool) -> Problem | None:
    """Write, flush, read, delete; on the way the file server tells its time."""
    path = folder / f".health-{socket.gethostname()}-{os.getpid()}"
    try:
        before = time.time()
        written = _write_and_read(path, os.urandom(512))
        after = time.time()
    except OSError as error:
        return Problem(f"{folder}: {error.strerror}", is_shared=shared and error.errno in full_disk.CODES)
    finally:
        with suppress(OSError):
            path.unlink()
    if before - CLOCK_S <= written <= after + CLOCK_S:
        return None
    return Problem(f"the clock is {abs(after - written):.0f} s {_side(after - written)} the one behind {folder}")


def _write_and_read(path: Path, content: bytes) -> float:
    """When it was written, as the file's server says."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, content)
        os.fsync(descriptor)
        if os.pread(descriptor, len(content) + 1, 0) != content:
            raise OSError(errno.EIO, "what was written there reads differently", str(path))
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)


def wrong_clocks(offsets: Mapping[str, float]) -> dict[str, Problem]:
    """The hosts whose clocks are wrong, from how many seconds each is ahead of the first one's, which has 0.

    The first one is right, unless most of the others say otherwise.
    """
    away = {host: offset for host, offset in offsets.items() if abs(offset) > CLOCK_S}
    first = next(iter(offsets))
    if len(away) > len(offsets) / 2:
        return {first: Problem(f"the clock is more than {CLOCK_S:.0f} s away from those of {len(away)} other nodes")}
    return {
        host: Problem(f"the clock is {abs(offset):.0f} s {_side(offset)} that of {first}")
        for host, offset in away.items()
    }


def _side(offset: float) -> str:
    return "ahead of" if offset > 0 else "behind"


# --- checks as processes


def _start(check: Check) -> tuple[int, int]:
    """The process, and where its answer can be read."""
    answer, write = os.pipe()
    process = os.fork()
    if not process:
        _run(check, write)
    os.close(write)
    return process, answer


def _run(check: Check, write: int) -> NoReturn:
    """In the child. It must not go on as its parent, whatever happens."""
    try:
        problem = check()
    except BaseException as error:
        problem = Problem(f"{type(error).__name__}: {error}")
    with suppress(BaseException):
        os.write(write, json.dumps(problem).encode())
    os._exit(0)


def _answer(name: str, process: int, answer: int, end: float, within_s: float) -> Problem | None:
    try:
        if not select.select([answer], [], [], max(0.0, end - time.monotonic()))[0]:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            return Problem(f"no answer from {name} in {within_s:g} s")
        said = os.read(answer, select.PIPE_BUF)
        os.waitpid(process, 0)
    finally:
        os.close(answer)
    if not said:
        return Problem(f"the check of {name} was killed")
    problem = json.loads(said)
    return Problem(*problem) if problem else None
