"""The places for the processes of trials: slots of this machine, or one job per trial."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from hpc_det.errors import UsageError, count
from hpc_det.node.files import make_folders
from hpc_det.node.process import ends_with_parent
from hpc_det.node.suspension import guard_from_now_on
from hpc_det.schedulers.scheduler import JobState, JobStatus, run_command
from hpc_det.schedulers.slurm.scheduler import Slurm
from hpc_det.sgd.capacity.job import Queue, executor_of, inner_executor
from hpc_det.sgd.capacity.starters import gpus_here, variable_of_allocation
from hpc_det.sgd.tune.files import TuneTrial
from hpc_det.store.log_lines import printed_to

_GPUS = "CUDA_VISIBLE_DEVICES"
END_S = 15.0
"""Seconds that the process of a trial may take to clean up; then it is killed."""
ASK_S = 1.0
"""Shortest time in seconds between two requests for the states of jobs."""
_WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that Slurm may send some time before it takes the nodes away."""


class Process(Protocol):
    """A process of a trial, seen by the driver."""

    job: str | None
    """Id by which another driver finds the process again; None if it ends with its driver."""
    log: Path
    """File with the output of the process, or with that before the trial began (see TrialJob)."""

    def is_running(self) -> bool: ...
    def end(self) -> None:
        """Ask the process to exit, or kill it if it was asked more than END_S seconds ago, and return at once.

        Call it again until the process has ended.
        """


class TrialPlace(Protocol):
    """A place that runs the processes of trials."""

    slots: int
    """Largest number of trials at the same time."""
    poll_s: float
    """Seconds between two checks of the trials' files."""

    def start(self, slot: int, trial: TuneTrial, number: int) -> Process:
        """Start the process with this number of a trial. Raises CommandError if a scheduler rejects it."""

    def found(self, job: str) -> Process | None:
        """Return the process of an earlier driver with this id (`Process.job`); None if it is known to have ended."""


class _Child:
    """A process on this machine."""

    job: str | None = None

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self.log = log
        self._asked_at: float | None = None

    def is_running(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            self._process.terminate()
        elif time.monotonic() > self._asked_at + END_S:
            self._process.kill()


class Packed:
    """Slots of this machine, each with separate GPUs. The processes of trials are children of the driver."""

    poll_s = 0.02

    def __init__(self, slots: int, gpus: Sequence[Sequence[str]] | None, env: Mapping[str, str]) -> None:
        """`gpus`: the GPUs of each slot, as named in CUDA_VISIBLE_DEVICES; None: no GPUs are assigned to trials."""
        self.slots = slots
        self._gpus = gpus
        self._env = env

    def start(self, slot: int, trial: TuneTrial, number: int) -> Process:
        if variable_of_allocation(self._env):  # PBS suspends only the driver's session, not those of the trials
            guard_from_now_on()
        own = {_GPUS: ",".join(self._gpus[slot])} if self._gpus is not None else {}
        path = trial.rank_log(number, 0)
        make_folders(path.parent)
        with path.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "hpc_det.sgd.tune.trial", str(trial.path), str(number)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**self._env, **own},
                start_new_session=True,  # a Ctrl-C must reach only the driver, which ends its trials
                preexec_fn=ends_with_parent,
            )
        return _Child(process, path)

    def found(self, job: str) -> Process | None:
        """Return None: the processes end with the driver that has started them."""
        return None


def packed(resources: Mapping[str, int], env: Mapping[str, str], max_concurrent: int | None) -> Packed:
    """Return slots of this machine for trials that take these resources, {"cpu": n, "gpu": m}.

    There are `max_concurrent` slots, or as many as the machine has resources for; slots with GPUs never share one.
    Raises UsageError if there are too few GPUs for one trial.
    """
    cpu, gpu = resources.get("cpu", 1), resources.get("gpu", 0)
    if not gpu:  # CPUs may be overcommitted: trials then only run slower
        room = max(len(os.sched_getaffinity(0)) // max(cpu, 1), 1)
        return Packed(max_concurrent or room, None, env)
    visible = gpus_here(env)
    if gpu > len(visible):
        raise UsageError(
            f"resources_per_trial: a trial takes {count(gpu, 'GPU')}, but this machine has {len(visible)}; use fewer, "
            "or an executor"
        )
    slots = min(len(visible) // gpu, max_concurrent or len(visible))
    return Packed(slots, [visible[i * gpu : (i + 1) * gpu] for i in range(slots)], env)


class TrialJob:
    """The function that submitit calls in each task of a trial's job.

    If PBS requeues the job, the trial continues from its last checkpoint.
    """

    def __init__(self, folder: str, number: int) -> None:
        self.folder = folder
        self.number = number

    def __call__(self) -> int:
        from submitit import JobEnvironment

        from hpc_det.sgd.tune.trial import main

        env = JobEnvironment()
        if env.global_rank:  # only the first task trains, and may use all nodes of the job
            return 0
        log = TuneTrial(Path(self.folder)).rank_log(self.number, 0)
        print(f"the output of the trial is in {log}")
        make_folders(log.parent)
        # On Slurm a trial's job is not requeued (Jobs), so the process handles the signals itself. On PBS submitit's
        # handlers stay, because they requeue the job.
        warned_by = _WARNINGS if "SLURM_JOB_ID" in os.environ and env.activated() else ()
        with printed_to(log):
            return main(Path(self.folder), self.number, warned_by)

    def checkpoint(self) -> Any:
        """Return this function for submitit to requeue."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


class _Job:
    """A process of a trial in a job of submitit."""

    def __init__(self, job: Any) -> None:
        self._job = job
        self.job: str | None = job.job_id
        self.log: Path = job.paths.stderr
        self._is_cancelled = False

    def is_running(self) -> bool:
        return not self._job.done()

    def end(self) -> None:
        if not self._is_cancelled:
            self._is_cancelled = True
            with suppress(subprocess.CalledProcessError):  # it has ended meanwhile
                self._job.cancel()


class _SlurmJob(_Job):
    """A process of a trial in a Slurm job."""

    # submitit itself would ask for the state only every ten minutes, and only with sacct.

    def __init__(self, job: Any, states: _States) -> None:
        super().__init__(job)
        self._states = states
        self._asked_at: float | None = None
        states.jobs.append(job)

    def is_running(self) -> bool:
        # The result exists before the queue shows the end.
        if self._job.paths.result_pickle.exists() or self._states.has_ended(self._job):
            self._states.forget(self._job)
            return False
        return True

    def end(self) -> None:
        if self._asked_at is None:
            super().end()
            self._asked_at = time.monotonic()
        elif time.monotonic() > self._asked_at + END_S:
            self._states.queue.end([self._job])  # kills it; repeated, because the command may have failed
            self._asked_at = time.monotonic()


class _States:
    """The states of all trials' jobs in the queue, requested by one command."""

    def __init__(self) -> None:
        self.queue = Queue("slurm")
        self.jobs: list[Any] = []
        self._known: dict[str, JobStatus] = {}
        self._asked_at = float("-inf")

    def has_ended(self, job: Any) -> bool:
        """Return whether the scheduler reports that the job has ended."""
        if time.monotonic() > self._asked_at + ASK_S:
            self._asked_at = time.monotonic()
            self._known = self.queue.status(self.jobs)
        status = self._known.get(job.job_id)
        return status is not None and status.state is JobState.ENDED

    def forget(self, job: Any) -> None:
        """Request the state of this job no more."""
        with suppress(ValueError):  # called before for the same job
            self.jobs.remove(job)


class Jobs:
    """One job per trial, submitted by an executor of submitit.

    On Slurm the queue shows the states of the jobs; otherwise the executor's job_class does.
    """

    poll_s = 0.2

    def __init__(self, executor: Any, slots: int) -> None:
        """`slots`: largest number of jobs at the same time. Raises UsageError for parameters that submitit rejects."""
        inner = inner_executor(executor)
        # On Slurm the copy of the executor does not requeue jobs: they end, and the driver submits new ones.
        self._states = _States() if inner.name() == "slurm" else None
        self._executor = executor_of(executor, None, {}) if self._states else inner
        self.slots = slots

    def start(self, slot: int, trial: TuneTrial, number: int) -> Process:
        from hpc_det.submit.executor import submission

        with submission():
            return self._process(self._executor.submit(TrialJob(str(trial.path), number)))

    def found(self, job: str) -> Process | None:
        if self._states and Slurm().status([job], run_command)[job].state is JobState.ENDED:
            return None
        return self._process(self._executor.job_class(self._executor.folder, job))

    def _process(self, job: Any) -> Process:
        return _SlurmJob(job, self._states) if self._states else _Job(job)
