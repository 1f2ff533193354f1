"""The search of an experiment as its workers share it: a journal on disk, and the state that follows from it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from hpc_det.errors import HpcDetError
from hpc_det.search.by_name import search_of
from hpc_det.search.custom import CustomSearch
from hpc_det.search.method import Exit, Work
from hpc_det.search.optuna_study import OptunaStudy
from hpc_det.search.sample import Sample, first_sample
from hpc_det.search.state import RULES, Entry, SearchState, check
from hpc_det.store.experiment_config import read_for_search, read_secrets
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.shared_log import SharedLog


class SearchJournal:
    """Any number of processes may have one of the same experiment."""

    def __init__(self, experiment: ExperimentFolder) -> None:
        """Raises HpcDetError for a search that is a class of somebody else's."""
        self._config: dict[str, Any] = read_for_search(experiment)
        if self._config["searcher"]["name"] == "custom":
            _insist_on_own_code(experiment)
        self._points = read_secrets(experiment.points) or []
        self._folder = experiment.search
        self._code = experiment.submitted_code()
        self._log = SharedLog(experiment.search)
        self._taken = 0
        """How many entries are in the state."""
        method, self._sampler = search_of(self._config, self._points, self._code)
        self._state = SearchState(method)
        self._study: OptunaStudy | None = None

    def new(self) -> Iterator[Entry]:
        """The entries since the last look, each taken into the state when it comes."""
        for entry in self._log.new():
            self._take(entry)
            yield entry

    def state(self) -> SearchState:
        """As of now."""
        for _ in self.new():
            pass
        return self._state

    @property
    def searcher(self) -> dict[str, Any]:
        """Of the effective configuration."""
        found: dict[str, Any] = self._config["searcher"]
        return found

    def sample(self, trial: int) -> Sample:
        """What is a trial's own; no hyperparameters as long as others than the sampler still have to `choose` them.

        Where the points go over seeds of the experiment, each trial is the first one of such an experiment.
        """
        sample, seed = self._sampler.sample(trial), self.config(trial)["reproducibility"]["experiment_seed"]
        if self._chooser():
            chosen = self._state.samples.get(trial, {"hparams": {}})
            return replace(sample, hparams=chosen.get("hparams", sample.hparams), source=chosen.get("source"))
        if seed == self._config["reproducibility"]["experiment_seed"]:
            return sample
        return replace(sample, seed=first_sample({}, seed).seed)

    def choose(self, trial: int) -> None:
        """Have a class of the user's or Optuna say what is the trial's own, where the search is theirs.

        They may answer otherwise tomorrow: the first answer written stands. Raises UsageError where there is none.
        """
        choose = self._chooser()
        if choose and trial not in self.state().samples:
            self._write("sampled", trial=trial, sample=choose(trial))

    def _chooser(self) -> Callable[[int], Entry] | None:
        if isinstance(self._state.method, CustomSearch):
            return self._state.method.choose if self._state.method.chooses else None
        is_optunas = self._config["searcher"]["name"] == "optuna" and not self._points
        return self._ask_optuna if is_optunas else None

    def _ask_optuna(self, trial: int) -> Entry:
        if self._study is None:
            searcher, space = self._config["searcher"], self._config["hyperparameters"]
            seed = self._config["reproducibility"]["experiment_seed"] or 0
            self._study = OptunaStudy(self._folder, searcher, space, seed, self._code)
        return self._study.choose(trial, self._state)

    def config(self, trial: int) -> dict[str, Any]:
        """The trial's effective config: the experiment's, with whole sections replaced by its point's."""
        return {**self._config, **(self._points[trial - 1] if self._points else {})}

    def submitted(self, first: int, count: int, *, stay: bool) -> None:
        """Jobs for `count` workers, numbered from `first`, are in the queue. `stay`: they wait for no others."""
        self._write("submitted", first=first, count=count, stay=stay, rules=RULES)

    def ask(self, worker: int, job: str) -> Work | None:
        """Work for a worker that has begun in this job: what it had before, or something new, if any."""
        self._write("asked", worker=worker, job=job)
        return self._state.open.get(worker)

    def claim(self, worker: int, job: str, after: str | None) -> str | None:
        """The same, where the worker was the job `after` when this one looked. Another job that came first, if any."""
        self._write("asked", worker=worker, job=job, after=after)
        holder = self._state.present.get(worker, job)
        return holder if holder not in (job, after) else None

    def report(self, worker: int, work: Work, value: float) -> Work | None:
        """`work` is done, with this value of the metric; what is not finite is the worst. What comes next, if any."""
        plain = value if math.isfinite(value) else None
        self._write("reported", worker=worker, trial=work.trial, until=work.until, value=plain)
        return self._state.open.get(worker)

    def end(self, worker: int, trial: int, how: Exit) -> Work | None:
        """The trial will never go on. What the worker does next; None: nothing."""
        self._write("ended", worker=worker, trial=trial, how=how.value)
        return self._state.open.get(worker)

    def leave(self, worker: int) -> None:
        """The worker has ended, and everything that it had to write is written."""
        self._write("left", worker=worker)

    def lose(self, worker: int, job: str) -> None:
        """This job is gone. Nothing changes where the worker is another one meanwhile."""
        self._write("lost", worker=worker, job=job)

    def move(self, worker: int, job: str) -> None:
        """Another job, which may wait in the queue yet, goes on with what the worker has."""
        self._write("moved", worker=worker, job=job)

    def pause(self, source: str) -> None:
        """Nobody gets work until `activate`. `source`: who wants that."""
        self._write("paused", source=source)

    def activate(self) -> None:
        """There is work again."""
        self._write("activated")

    def cancel(self, source: str) -> None:
        """Nobody gets work any more. `source`: who wants that."""
        self._write("cancelled", source=source)

    def continue_(self, trials: Sequence[int]) -> None:
        """There is work again. `trials`: failed or cancelled ones that get another chance, where the method has any."""
        self._write("continued", trials=list(trials))

    def _write(self, event: str, **details: Any) -> None:
        """Facts stand by themselves, so nothing has to be decided again where others wrote first."""
        for entry in self._log.append({"event": event, **details, "time": time.time()}):
            self._take(entry)

    def _take(self, entry: Entry) -> None:
        check(entry, lambda: self._log.file_of(self._taken))
        self._state.apply(entry)
        self._taken += 1


def _insist_on_own_code(experiment: ExperimentFolder) -> None:
    """Whoever reads the journal runs it."""
    if not experiment.is_own():
        named = experiment.named()
        raise HpcDetError(
            f"experiment {named}: its searcher.class is code of {experiment.owner()}'s, which looking at it would run "
            f"as you do; run it knowingly with `hpc-det experiment fork {named}`"
        )
