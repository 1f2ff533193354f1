"""The search of an experiment, shared by its workers: a journal on disk, and the state that its entries lead to."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hpc_det.errors import HpcDetError
from hpc_det.search.by_name import search_of
from hpc_det.search.custom import CustomSearch
from hpc_det.search.method import Exit, Work
from hpc_det.search.sample import Sample, first_sample
from hpc_det.search.state import RULES, Entry, SearchState, check
from hpc_det.store.experiment_config import read_for_search, read_secrets
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.shared_log import SharedLog

if TYPE_CHECKING:
    from hpc_det.search.optuna_study import OptunaStudy


class SearchJournal:
    """The search of one experiment. Any number of processes may have an instance for the same experiment."""

    def __init__(self, experiment: ExperimentFolder) -> None:
        """Open the journal. Raises HpcDetError if the search is a class in the code of another user."""
        self._config: dict[str, Any] = read_for_search(experiment)
        if self._config["searcher"]["name"] == "custom":
            _insist_on_own_code(experiment)
        self._points = read_secrets(experiment.points) or []
        self._folder = experiment.search
        self._code = experiment.submitted_code()
        self._log = SharedLog(experiment.search)
        self._taken = 0
        """Number of entries that the state contains."""
        method, self._sampler = search_of(self._config, self._points, self._code)
        self._state = SearchState(method)
        self._study: OptunaStudy | None = None

    def new(self) -> Iterator[Entry]:
        """Yield the entries since the last call; each is applied to the state before it is yielded."""
        for entry in self._log.new():
            self._take(entry)
            yield entry

    def state(self) -> SearchState:
        """Return the current state, after reading new entries."""
        for _ in self.new():
            pass
        return self._state

    @property
    def searcher(self) -> dict[str, Any]:
        """The searcher of the effective configuration."""
        found: dict[str, Any] = self._config["searcher"]
        return found

    def sample(self, trial: int) -> Sample:
        """Return the trial's hyperparameters, seed and source.

        If the user's class or Optuna chooses the hyperparameters, they are empty until `choose` has been called.
        """
        # If a point sets a seed, its trial is seeded as the first trial of an experiment with that seed.
        sample, seed = self._sampler.sample(trial), self.config(trial)["reproducibility"]["experiment_seed"]
        if self._chooser():
            chosen = self._state.samples.get(trial, {"hparams": {}})
            return replace(sample, hparams=chosen.get("hparams", sample.hparams), source=chosen.get("source"))
        if seed == self._config["reproducibility"]["experiment_seed"]:
            return sample
        return replace(sample, seed=first_sample({}, seed).seed)

    def choose(self, trial: int) -> None:
        """Have the user's class or Optuna choose the trial's hyperparameters, and record them.

        Does nothing if the search uses neither, or if a choice is recorded already. Raises UsageError if the choice
        fails.
        """
        choose = self._chooser()
        # Another call might choose differently; only the first recorded choice counts.
        if choose and trial not in self.state().samples:
            self._write("sampled", trial=trial, sample=choose(trial))

    def _chooser(self) -> Callable[[int], Entry] | None:
        """Return the function that chooses a trial's sample; None if the sampler alone does."""
        if isinstance(self._state.method, CustomSearch):
            return self._state.method.choose if self._state.method.chooses else None
        is_optunas = self._config["searcher"]["name"] == "optuna" and not self._points
        return self._ask_optuna if is_optunas else None

    def _ask_optuna(self, trial: int) -> Entry:
        if self._study is None:
            from hpc_det.search.optuna_study import OptunaStudy  # other searches need none of its imports

            searcher, space = self._config["searcher"], self._config["hyperparameters"]
            seed = self._config["reproducibility"]["experiment_seed"] or 0
            self._study = OptunaStudy(self._folder, searcher, space, seed, self._code)
        return self._study.choose(trial, self._state)

    def config(self, trial: int) -> dict[str, Any]:
        """Return the trial's effective configuration: the experiment's, with the sections that the trial's point
        replaces.
        """
        return {**self._config, **(self._points[trial - 1] if self._points else {})}

    def submitted(self, first: int, count: int, *, stay: bool) -> None:
        """Record that jobs for `count` workers, numbered from `first`, are queued.

        `stay`: a worker must not exit in favour of one that is still queued.
        """
        self._write("submitted", first=first, count=count, stay=stay, rules=RULES)

    def ask(self, worker: int, job: str) -> Work | None:
        """Record that a worker has started in this job. Return the work that it had before, or new work, or None."""
        self._write("asked", worker=worker, job=job)
        return self._state.open.get(worker)

    def claim(self, worker: int, job: str, after: str | None) -> str | None:
        """Record that a worker has started in this job, provided that its previous job was `after`.

        Returns the id of another job that has started as this worker first, or None.
        """
        self._write("asked", worker=worker, job=job, after=after)
        holder = self._state.present.get(worker, job)
        return holder if holder not in (job, after) else None

    def report(self, worker: int, work: Work, value: float, *, batches: int | None = None) -> Work | None:
        """Record that `work` is done, with this value of the metric. Return the worker's next work, or None.

        A value that is not finite counts as the worst. `batches`: the length of a trial that has trained to another one
        than `work.until`.
        """
        trained = {} if batches is None else {"batches": batches}
        self._write("reported", worker=worker, trial=work.trial, until=work.until, value=_plain(value), **trained)
        return self._state.open.get(worker)

    def end(self, worker: int, trial: int, how: Exit, *, value: float | None = None, batches: int = 0) -> Work | None:
        """Record that the trial has ended for good. Return the worker's next work, or None.

        `value`: the metric at its last validation, after `batches`, if it ended itself; None: without one.
        """
        last = {} if value is None else {"value": _plain(value), "batches": batches}
        self._write("ended", worker=worker, trial=trial, how=how.value, **last)
        return self._state.open.get(worker)

    def leave(self, worker: int) -> None:
        """Record that the worker has ended and has written all its files."""
        self._write("left", worker=worker)

    def lose(self, worker: int, job: str) -> None:
        """Record that this job has ended without a report. No effect if the worker now runs in another job."""
        self._write("lost", worker=worker, job=job)

    def move(self, worker: int, job: str) -> None:
        """Record that another job, which may still be queued, continues the work of the worker."""
        self._write("moved", worker=worker, job=job)

    def pause(self, source: str) -> None:
        """Record that no work is assigned until `activate`. `source`: the user or component that paused the search."""
        self._write("paused", source=source)

    def activate(self) -> None:
        """Record that work is assigned again after a pause."""
        self._write("activated")

    def cancel(self, source: str) -> None:
        """Record that no more work is assigned. `source`: the user or component that cancelled the search."""
        self._write("cancelled", source=source)

    def continue_(self, trials: Sequence[int]) -> None:
        """Record that work is assigned again after a cancellation or a pause.

        `trials`: failed or cancelled trials to continue; a method that compares trials may not allow that.
        """
        self._write("continued", trials=list(trials))

    def _write(self, event: str, **details: Any) -> None:
        """Append an entry, and apply it to the state after the entries that others wrote before it."""
        # Entries are facts, so an entry stays valid even if others were written first, and needs no retry.
        for entry in self._log.append({"event": event, **details, "time": time.time()}):
            self._take(entry)

    def _take(self, entry: Entry) -> None:
        """Check an entry and apply it to the state."""
        check(entry, lambda: self._log.file_of(self._taken))
        self._state.apply(entry)
        self._taken += 1


def _plain(value: float) -> float | None:
    """Return the value for the journal, which is JSON: None if it is not finite."""
    return value if math.isfinite(value) else None


def _insist_on_own_code(experiment: ExperimentFolder) -> None:
    """Raise HpcDetError if the experiment belongs to another user: reading its journal would run that user's code."""
    if not experiment.is_own():
        named = experiment.named()
        raise HpcDetError(
            f"experiment {named}: showing its search would run searcher.class, code of user {experiment.owner()}, with "
            f"your permissions; if you trust it, run it with `hpc-det experiment fork {named}`"
        )
