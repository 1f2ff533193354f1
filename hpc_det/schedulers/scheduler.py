"""What a scheduler is: command builders, output parsers and one state table.

A third scheduler is one new file here and one template in slurm_templates/. Nothing here imports more than the standard
library: node agents use it too.
"""

from __future__ import annotations

import enum
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol

from hpc_det.plan.container_command import HPC_DET
from hpc_det.plan.job_plan import JobArray, JobPlan
from hpc_det.requeue import Cause
from hpc_det.schedulers.command import Run, run_command


class JobState(enum.Enum):
    QUEUED = "queued"
    HELD = "held"
    """Requeued and held back by the scheduler; `release` lifts it."""
    RUNNING = "running"
    ENDED = "ended"
    UNKNOWN = "unknown"
    """The scheduler could not be asked: no news, never a state to act on."""


@dataclass(frozen=True)
class JobStatus:
    """Of a job, or of all elements of a job array together: RUNNING if any of them runs."""

    state: JobState
    reason: str = ""
    held: tuple[str, ...] = ()
    """The ids that `release` can let go."""
    is_suspended: bool = False
    """RUNNING, but all its processes are stopped until the scheduler resumes it."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One call of sbatch or qsub."""

    script: str
    array: JobArray
    """What the script was written for."""
    index: int | None = None
    """Only this element of the array; None: all of them."""
    after: str | None = None
    """A job that must have ended before."""
    exclude: tuple[str, ...] = ()
    """Hosts to keep away from."""


class Scheduler(Protocol):
    """Stateless. `env` is the environment of the job, on its own nodes."""

    template: str
    """The script's template in slurm_templates/."""
    has_queue: bool
    """Whether a job can go back into a queue. Without one, its next attempt starts at once in the same job."""

    def script_variables(self, plan: JobPlan, array: JobArray, script: Path) -> dict[str, object]:
        """What the template is rendered with, all of it used there. `script`: where it will lie."""

    def submit_command(self, submission: Submission, run: Run = run_command) -> list[str]:
        """Raises CommandError where these are another scheduler's commands, or too few nodes are left to run on."""

    def parse_submit(self, output: str, element: int | None = None) -> str:
        """The job id; ValueError where there is none. `element`: the only one of its array that was submitted."""

    def status(self, job_ids: Sequence[str], run: Run) -> dict[str, JobStatus]:
        """One query for all jobs. A failed query is UNKNOWN for each."""

    def cancel(self, job_id: str, run: Run) -> None: ...

    def withdraw(self, job_id: str, run: Run) -> None:
        """Take a job, or the elements of an array, out of the queue; what runs already goes on."""

    def release(self, job_id: str, run: Run) -> None:
        """Let a requeued job start now."""

    def job_id(self, env: Mapping[str, str]) -> str: ...

    def array_index(self, env: Mapping[str, str]) -> int:
        """The place of the job in its array, from 0."""

    def share(self, plan: JobPlan, place: int) -> dict[str, str]:
        """The environment of the worker at this place among those that share an allocation, from 0."""

    def node_rank(self, env: Mapping[str, str]) -> int: ...

    def hosts(self, env: Mapping[str, str]) -> list[str]:
        """The nodes of the gang that `env` belongs to, by node rank, in the names that `Submission.exclude` takes."""

    def down_hosts(self, hosts: Sequence[str], run: Run) -> list[str]:
        """Those of `hosts`, in the same names, that the scheduler takes for down. Raises CommandError."""

    def unreached_hosts(self, printed: str) -> list[str]:
        """The hosts that the starter of agents could not reach, or has lost, from what it has printed."""

    def was_away(self, printed: str) -> bool:
        """Whether what starts processes on nodes could not, since the scheduler gave it no answer."""

    def avoid(self, job_id: str, hosts: Sequence[str], run: Run) -> None:
        """Keep a job that waits in the queue, or is requeued, away from these hosts."""

    def ends_at(self, plan: JobPlan, env: Mapping[str, str], run: Run) -> float | None:
        """When the job that `env` belongs to is out of time, in seconds since the epoch; None: never, or unknown."""

    def stop_cause(self, plan: JobPlan, env: Mapping[str, str], signalled_at: float, run: Run) -> Cause:
        """Why the job that `env` belongs to was signalled."""

    def replaced(self, job_id: str, run: Run) -> None:
        """Another job goes on for this one: the scheduler need not put it back, whatever happens to it."""

    def requeue(self, job_id: str, env: Mapping[str, str], run: Run) -> None:
        """Put the running job that `env` belongs to back. Once more is harmless."""


_CLASSES = {
    "slurm": ("hpc_det.schedulers.slurm.scheduler", "Slurm"),
    "pbs": ("hpc_det.schedulers.pbs.scheduler", "Pbs"),
    "local": ("hpc_det.schedulers.local.scheduler", "Local"),
}


def scheduler(name: str) -> Scheduler:
    """The scheduler `name` of a plan, imported on use."""
    module, class_name = _CLASSES[name]
    instance: Scheduler = getattr(import_module(module), class_name)()
    return instance


def array_of(job_id: str) -> str:
    """The id of the whole array, for that of an element: `12` for Slurm's `12_3`, `12[].server` for `12[3].server`."""
    return re.sub(r"\[\d+\]", "[]", job_id.partition("_")[0])


def agent_command(plan: JobPlan) -> str:
    """The node agent's command line; the trial, the attempt and the worker are appended where it is started."""
    in_container = plan.container and not plan.container.starts_entrypoint
    python = ["env", f"PYTHONPATH={HPC_DET}", "python3"] if in_container else [plan.python]
    return shlex.join([*python, "-m", "hpc_det.launch.agent"])


def common_variables(plan: JobPlan, script: Path) -> dict[str, object]:
    """What every template shows."""
    return {
        "title": f"experiment {plan.experiment_id}: {plan.name}",
        "modules": [f"module load {shlex.quote(module)} || exit" for module in plan.modules],
        "setup": list(plan.setup),
        "python_folder": shlex.quote(plan.python.rpartition("/")[0]),
        "job": _job_command(plan, script),
    }


def _job_command(plan: JobPlan, script: Path) -> str:
    return shlex.join([plan.python, "-m", "hpc_det.launch.job", plan.folder, script.stem])
