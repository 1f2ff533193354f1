"""An experiment's state: asked once for many, or watched over time."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable

from hpc_det.cli import story
from hpc_det.cli.story import NO_NEWS, ExperimentState, SubmittedJob
from hpc_det.errors import HpcDetError
from hpc_det.store.folders import ExperimentFolder
from hpc_det.submit import scheduler as schedulers
from hpc_det.submit.command import run_command
from hpc_det.submit.scheduler import JobState, Scheduler

POLL_S = 0.2
"""How often the files are looked at."""
ASK_S = 2.0
"""How often, at most, a scheduler with a queue is asked: its one controller answers everybody."""


def ask_every_s(scheduler: Scheduler) -> float:
    return ASK_S if scheduler.has_queue else 0.0


def states(experiments: Iterable[ExperimentFolder]) -> dict[int, ExperimentState]:
    """By id. Schedulers are asked only about experiments without a verdict, each one once."""
    waiting: dict[str, dict[str, ExperimentFolder]] = {}
    found: dict[int, ExperimentState] = {}
    for experiment in experiments:
        settled, job = story.settled(experiment.trial()), story.job(experiment.trial())
        if settled or job is None:
            found[experiment.id] = settled or story.state(experiment.trial(), NO_NEWS)
        else:
            waiting.setdefault(job.scheduler, {})[job.job_id] = experiment
    for name, jobs in waiting.items():
        statuses = schedulers.scheduler(name).status(list(jobs), run_command)
        found |= {jobs[i].id: story.state(jobs[i].trial(), status) for i, status in statuses.items()}
    return found


def say(text: str) -> None:
    """News beside the command's own output."""
    print(f"hpc-det: {text}", file=sys.stderr, flush=True)


class Watch:
    """One experiment over time. A requeued job that the scheduler holds back is released on the way."""

    def __init__(self, experiment: ExperimentFolder) -> None:
        self._experiment = experiment
        self._trial = experiment.trial()
        self._job = story.job(self._trial)
        self._next_ask = 0.0
        self._heard: JobState | None = None
        self._believed = NO_NEWS

    def state(self) -> ExperimentState:
        """The state now, as far as a question to the scheduler is due."""
        found = story.settled(self._trial)
        if found is None and self._job and time.monotonic() >= self._next_ask:
            self._ask(self._job)
        return found or story.state(self._trial, self._believed)

    def wait(self, poll_s: float) -> ExperimentState:
        """The final state."""
        while not (found := self.state()).is_final:
            time.sleep(poll_s)
        return found

    def _ask(self, job: SubmittedJob) -> None:
        scheduler = schedulers.scheduler(job.scheduler)
        self._next_ask = time.monotonic() + ask_every_s(scheduler)
        status = scheduler.status([job.job_id], run_command)[job.job_id]
        is_news = status.state is not self._heard
        self._heard, self._believed = status.state, status
        if is_news and status.state is JobState.HELD:
            self._lift_hold(scheduler, job)
        elif is_news and status.state is JobState.UNKNOWN:
            say(f"the scheduler gives no news of experiment {self._experiment.id}, its files count: {status.reason}")
        elif is_news and status.state is JobState.ENDED:
            # A job on its way back into the queue, or files that NFS shows late, look like an end without a word for
            # a moment: such an end is believed when it is seen twice.
            self._believed = NO_NEWS

    def _lift_hold(self, scheduler: Scheduler, job: SubmittedJob) -> None:
        held = f"experiment {self._experiment.id} is back in the queue, held back by the scheduler"
        try:
            scheduler.release(job.job_id, run_command)
        except HpcDetError as error:
            say(f"{held} for a while: {error}")
        else:
            say(f"{held}: lifted, it may start now")


def insist_on_completion(experiment: ExperimentFolder, found: ExperimentState) -> None:
    """Raises HpcDetError, which says why, for every other final state."""
    if found is not ExperimentState.COMPLETED:
        why = story.why_not_completed(experiment.trial(), found)
        raise HpcDetError(
            [
                f"experiment {experiment.id}: {found.value}: {why}",
                f"see more with `hpc-det experiment logs {experiment.id}`",
            ]
        )
