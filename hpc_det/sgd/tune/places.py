"""Where the processes of trials run: beside each other on this machine, or each as a job of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from hpc_det.errors import UsageError
from hpc_det.process import ends_with_parent
from hpc_det.sgd.gpus import gpus_here
from hpc_det.sgd.tune.files import TuneTrial

_GPUS = "CUDA_VISIBLE_DEVICES"
END_S = 15.0
"""For a trial's process to clean up."""


class Process(Protocol):
    job: str | None
    """By which another driver would find it again."""

    def is_running(self) -> bool: ...
    def end(self) -> None:
        """Ask it to; where that takes longer than END_S, insist. Returns at once; ask again until it has ended."""


class Place(Protocol):
    slots: int
    """How many trials run at the same time, at most."""

    def start(self, slot: int, trial: TuneTrial, number: int) -> Process:
        """The trial's process of this number."""

    def found(self, job: str) -> Process | None:
        """A process that an earlier driver has started, if it may run."""


class _Child:
    job: str | None = None

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
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

    def __init__(self, slots: int, gpus: Sequence[Sequence[str]] | None, env: Mapping[str, str]) -> None:
        """`gpus`: those of each slot, as CUDA_VISIBLE_DEVICES has them; None: trials use none of their own."""
        self.slots = slots
        self._gpus = gpus
        self._env = env

    def start(self, slot: int, trial: TuneTrial, number: int) -> Process:
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
        return _Child(process)

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
    """What submitit calls in the job; a requeued job goes on from the trial's last checkpoint."""

    def __init__(self, folder: str, number: int) -> None:
        self.folder = folder
        self.number = number

    def __call__(self) -> int:
        from hpc_det.sgd.tune.trial import main

        return main(Path(self.folder), self.number)

    def checkpoint(self) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


class _Job:
    def __init__(self, job: Any) -> None:
        self._job = job
        self.job: str | None = job.job_id
        self._is_cancelled = False

    def is_running(self) -> bool:
        return not self._job.done()

    def end(self) -> None:
        if not self._is_cancelled:
            self._is_cancelled = True
            with suppress(subprocess.CalledProcessError):  # it has ended meanwhile
                self._job.cancel()


class Jobs:
    """Each trial is a job that `executor`, one of submitit's, submits."""

    def __init__(self, executor: Any, slots: int) -> None:
        self._executor = executor
        self.slots = slots

    def start(self, slot: int, trial: TuneTrial, number: int) -> Process:
        return _Job(self._executor.submit(TrialJob(str(trial.path), number)))

    def found(self, job: str) -> Process | None:
        inner = getattr(self._executor, "_executor", self._executor)  # of an AutoExecutor
        return _Job(inner.job_class(self._executor.folder, job))
