"""The attempt of a run outside a job: the experiment that this process continues or begins, and the attempt's end.

The process takes the place of a job and its worker: rank 0 writes the journals of the trial and of the search. Of two
processes that start the same script at once, the search's journal lets only one continue an experiment.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpc_det.checkpoint.committed import newest_steps
from hpc_det.core.entry import seed_of
from hpc_det.core.local_stops import StopRequests
from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.rank_process import failure_of
from hpc_det.node.json_files import read_map, write_json
from hpc_det.plan.local_experiment import (
    Arguments,
    GangSize,
    make_experiment,
    write_config_for_people,
    write_plan_and_config,
)
from hpc_det.requeue import Action, AttemptEnd, Cause, Decision
from hpc_det.schedulers.local import JobId
from hpc_det.search.journal import SearchJournal
from hpc_det.search.method import Exit
from hpc_det.store.attempt import HOOK, StopRequest, first_failure, note_failure, read_stop
from hpc_det.store.experiments import ExperimentStore, state_root
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from hpc_det.store.journal import Journal, Overtaken
from hpc_det.store.local_run import Heartbeat, Script, is_alive
from hpc_det.store.submitting import record_job, submitting, unused_job

WORKER, TRIAL = 0, 1
"""Numbers in the search, whose only worker is the process and whose only trial is the run."""
AGAIN = "start the script again to resume"
_STOPPED = {"pause": Cause.PAUSED, "cancel": Cause.CANCELLED, "kill": Cause.CANCELLED}
"""Causes by the reason of the stop request; without a request, a signal has stopped the run."""
_ACTIONS = {Cause.FINISHED: Action.DONE, Cause.CANCELLED: Action.DONE, Cause.PAUSED: Action.PAUSE}
"""What follows an end; after any other, the trial has failed."""


@dataclass(frozen=True, kw_only=True)
class LocalRun:
    """The attempt that the ranks of this gang take part in."""

    spec: dict[str, Any]
    """Content of trial.json."""
    trial: TrialFolder
    attempt: int


_unnamed = itertools.count(1)
"""Numbers of the runs in this process without a name, so that the script's second one is not a resume of the first."""


@contextmanager
def local_run(
    name: str | None, hparams: dict[str, Any], config: dict[str, Any], distributed: Distributed
) -> Iterator[LocalRun]:
    """Yield the attempt of a run outside a job, and record its end. Collective, inside a process group.

    An exception in the block is recorded as the failure of this rank and raised again. `config`: the argument of
    `init`. Raises UsageError if it or `hparams` cannot be stored.
    """
    name = name or config.get("name")
    script = Script.of_this_process(name, number=None if name else next(_unnamed))
    arguments = Arguments.of(script.name, hparams, config)
    chief = _Chief(script, arguments, distributed) if distributed.is_chief else None
    found = distributed.broadcast_json(chief and chief.begin())
    run = LocalRun(spec=found["spec"], trial=TrialFolder(Path(found["trial"])), attempt=found["attempt"])
    try:
        yield run
    except BaseException as error:
        _note_failure(run, distributed.rank, error)
        if chief:
            chief.end(error)
        raise
    if chief:
        chief.end(None)


def _note_failure(run: LocalRun, rank: int, error: BaseException) -> None:
    if isinstance(error, KeyboardInterrupt):
        return
    note_failure(run.trial, run.attempt, failure_of(rank, error))


def _hook_note(script: Script) -> Iterator[str]:
    """Yield a note if the script's folder contains a startup hook, which only jobs run."""
    path = Path(script.script)
    if ((path if path.is_dir() else path.parent) / HOOK).is_file():
        yield f"{HOOK} runs only in the jobs of experiments; run what it does in this shell: source {HOOK}"


class _Chief:
    """Rank 0's part in a run: it chooses the experiment, begins the attempt, and records its end."""

    def __init__(self, script: Script, arguments: Arguments, distributed: Distributed) -> None:
        self._script = script
        self._arguments = arguments
        self._size = GangSize(
            nodes=distributed.nodes,
            ranks_per_node=distributed.local_size,
            has_gpus=distributed.device.type == "cuda",
        )
        self._job_id = str(JobId.of(os.getpid()))

    def begin(self) -> dict[str, Any]:
        """Begin an attempt at the newest run of this script that is not finished, or at a new one.

        Returns the fields of LocalRun as JSON.
        """
        store = ExperimentStore(state_root(os.environ))
        if any(self._continues(experiment) for experiment in self._script.runs(store)):
            with self._heartbeat.ends_on_error():
                attempt = self._begin_attempt()
        else:
            attempt = self._create(store)
        self._stops = StopRequests(self._trial, attempt, self._heartbeat)
        steps = newest_steps(self._trial.checkpoints)
        print(
            f"hpc-det: experiment {self._experiment.id}, attempt {attempt}{f', from batch {steps} on' if steps else ''}"
            f"; checkpoints and metrics are in {self._trial.path}",
            flush=True,
        )
        for note in (*self._arguments.notes, *_hook_note(self._script)):
            print(f"hpc-det: note: {note}", flush=True)
        return {"trial": str(self._trial.path), "attempt": attempt, "spec": self._spec}

    def end(self, error: BaseException | None) -> None:
        """Record the end of the attempt, unless another process has resumed the trial."""
        self._stops.close()
        if isinstance(error, KeyboardInterrupt) or (error is None and self._outcome() == "stopped"):
            newest = f"the newest checkpoint is at batch {newest_steps(self._trial.checkpoints)}"
            print(f"hpc-det: stopped; {newest}; start the script again to resume", flush=True)
        try:
            if not isinstance(error, Overtaken) and self._search.state().present.get(WORKER) == self._job_id:
                self._record_end(self._cause(error))
        finally:
            self._heartbeat.end()

    # --- the experiment

    def _continues(self, experiment: ExperimentFolder) -> bool:
        """Continue the experiment and return True; return False if it is finished or another process runs it."""
        self._open(experiment)
        search = self._search.state()
        if search.trials[TRIAL].ended is Exit.COMPLETED:
            return False
        holder = search.present.get(WORKER)
        if holder and is_alive(experiment, holder):
            print(
                f"hpc-det: process {holder} runs experiment {experiment.id}, which has the same name; this start is a "
                f"new run, from the beginning",
                flush=True,
            )
            return False
        if search.finished:
            self._search.continue_([TRIAL])
        elif search.paused:
            self._search.activate()
        self._heartbeat = Heartbeat(experiment, self._job_id)
        self._search.claim(WORKER, self._job_id, after=holder)
        if self._search.state().present.get(WORKER) != self._job_id:  # another process was faster
            self._heartbeat.end()
            return False
        return self._close_interrupted()

    def _open(self, experiment: ExperimentFolder) -> None:
        self._experiment = experiment
        self._trial = experiment.trial(TRIAL)
        self._journal = Journal(self._trial.journal)
        self._search = SearchJournal(experiment)

    def _close_interrupted(self) -> bool:
        """Record the end of an attempt whose process was killed; return False if it had finished the training."""
        if self._journal.open_attempt() is None:
            return True
        outcome = self._outcome()
        if outcome == "finished":
            self._record_end(Cause.FINISHED, late=True)
            self._heartbeat.end()
            return False
        was_stopped = outcome is not None or self._stop_request() is not None
        self._write_end(
            self._cause_of_stop() if was_stopped else Cause.FAILED,
            Action.RESTART,
            "the script was started again",
            late=True,
        )
        return True

    def _create(self, store: ExperimentStore) -> int:
        """Create an experiment, begin its first attempt, and return the number of that."""
        experiment = store.create()
        try:
            with submitting(experiment):  # so that a listing removes the folder if this process is killed here
                make_experiment(experiment, self._script)
                write_plan_and_config(experiment, self._arguments, self._size)
                self._open(experiment)
                self._heartbeat = Heartbeat(experiment, self._job_id)
                self._search.submitted(WORKER, 1, stay=True)
                self._search.ask(WORKER, self._job_id)
                return self._begin_attempt()
        except BaseException:
            experiment.remove()
            raise

    # --- the attempt

    def _begin_attempt(self) -> int:
        """Write the files of the next attempt, and return its number."""
        trial, experiment = self._trial, self._experiment
        trial.create()
        trial.remove_abandoned()
        trial.stop.unlink(missing_ok=True)  # a request to an earlier attempt
        write_plan_and_config(experiment, self._arguments, self._size)
        former = read_map(trial.trial)
        for change in _changes((former or {}).get("hparams"), self._arguments.hparams):
            print(f"hpc-det: note: since the last start: hyperparameter {change}", flush=True)
        self._spec = {
            "experiment_id": experiment.id,
            "trial_id": TRIAL,
            "trial_seed": self._seed(),
            "hparams": self._arguments.hparams,
            "config": self._arguments.config,
        }
        write_json(trial.trial, self._spec, private=True)
        verdict = self._journal.verdict()
        if verdict and verdict[1] in (Action.DONE, Action.GIVE_UP):
            self._journal.continued()
        attempt = self._journal.last_attempt() + 1
        self._journal.started(attempt, self._job_id, WORKER)
        record_job(experiment, unused_job(experiment), self._job_id, "local", first=WORKER, workers=1)
        write_config_for_people(experiment, self._arguments)
        return attempt

    def _seed(self) -> int:
        """Return the seed of the configuration, of the former attempts or, if neither has one, torch's."""
        seed = seed_of(self._arguments.config)
        former = read_map(self._trial.trial) or {}
        return seed if seed is not None else int(former.get("trial_seed", torch.initial_seed() % 2**31))

    # --- its end

    def _cause(self, error: BaseException | None) -> Cause:
        if isinstance(error, KeyboardInterrupt):
            return Cause.CANCELLED
        if error is not None:
            return Cause.FAILED
        return Cause.FINISHED if self._outcome() == "finished" else self._cause_of_stop()

    def _cause_of_stop(self) -> Cause:
        stop = self._stop_request()
        return _STOPPED.get(stop.reason, Cause.PAUSED) if stop else Cause.PAUSED

    def _outcome(self) -> str | None:
        """Return "finished" or "stopped", as the last attempt has written it; None if it has written nothing."""
        outcome = read_map(self._trial.outcome) or {}
        return outcome["kind"] if outcome.get("attempt") == self._journal.last_attempt() else None

    def _stop_request(self) -> StopRequest | None:
        return read_stop(self._trial.stop, self._journal.last_attempt())

    def _record_end(self, cause: Cause, *, late: bool = False) -> None:
        """Record the end of the last attempt in the journals of the trial and of the search."""
        why = cause.value if cause is Cause.FINISHED else AGAIN
        self._write_end(cause, _ACTIONS.get(cause, Action.GIVE_UP), why, late=late)
        search, stop = self._search.state(), self._stop_request()
        if cause is Cause.PAUSED:
            if not search.paused:
                self._search.pause("a signal to its process")
            self._search.lose(WORKER, self._job_id)
            return
        if cause is Cause.CANCELLED and not search.cancelled:
            self._search.cancel(stop.source if stop else "Ctrl-C")
        how = {Cause.FINISHED: Exit.COMPLETED, Cause.CANCELLED: Exit.CANCELLED}.get(cause, Exit.FAILED)
        self._search.end(WORKER, TRIAL, how)
        self._search.leave(WORKER)

    def _write_end(self, cause: Cause, action: Action, why: str, *, late: bool) -> None:
        attempt = self._journal.last_attempt()
        failure = None
        if cause is Cause.FAILED:
            first = first_failure(self._trial, attempt)
            failure = first.sentence() if first else "its process exited without reporting a cause (killed or crashed)"
        end = AttemptEnd(cause=cause, steps=newest_steps(self._trial.checkpoints))
        self._journal.ended(attempt, end, Decision(action, why), failure, late=late)


def _changes(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> Iterator[str]:
    """Yield each hyperparameter with another value than before."""
    if before is None:
        return
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            yield f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
