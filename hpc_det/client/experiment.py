"""An experiment: its state, trials, metrics, logs and checkpoints, and how to wait for it and control it."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator
from functools import cached_property
from typing import Any

from hpc_det.client.checkpoint import Checkpoint
from hpc_det.client.continuation import activate_one, continue_one, forked
from hpc_det.client.creation import Overrides, as_texts, private_files, say_notes, submit_new
from hpc_det.client.lookup import insist_on_own, store
from hpc_det.client.metrics import Metrics
from hpc_det.client.result import ExperimentFailed, Result
from hpc_det.client.stopping import cancel_one, kill_one, pause_one
from hpc_det.client.trial import Trial
from hpc_det.errors import HpcDetError
from hpc_det.schedulers import scheduler as schedulers
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.checkpoints import best_of_experiment, of_experiment
from hpc_det.view.logs.follow import lines_of, of_rank, text_lines
from hpc_det.view.logs.merged import ExperimentLogs
from hpc_det.view.logs.selection import Wanted
from hpc_det.view.state import ExperimentState, ExperimentView, effective_config, shown_config
from hpc_det.view.summary import best
from hpc_det.view.watch import Watch, ask_every_s, state

CHECK_S = 1.0
"""Seconds between two checks while waiting, as in `hpc-det experiment wait`."""
TAIL = 20
"""Number of log lines in an ExperimentFailed."""


class Experiment:
    """An experiment. Its properties are read from files at each access; methods that change it need its owner.

    `await experiment` waits without blocking the event loop, and returns what `result` returns.
    """

    def __init__(self, folder: ExperimentFolder) -> None:
        self.folder = folder
        """The files of the experiment."""
        self._state: tuple[float, ExperimentState] | None = None
        """The last state from the scheduler, and the time.monotonic() until which it is used."""

    def __repr__(self) -> str:
        return f"<Experiment {self.folder.named()}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Experiment) and self.folder == other.folder

    def __hash__(self) -> int:
        return hash(self.folder)

    @property
    def id(self) -> int:
        """Number of the experiment below its state root."""
        return self.folder.id

    @property
    def owner(self) -> str:
        """Name of the user who owns it."""
        return self.folder.owner()

    @property
    def name(self) -> str:
        return self.view().about().name

    @property
    def description(self) -> str:
        return self.view().about().description

    @property
    def labels(self) -> list[str]:
        return list(self.view().about().labels)

    @property
    def config(self) -> dict[str, Any]:
        """The effective configuration, with masked secrets."""
        return shown_config(self.folder)[0]

    @property
    def state(self) -> ExperimentState:
        """The state, as `hpc-det experiment describe` shows it. It compares equal to its name, such as "RUNNING".

        The scheduler is queried at most every two seconds. Use `done` or `wait` in a loop: while a job is being
        requeued, a single look may find no job.
        """
        view = self.view()
        if settled := view.settled():
            return settled
        if self._state and time.monotonic() < self._state[0]:
            return self._state[1]
        found = state(view)
        pause_s = ask_every_s(schedulers.scheduler(view.jobs[0].scheduler)) if view.jobs else 0.0
        self._state = time.monotonic() + pause_s, found
        return found

    # --- results

    def trials(self) -> list[Trial]:
        """Return the trials that the search has created so far, by number."""
        return [Trial(self, number) for number in sorted(self.view().search.trials)]

    def best_trial(self) -> Trial | None:
        """Return the trial with the best validation by the searcher's metric; None before the first validation."""
        found = best(self.view())
        return Trial(self, found["trial"]) if found else None

    def metrics(self, group: str | None = "validation") -> Metrics:
        """Return the reports of all trials in a group, "validation" or "training"; None: of both.

        Raises UsageError for another group.
        """
        return Metrics([trial.folder for trial in self.trials()], group)

    def checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints of all trials, trial by trial, newest first."""
        return [*map(Checkpoint, of_experiment(self.folder, effective_config(self.folder)))]

    def top_checkpoint(self, sort_by: str | None = None, smaller_is_better: bool | None = None) -> Checkpoint | None:
        """Return the checkpoint with the best validation; None if no checkpoint has a validation.

        `sort_by`: another metric than the searcher's; `smaller_is_better` is then required. Raises UsageError if no
        validation has the metric.
        """
        found = best_of_experiment(self.folder, sort_by, smaller_is_better)
        return Checkpoint(found[0]) if found else None

    def logs(
        self, *, follow: bool = False, rank: int | None = None, tail: int | None = None, level: str | None = None
    ) -> Iterator[str]:
        """Return an iterator over the lines of the logs, each after its source as in `hpc-det experiment logs`.

        `follow`: wait for new lines until the experiment has ended. `rank`: only this rank. `tail`: only the last
        lines, and with `follow` the new ones. `level`: only lines of this level, such as "WARNING", or above. Raises
        UsageError for an unknown rank or level.
        """
        watch = Watch(self.folder)
        logs, several = ExperimentLogs(watch.view, of_rank(watch.view, rank, level=level)), watch.view.has_many_trials
        return text_lines(logs, watch.state, follow=follow, tail=tail, names_trials=several)

    # --- waiting

    def done(self) -> bool:
        """Return whether the experiment has ended. An end without a recorded cause counts when it is seen twice."""
        return self._watch.state().is_final

    def wait(self, timeout: float | None = None) -> ExperimentState:
        """Wait until the experiment has ended, also while it is paused, and return its final state.

        Raises TimeoutError after `timeout` seconds.
        """
        return self._watch.wait(CHECK_S, math.inf if timeout is None else timeout)

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the end and return the best validation by the searcher's metric; its values are None without one.

        Raises ExperimentFailed unless the experiment is COMPLETED, TimeoutError after `timeout` seconds.
        """
        return self._result(self._watch, self.wait(timeout))

    def __await__(self) -> Generator[Any, None, Result]:
        return self._awaited().__await__()

    async def _awaited(self) -> Result:
        import asyncio  # only its users should wait for this import

        watch = Watch(self.folder)
        # In a thread: a query of the scheduler may take seconds.
        while not (found := await asyncio.to_thread(watch.state)).is_final:
            await asyncio.sleep(CHECK_S)
        return await asyncio.to_thread(self._result, watch, found)

    def _result(self, watch: Watch, found: ExperimentState) -> Result:
        """Return the result of an experiment that has ended. Raises ExperimentFailed."""
        view = watch.view
        if found is not ExperimentState.COMPLETED:
            cause = view.why_not_completed(found)
            raise ExperimentFailed(self.folder.named(), found, cause, _tail(view))
        known = best(view)
        return Result(
            metric=view.config["searcher"]["metric"],
            value=float(known["value"]) if known else None,
            trial=Trial(self, known["trial"]) if known else None,
            checkpoint=self.top_checkpoint() if known else None,
        )

    # --- control

    def pause(self) -> None:
        """Let all trials save, then free their nodes until `activate`. Raises UsageError if it has ended."""
        self._change(pause_one)

    def activate(self) -> None:
        """Resume the paused experiment. Raises UsageError if it is not paused."""
        self._change(activate_one)

    def cancel(self) -> None:
        """Let all trials save, then end them. Raises UsageError if it has ended."""
        self._change(cancel_one)

    def kill(self) -> None:
        """End all trials and jobs without saving. Raises UsageError if it has ended."""
        self._change(kill_one)

    def continue_(self, overrides: Overrides = ()) -> Experiment:
        """Continue the experiment, which has ended, from its newest checkpoints, and return it.

        `overrides` may set a greater length, such as {"searcher.max_length.epochs": 40}. Raises UsageError if it has
        not ended, nothing is left to do, or a value must not change.
        """
        self._change(lambda folder: continue_one(folder, as_texts(overrides)))
        return self

    def fork(self, overrides: Overrides = (), *, cluster: str | None = None) -> Experiment:
        """Run the experiment again as a new one with the same configuration, seed and code, and return that at once.

        `cluster`: name of another cluster profile. Raises UsageError with all problems of the configuration.
        """
        with private_files():
            found = forked(self.folder, as_texts(overrides), cluster)
            say_notes(found)
            return Experiment(submit_new(found, store()))

    def _change(self, act: Any) -> None:
        insist_on_own(self.folder)
        self._state = None
        with private_files():
            act(self.folder)

    # --- files

    def view(self) -> ExperimentView:
        """Return the content of the experiment's files as of now. Raises HpcDetError if they are damaged or deleted."""
        if not self.folder.config.exists():
            raise HpcDetError(f"experiment {self.id}: was deleted")
        self._view.look()
        return self._view

    @cached_property
    def _view(self) -> ExperimentView:
        return ExperimentView(self.folder)

    @cached_property
    def _watch(self) -> Watch:
        return Watch(self.folder)


def _tail(view: ExperimentView) -> list[str]:
    last = ExperimentLogs(view, Wanted()).last(TAIL, final=True)
    return [*lines_of(iter(last), names_trials=view.has_many_trials)]
