"""A job in the server's memory: its submission, its state and processes, and its end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from tests.labs.pbs.resources import Chunk, parse_walltime
from tests.labs.pbs.site import SERVER

# Numbers that qstat shows as `substate`.
QUEUED, HELD_BY_USER, HELD_BY_DEPENDENCY, WAITING, STARTING, RUNNING = 10, 20, 22, 30, 41, 42
SUSPENDED, SUSPENDED_BY_SCHEDULER, EXITING, RERUNNING, NODE_LOST = 43, 45, 50, 60, 63
ARRAY_BEGUN, TERMINATED, FINISHED, FAILED = 70, 91, 92, 93

# Exit_status of runs that PBS itself ended.
REQUEUED, SISTER_LOST, FIRST_NODE_LOST, OVER_WALLTIME = -11, -14, -20, -29
REMOVED_SUBJOB = 1

DONE = "FX"


@dataclass(frozen=True)
class Submission:
    """The content of a `qsub` request; its fields can be written as JSON."""

    name: str
    queue: str
    resources: dict[str, Any]
    chunks: list[dict[str, Any]]
    variables: dict[str, str]
    workdir: str
    owner: str
    arguments: str
    script: str | None = None
    argv: list[str] | None = None
    shell: str | None = None
    output: str | None = None
    error: str | None = None
    join: str = "n"
    keep: str = "n"
    rerunnable: bool = True
    held: bool = False
    umask: int = 0o077
    depend: list[tuple[str, list[str]]] = field(default_factory=list)
    array: tuple[int, int, int] | None = None
    """First and last index, and the step."""
    max_run_subjobs: int | None = None
    execution_time: float | None = None
    priority: int = 0
    account: str | None = None
    project: str = "_pbs_project_default"


@dataclass
class Task:
    """One session of a job on one of its nodes; the first task is the job script or the program."""

    pid: int
    node: int
    number: str
    """`PBS_TASKNUM`."""
    status: int | None = None
    """Its exit code, or 256 plus the number of the signal that ended it; None while it runs."""
    watcher: Any = None
    """The connection of a pbsdsh or pbs_tmrsh that waits for its end."""
    lost: bool = False
    """Whether its node went down, so that its end is not reported."""


@dataclass(frozen=True)
class Waiter:
    """A command that blocks until the job has ended, or (`of_run`) until its current run has."""

    connection: Any
    of_run: bool


@dataclass(frozen=True)
class Slot:
    """One chunk on its node."""

    node: str
    index: int
    chunk: Chunk

    @property
    def host(self) -> str:
        return f"{self.node}/{self.index}" + ("" if self.chunk.ncpus == 1 else f"*{self.chunk.ncpus}")

    @property
    def vnode(self) -> str:
        taken = "".join(f":{name}={value}" for name, value in self.chunk.takes.items())
        return f"({self.node}{taken})"


@dataclass
class Job:
    number: int
    submission: Submission
    index: int | None = None
    """The index of a subjob; None for other jobs."""
    parent: Job | None = None
    subjobs: list[Job] = field(default_factory=list)

    name: str = ""
    queue: str = ""
    priority: int = 0
    rerunnable: bool = True
    resources: dict[str, Any] = field(default_factory=dict)
    chunks: list[Chunk] = field(default_factory=list)
    output: str | None = None
    error: str | None = None
    depend: list[tuple[str, list[str]]] = field(default_factory=list)
    dependents: list[tuple[str, str]] = field(default_factory=list)
    """Kind and ID of the jobs that wait for this one: shown in `depend`, too, and kept after the end."""
    holds: set[str] = field(default_factory=set)
    execution_time: float | None = None
    rank: float = field(default_factory=time.time)
    """Its place in the queue."""

    state: str = "Q"
    substate: int = QUEUED
    comment: str | None = None
    exit_status: int | None = None
    run_count: int = 0
    ctime: float = field(default_factory=time.time)
    mtime: float = field(default_factory=time.time)
    etime: float | None = None
    stime: float | None = None
    obittime: float | None = None
    session_id: int | None = None

    slots: list[Slot] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    ending: str | None = None
    """Why TERM was sent: delete, requeue, walltime; None if no end was requested."""
    ended_by: str = ""
    kill_at: float | None = None
    next_look: float = 0
    """When to check its walltime, or the rest of its session, again."""
    gone_at: float | None = None
    """When its last process was found to have ended."""
    lost_at: float | None = None
    """When one of its nodes was lost; `lost_status` is the Exit_status that follows."""
    lost_status: int = 0
    suspended_at: float | None = None
    suspended_s: float = 0
    waiters: list[Waiter] = field(default_factory=list)

    def __post_init__(self) -> None:
        sent = self.submission
        self.name, self.queue, self.priority = sent.name, sent.queue, sent.priority
        self.rerunnable, self.resources = sent.rerunnable, dict(sent.resources)
        self.chunks = [Chunk(**chunk) for chunk in sent.chunks]
        self.output, self.error, self.execution_time = sent.output, sent.error, sent.execution_time

    @property
    def id(self) -> str:
        index = "" if self.index is None else str(self.index)
        brackets = f"[{index}]" if self.is_array or self.index is not None else ""
        return f"{self.number}{brackets}.{SERVER}"

    @property
    def is_array(self) -> bool:
        return self.submission.array is not None and self.parent is None

    @property
    def is_done(self) -> bool:
        return self.state in DONE

    @property
    def vnodes(self) -> str | None:
        """`exec_vnode`."""
        return "+".join(slot.vnode for slot in self.slots) or None

    @property
    def nodes(self) -> list[str]:
        """Its nodes, each once, in the order of the chunks."""
        return list(dict.fromkeys(slot.node for slot in self.slots))

    @property
    def walltime_s(self) -> float | None:
        limit = self.resources.get("walltime")
        return None if limit is None else parse_walltime(limit)

    def used_walltime_s(self, now: float) -> float:
        """Return the used walltime [s], which does not increase while the job is suspended."""
        if self.stime is None:
            return 0
        return (self.gone_at or self.suspended_at or now) - self.stime - self.suspended_s

    @property
    def top(self) -> Task:
        """The session of the job script or program, on the first node."""
        return self.tasks[0]

    def sessions(self, first_node_only: bool = False) -> list[int]:
        """Return the IDs of the sessions that PBS can reach."""
        return [task.pid for task in self.tasks if not task.lost and not (first_node_only and task.node)]
