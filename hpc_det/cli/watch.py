"""An experiment's state: asked once for many, or watched over time."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable

from hpc_det.cli import state as experiment_state
from hpc_det.cli.state import ExperimentState
from hpc_det.errors import HpcDetError
from hpc_det.store.folders import ExperimentFolder
from hpc_det.submit import scheduler as schedulers
from hpc_det.submit.command import run_command
from hpc_det.submit.scheduler import JobState, JobStatus, Scheduler

NO_NEWS = JobStatus(JobState.UNKNOWN)
POLL_S = 0.2
"""How often the files are looked at."""
ASK_S = 2.0
"""How often, at most, a scheduler with a queue is asked: its one controller answers everybody."""


def ask_every_s(scheduler: Scheduler) -> float:
    return ASK_S if scheduler.has_queue else 0.0


def states(experiments: Iterable[ExperimentFolder]) -> dict[int, ExperimentState]:
    """By id. Schedulers are asked only about experiments without a verdict, each one once."""
    found: dict[int, ExperimentState] = {}
    waiting: dict[str, list[tuple[ExperimentFolder, list[str]]]] = {}
    for experiment in experiments:
        settled, submitted = experiment_state.settled(experiment), experiment_state.jobs(experiment)
        if settled or not submitted:
            found[experiment.id] = settled or experiment_state.state(experiment, [])
        else:
            waiting.setdefault(submitted[0].scheduler, []).append((experiment, experiment_state.job_ids(experiment)))
    for name, asked in waiting.items():
        statuses = schedulers.scheduler(name).status([job for _, job_ids in asked for job in job_ids], run_command)
        for experiment, job_ids in asked:
            found[experiment.id] = experiment_state.state(experiment, [statuses[job] for job in job_ids])
    return found


def say(text: str) -> None:
    """News beside the command's own output."""
    print(f"hpc-det: {text}", file=sys.stderr, flush=True)


class Watch:
    """One experiment over time. A requeued job that the scheduler holds back is released on the way."""

    def __init__(self, experiment: ExperimentFolder) -> None:
        self._experiment = experiment
        submitted = experiment_state.jobs(experiment)
        self._scheduler = schedulers.scheduler(submitted[0].scheduler) if submitted else None
        self._next_ask = 0.0
        self._heard: dict[str, JobStatus] = {}
        self._believed: list[JobStatus] = []

    def state(self) -> ExperimentState:
        """The state now, as far as a question to the scheduler is due."""
        found = experiment_state.settled(self._experiment)
        if found is None and self._scheduler and time.monotonic() >= self._next_ask:
            self._ask(self._scheduler)
        return found or experiment_state.state(self._experiment, self._believed)

    def wait(self, poll_s: float) -> ExperimentState:
        """The final state."""
        while not (found := self.state()).is_final:
            time.sleep(poll_s)
        return found

    def _ask(self, scheduler: Scheduler) -> None:
        self._next_ask = time.monotonic() + ask_every_s(scheduler)
        statuses = scheduler.status(experiment_state.job_ids(self._experiment), run_command)
        self._believed = [self._believable(job_id, status) for job_id, status in statuses.items()]
        for job_id, status in statuses.items():
            former = self._heard.get(job_id, JobStatus(JobState.RUNNING))
            for held in set(status.held) - set(former.held):
                self._lift_hold(scheduler, held)
            if status.state is JobState.UNKNOWN is not former.state:
                say(
                    f"the scheduler gives no news of experiment {self._experiment.id}, its files count: {status.reason}"
                )
        self._heard = statuses

    def _believable(self, job_id: str, status: JobStatus) -> JobStatus:
        """A job on its way back into the queue, or files that NFS shows late, look like an end without a word for a
        moment: such an end is believed when it is seen twice.
        """
        seen = self._heard.get(job_id)
        is_news = seen is None or seen.state is not JobState.ENDED
        return NO_NEWS if status.state is JobState.ENDED and is_news else status

    def _lift_hold(self, scheduler: Scheduler, job_id: str) -> None:
        held = f"job {job_id} of experiment {self._experiment.id} is back in the queue, held back by the scheduler"
        try:
            scheduler.release(job_id, run_command)
        except HpcDetError as error:
            say(f"{held} for a while: {error}")
        else:
            say(f"{held}: lifted, it may start now")


def insist_on_completion(experiment: ExperimentFolder, found: ExperimentState) -> None:
    """Raises HpcDetError, which says why, for every other final state."""
    if found is not ExperimentState.COMPLETED:
        why = experiment_state.why_not_completed(experiment, found)
        raise HpcDetError(
            [
                f"experiment {experiment.id}: {found.value}: {why}",
                f"see more with `hpc-det experiment logs {experiment.id}`",
            ]
        )
