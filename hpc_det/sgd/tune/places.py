"""Where the processes of trials run: beside each other on this machine, or each as a job of its own."""

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

from hpc_det.errors import UsageError
from hpc_det.node.process import ends_with_parent
from hpc_det.node.suspension import guard_from_now_on
from hpc_det.schedulers.scheduler import JobState, JobStatus, run_command
from hpc_det.schedulers.slurm.scheduler import Slurm
from hpc_det.sgd.capacity.job import Queue, executor_of, inner_executor
from hpc_det.sgd.capacity.starters import gpus_here, variable_of_allocation
from hpc_det.sgd.tune.files import TuneTrial

_GPUS = "CUDA_VISIBLE_DEVICES"
END_S = 15.0
"""For a trial's process to clean up."""
ASK_S = 1.0
"""Between two questions how jobs stand."""
_WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Slurm's, before it takes the nodes."""


class Process(Protocol):
    job: str | None
    """By which another driver would find it again."""
    log: Path
    """Where it says last what went wrong."""

    def is_running(self) -> bool: ...
    def end(self) -> None:
        """Ask it to; where that takes longer than END_S, insist. Returns at once; ask again until it has ended."""


class TrialPlace(Protocol):
    slots: int
    """How many trials run at the same time, at most."""
    poll_s: float
    """Between two looks at what trials have written."""

    def start(self, slot: int, trial: TuneTrial, number: int) -> Process:
        """The trial's process of this number. Raises CommandError where a scheduler refuses it."""

    def found(self, job: str) -> Process | None:
        """A process that an earlier driver has started, if it may run."""


class _Child:
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
    """On this machine; each slot has its own GPUs."""

    poll_s = 0.02

    def __init__(self, slots: int, gpus: Sequence[Sequence[str]] | None, env: Mapping[str, str]) -> None:
        """`gpus`: those of each slot, as CUDA_VISIBLE_DEVICES has them; None: trials use none of their own."""
        self.slots = slots
        self._gpus = gpus
        self._env = env

    def start(self, slot: int, trial: TuneTrial, number: int) -> Process:
        if variable_of_allocation(self._env):  # PBS suspends only the session that the driver is in
            guard_from_now_on()
        own = {_GPUS: ",".join(self._gpus[slot])} if self._gpus is not None else {}
        with trial.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "hpc_det.sgd.tune.trial", str(trial.path), str(number)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**self._env, **own},
                start_new_session=True,  # Ctrl-C is for the driver, which ends its trials
                preexec_fn=ends_with_parent,
            )
        return _Child(process, trial.log)

    def found(self, job: str) -> Process | None:
        return None


def packed(resources: Mapping[str, int], env: Mapping[str, str], max_concurrent: int | None) -> Packed:
    """As many slots as this machine has room for trials that take so many {"cpu", "gpu"}, or `max_concurrent`, on GPUs
    no more than there is room for. UsageError where there are too few GPUs for a single one.
    """
    cpu, gpu = resources.get("cpu", 1), resources.get("gpu", 0)
    if not gpu:  # too little of the CPU makes trials slow, no more
        room = max(len(os.sched_getaffinity(0)) // max(cpu, 1), 1)
        return Packed(max_concurrent or room, None, env)
    visible = gpus_here(env)
    if gpu > len(visible):
        raise UsageError(f"resources_per_trial: a trial takes {gpu} GPUs, and this machine shows {len(visible)}")
    slots = min(len(visible) // gpu, max_concurrent or len(visible))
    return Packed(slots, [visible[i * gpu : (i + 1) * gpu] for i in range(slots)], env)


class TrialJob:
    """What submitit calls in each task of the job; on PBS, a job that is put back goes on from the last checkpoint."""

    def __init__(self, folder: str, number: int) -> None:
        self.folder = folder
        self.number = number

    def __call__(self) -> int:
        from submitit import JobEnvironment

        from hpc_det.sgd.tune.trial import main

        env = JobEnvironment()
        if env.global_rank:  # the first task trains, with what nodes the job has
            return 0
        warned_by = _WARNINGS if "SLURM_JOB_ID" in os.environ and env.activated() else ()
        return main(Path(self.folder), self.number, warned_by)

    def checkpoint(self) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


class _Job:
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
    """submitit asks for a job's state every ten minutes, and only where sacct is."""

    def __init__(self, job: Any, states: _States) -> None:
        super().__init__(job)
        self._states = states
        self._asked_at: float | None = None
        states.jobs.append(job)

    def is_running(self) -> bool:
        if self._job.paths.result_pickle.exists() or self._states.has_ended(self._job):
            self._states.forget(self._job)
            return False
        return True

    def end(self) -> None:
        if self._asked_at is None:
            super().end()
            self._asked_at = time.monotonic()
        elif time.monotonic() > self._asked_at + END_S:
            self._states.queue.end([self._job])
            self._asked_at = time.monotonic()


class _States:
    """Of all jobs that trials have in the queue: one question for all."""

    def __init__(self) -> None:
        self.queue = Queue("slurm")
        self.jobs: list[Any] = []
        self._known: dict[str, JobStatus] = {}
        self._asked_at = float("-inf")

    def has_ended(self, job: Any) -> bool:
        if time.monotonic() > self._asked_at + ASK_S:
            self._asked_at = time.monotonic()
            self._known = self.queue.status(self.jobs)
        status = self._known.get(job.job_id)
        return status is not None and status.state is JobState.ENDED

    def forget(self, job: Any) -> None:
        with suppress(ValueError):  # it was asked about before
            self.jobs.remove(job)


class Jobs:
    """Each trial is a job that `executor`, one of submitit's, submits. Its own job_class is asked how jobs stand, but
    not on Slurm: there a job that is to be put back into the queue ends, and the driver submits another.
    """

    poll_s = 0.2

    def __init__(self, executor: Any, slots: int) -> None:
        """Raises UsageError for what submitit refuses."""
        inner = inner_executor(executor)
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
