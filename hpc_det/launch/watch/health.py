"""Health checks of a node before its ranks start: devices, memory, the folders that the run needs, the clock.

Each check runs in its own process: one that accesses a dead file server never returns and cannot even be killed, so no
answer is a failed check. On a healthy node all checks together take a few milliseconds.
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
from typing import Any, NamedTuple, NoReturn

from hpc_det.errors import count
from hpc_det.launch.node_folders import NodeFolders
from hpc_det.node import full_disk, gpus
from hpc_det.plan.job_plan import JobPlan
from hpc_det.store.folders import TrialFolder

ANSWER_S = 20.0
"""Seconds for all checks; one that takes longer has failed."""
LEAST_MEMORY_MB = 512
"""Least available memory of a healthy node."""
CLOCK_S = 60.0
"""Seconds by which clocks may differ; hpc_det compares ends of jobs and times of failures across nodes."""
MOST_USED = 0.5
"""Largest used share of a device's memory; the gang's own ranks do not run yet."""


class NodeProblem(NamedTuple):
    """A failed health check of a node."""

    text: str
    is_shared: bool = False
    """True if the run folder is full: every node would report the same, and this one is not to blame."""


Check = Callable[[], NodeProblem | None]


def problems_of_node(
    trial: TrialFolder, plan: JobPlan, folders: NodeFolders, env: Mapping[str, str]
) -> list[NodeProblem]:
    """Return the problems of this node for a gang of `plan`, after `ANSWER_S` at the latest."""
    checks: dict[str, Check] = {
        "memory": _memory,
        str(trial.path): partial(folder_problem, trial.path, shared=True),
        **{folder: partial(folder_problem, Path(folder), shared=False) for folder in filter(None, folders)},
    }
    if plan.slot_type == "gpu":
        checks["GPUs"] = partial(_devices, plan.ranks_per_node, env)
    return answers(checks, ANSWER_S)


def answers(checks: Mapping[str, Check], within_s: float) -> list[NodeProblem]:
    """Run the checks in parallel and return the problems found, among them each check that has not answered."""
    end = time.monotonic() + within_s
    running = {name: _start(check) for name, check in checks.items()}
    found = [_answer(name, *process, end, within_s) for name, process in running.items()]
    return [problem for problem in found if problem]


def _memory() -> NodeProblem | None:
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) // 1024 for line in lines if line.startswith("MemAvailable:"))
    if available >= LEAST_MEMORY_MB:
        return None
    return NodeProblem(f"{available} MB of memory are available, but at least {LEAST_MEMORY_MB} MB are needed")


def _devices(needed: int, env: Mapping[str, str]) -> NodeProblem | None:
    text = device_problem(needed, env)
    return NodeProblem(text) if text else None


def folder_problem(folder: Path, *, shared: bool) -> NodeProblem | None:
    """Write, flush, read and delete a file in `folder`; return a problem found, also of the clock."""
    path = folder / f".health-{socket.gethostname()}-{os.getpid()}"
    try:
        before = time.time()
        written = _write_and_read(path, os.urandom(512))
        after = time.time()
    except OSError as error:
        return NodeProblem(f"{folder}: {error.strerror}", is_shared=shared and error.errno in full_disk.CODES)
    finally:
        with suppress(OSError):
            path.unlink()
    # The file server sets the time of the write, so this compares its clock with the node's.
    if before - CLOCK_S <= written <= after + CLOCK_S:
        return None
    return NodeProblem(f"the clock is {abs(after - written):.0f} s {_side(after - written)} the one behind {folder}")


def _write_and_read(path: Path, content: bytes) -> float:
    """Write a file, read it again, and return the server's time of the write. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, content)
        os.fsync(descriptor)
        if os.pread(descriptor, len(content) + 1, 0) != content:
            raise OSError(errno.EIO, "a file that was just written has different content", str(path))
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)


def wrong_clocks(offsets: Mapping[str, float]) -> dict[str, NodeProblem]:
    """Return a problem for each host whose clock is wrong.

    `offsets`: seconds by which each host's clock is ahead of the first host's, which has 0. The first clock is right,
    unless most of the others differ from it.
    """
    away = {host: offset for host, offset in offsets.items() if abs(offset) > CLOCK_S}
    first = next(iter(offsets))
    if len(away) > len(offsets) / 2:
        return {
            first: NodeProblem(
                f"the clock differs by more than {CLOCK_S:.0f} s from those of {count(len(away), 'other node')}"
            )
        }
    return {
        host: NodeProblem(f"the clock is {abs(offset):.0f} s {_side(offset)} that of {first}")
        for host, offset in away.items()
    }


def _side(offset: float) -> str:
    return "ahead of" if offset > 0 else "behind"


# --- checks as processes


def _start(check: Check) -> tuple[int, int]:
    """Start a check in a child; return its process id, and the descriptor from which to read its answer."""
    answer, write = os.pipe()
    process = os.fork()
    if not process:
        _run(check, write)
    os.close(write)
    return process, answer


def _run(check: Check, write: int) -> NoReturn:
    """Run a check in the child, write its answer to the descriptor `write`, and exit."""
    try:
        problem = check()
    except BaseException as error:
        problem = NodeProblem(f"{type(error).__name__}: {error}")
    with suppress(BaseException), open(write, "wb") as pipe:
        pipe.write(json.dumps(problem).encode())
    # Not sys.exit: the child must not run the parent's exit handlers, or return into its code.
    os._exit(0)


def _answer(name: str, process: int, answer: int, end: float, within_s: float) -> NodeProblem | None:
    """Return the problem that a check has found, or None. Kills a check that has not answered by `end`."""
    try:
        if not select.select([answer], [], [], max(0.0, end - time.monotonic()))[0]:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            # Not waited for: a process that waits for a dead file server does not end.
            return NodeProblem(f"no answer from {name} in {within_s:g} s")
        # until the child exits: a long text does not fit into the pipe
        said = b"".join(iter(lambda: os.read(answer, select.PIPE_BUF), b""))
        os.waitpid(process, 0)
    finally:
        os.close(answer)
    if not said:
        return NodeProblem(f"the check of {name} was killed")
    problem = json.loads(said)
    return NodeProblem(*problem) if problem else None


# --- GPUs


def device_problem(needed: int, env: Mapping[str, str], nvml: Any | None = None) -> str | None:
    """Return as text why `needed` ranks cannot have a GPU each on this node; None if they can, or if that is unknown.

    `nvml`: the library; None: load it.
    """
    try:
        found = gpus.devices(nvml)
    except OSError:  # no NVIDIA driver: the slots may be GPUs of another vendor, which NVML does not list
        return None
    except gpus.NvmlError as error:
        return f"{error} on this node"
    return _device_problem(needed, found, env.get(gpus.VISIBLE))


def _device_problem(needed: int, found: list[gpus.Device], visible: str | None) -> str | None:
    given = "" if visible is None else f" ({gpus.VISIBLE} is {visible!r})"
    if visible is None:
        mine = [device for device in found if not device.part_of]
    else:
        by_name = {name: gpus.named(found, name) for name in gpus.names(visible)}
        if missing := [name for name, device in by_name.items() if device is None]:
            return f"no such GPU: {', '.join(missing)}{given}"
        mine = [device for device in by_name.values() if device]
    if len(mine) < needed:
        return f"{len(mine)} of {count(needed, 'GPU')}{given}"
    busy = [f"{device.uuid} ({device.used:.0%})" for device in mine[:needed] if device.used > MOST_USED]
    return f"other processes use most of the memory of {', '.join(busy)}" if busy else None
