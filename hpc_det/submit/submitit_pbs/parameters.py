"""What a program may ask for, and the directives that say so to qsub."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

GENERIC = ("name", "timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node")
"""Of every executor, with stderr_to_stdout: AutoExecutor takes them without a prefix."""
_OURS = {
    "N": "use name",
    "q": "use pbs_queue",
    "A": "use pbs_account",
    "J": "use map_array or batch, and pbs_array_parallelism",
    "V": "the environment travels in a file",
    "v": "the environment travels in a file",
    "j": "submitit names the logs",
    "o": "submitit names the logs",
    "e": "submitit names the logs",
    "k": "submitit names the logs",
    "r": "submitit brings jobs back",
    "I": "a job runs without you",
}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_UNSAFE = re.compile(r"[\s'\"\\]")


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Raises ValueError with everything that cannot be, where it is made."""

    name: str = "submitit"
    """As an experiment's: PBS gets "_" for what it takes in no name."""
    timeout_min: float = 5
    nodes: int = 1
    tasks_per_node: int = 1
    cpus_per_task: int = 1
    gpus_per_node: int = 0
    mem_gb: float | None = None
    """Of each node."""
    stderr_to_stdout: bool = False
    queue: str | None = None
    account: str | None = None
    setup: Sequence[str] = ()
    """Shell lines, run before the tasks start."""
    signal_delay_s: int = 90
    """How long before the time limit task 0 is told to save. At most half of the time."""
    array_parallelism: int = 256
    additional_parameters: Mapping[str, Any] = field(default_factory=dict)
    """Flags of qsub: a text, several, or True. They come last, and of two selects PBS takes the last."""

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise ValueError("\n".join(problems))

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Parameters:
        """None is the default. Raises ValueError for an unknown name, too, with all that are known."""
        known = {each.name for each in fields(cls)}
        if unknown := sorted(set(given) - known):
            raise ValueError(f"unknown parameters {unknown}; PBS takes {sorted(known)}")
        return cls(**{name: value for name, value in given.items() if value is not None})

    @property
    def walltime_s(self) -> int:
        return math.ceil(self.timeout_min * 60)

    @property
    def warning_s(self) -> float:
        """How long before the time limit the tasks hear of it."""
        return min(self.signal_delay_s, self.walltime_s / 2)

    def directives(self) -> list[str]:
        """For the script's lines `#PBS`. Jobs start with umask 077 and, for PBS, may be run again."""
        from hpc_det.schedulers.pbs.scheduler import job_name  # this module is loaded by every program with submitit

        hours, seconds = divmod(self.walltime_s, 3600)
        lines = [f"-N {job_name(self.name)}", f"-l select={self._select()}", "-l place=scatter"]
        lines += [f"-l walltime={hours:02}:{seconds // 60:02}:{seconds % 60:02}", "-r y", "-j oe", "-k oed"]
        lines += [f"-q {self.queue}"] if self.queue else []
        lines += [f"-A {self.account}"] if self.account else []
        return lines + [f"-{flag}" if text is True else f"-{flag} {text}" for flag, text in self._additional()]

    def _select(self) -> str:
        """One chunk a node. NCPUS and OMP_NUM_THREADS follow from it: PBS sets the latter to ompthreads."""
        tasks, cpus = self.tasks_per_node, self.cpus_per_task
        gpus = f":ngpus={self.gpus_per_node}" if self.gpus_per_node else ""
        memory = f":mem={math.ceil(self.mem_gb * 1024)}mb" if self.mem_gb else ""
        return f"{self.nodes}:ncpus={tasks * cpus}:mpiprocs={tasks}:ompthreads={cpus}{gpus}{memory}"

    def _additional(self) -> Iterator[tuple[str, Any]]:
        for flag, value in self.additional_parameters.items():
            several = [value] if isinstance(value, str) or not isinstance(value, Sequence) else value
            yield from ((flag.lstrip("-"), each) for each in several)

    def _problems(self) -> Iterator[str]:
        for name in ("nodes", "tasks_per_node", "cpus_per_task", "array_parallelism", "timeout_min"):
            if getattr(self, name) <= 0:
                yield f"{name}: {getattr(self, name)!r} is not above 0"
        if self.gpus_per_node < 0 or self.signal_delay_s < 0:
            yield f"gpus_per_node {self.gpus_per_node}, signal_delay_s {self.signal_delay_s}: below 0"
        if not self.name:
            yield "name: '' is empty"
        for name, text in (("pbs_queue", self.queue), ("pbs_account", self.account)):
            if text is not None and (not text or _UNSAFE.search(text) or _CONTROL.search(text) or text.startswith("-")):
                yield f"{name}: {text!r} is empty, or holds what a line of qsub cannot: blanks, quotes, a first '-'"
        if isinstance(self.setup, str):
            yield f"pbs_setup: {self.setup!r} is one text; give a list of lines"
        yield from self._additional_problems()

    def _additional_problems(self) -> Iterator[str]:
        for flag, value in self._additional():
            where = f"pbs_additional_parameters: {flag!r}"
            if not re.fullmatch("[A-Za-z]", flag):
                yield f"{where} is no flag of qsub, which has single letters such as 'l', 'm' and 'W'"
            elif flag in _OURS:
                yield f"{where} is set already; {_OURS[flag]}"
            elif value is not True and (not str(value) or _UNSAFE.search(str(value)) or _CONTROL.search(str(value))):
                yield f"{where}: {value!r} is empty, or holds what a line of qsub cannot: blanks, quotes"
