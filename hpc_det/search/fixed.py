"""Searches that look at no metric: a number of trials, each trained in one go."""

from __future__ import annotations

from hpc_det.search.method import Exit, Trials, Work


class FixedSearch:
    """single, random, grid and points."""

    def __init__(self, trials: int, until: int | None, *, replaces_invalid: bool = False) -> None:
        """`replaces_invalid`: another trial comes for one with invalid hyperparameters, as no point of a grid can."""
        self.trials_expected = trials
        self._until = until
        self.replaces_invalid = replaces_invalid
        self._trials = Trials(trials)

    def next_work(self) -> Work | None:
        if work := self._trials.waiting_work():
            return work
        new = self._trials.new_trial()
        return Work(new, self._until) if new else None

    def start(self, work: Work) -> None:
        assert work.until == self._until, work
        self._trials.start(work)

    def report(self, trial: int, value: float) -> None:
        assert trial in self._trials.working, trial
        self._trials.close(trial)

    def end(self, trial: int, how: Exit) -> None:
        if self.is_closed(trial):
            return
        if how is Exit.INVALID_HP and self.replaces_invalid:
            self._trials.replace(trial)
        else:
            self._trials.close(trial)

    def give_back(self, trial: int) -> None:
        self._trials.give_back(trial)

    def reopen(self, trial: int) -> None:
        """A closed trial shall go on after all."""
        self._trials.reopen(Work(trial, self._until))

    def is_closed(self, trial: int) -> bool:
        return trial in self._trials.closed

    @property
    def finished(self) -> bool:
        return len(self._trials.closed) == self._trials.wanted

    @property
    def progress(self) -> float:
        replaced = self._trials.wanted - self.trials_expected
        return (len(self._trials.closed) - replaced) / self.trials_expected
