"""hpc-det experiment verify-resume: two short trainings, compared."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpc_det.cli.create import say_notes
from hpc_det.cli.ids import store
from hpc_det.cli.short_runs import Ended, Series, ShortRuns, effective_of, once
from hpc_det.config.merge import Tree
from hpc_det.config.rank_variables import RESUME_CHECK, stops_as_value
from hpc_det.config.request import Request, on_slots
from hpc_det.errors import HpcDetError, UsageError
from hpc_det.plan.effective import Effective, effective
from hpc_det.plan.short_training import problems, short_training
from hpc_det.store.folders import ExperimentFolder
from hpc_det.submit.submission import submit
from hpc_det.view.resume_check.comparison import Comparison, compare

LABEL = "resume-check"
REPORTS = 4
"""And validations, of each training; the last of each at its end."""


@dataclass(frozen=True)
class Training:
    title: str
    stops: tuple[int, ...]
    """So many batches are trained at each stop."""

    def config(self, experiment: Tree, batches: int, seed: int) -> Tree:
        tree = short_training(
            experiment,
            title=self.title,
            label=LABEL,
            batches=batches,
            reports=REPORTS,
            variable=f"{RESUME_CHECK}={stops_as_value(self.stops)}",
        )
        tree["min_validation_period"] = {"batches": max(batches // REPORTS, 1)}
        if tree["reproducibility"]["experiment_seed"] is None:
            tree["reproducibility"]["experiment_seed"] = seed
        return tree


@dataclass(frozen=True)
class Trained:
    training: Training
    ended: Ended

    @property
    def is_a_result(self) -> bool:
        return self.ended.failure is None

    @property
    def summary(self) -> str:
        return self.ended.failure or "trained"


@dataclass(frozen=True)
class Check:
    """One call of the command."""

    request: Request
    found: Effective
    batches: int
    stops: tuple[int, ...]
    seed: int

    @classmethod
    def of(cls, request: Request, batches: int, ranks: int | None, stops: int, seed: int) -> Check:
        """Raises UsageError with all that is wrong with the experiment for a check."""
        if ranks is not None:
            request = on_slots(request, ranks)
        wrong = list(_too_many(stops, batches))
        try:
            found = effective(request)
            wrong += problems(found)
        except UsageError as error:
            wrong += error.problems
        if wrong:
            raise UsageError(wrong)
        say_notes(found)
        return cls(request, found, batches, places(batches, stops, seed), seed)

    def run(self, *, keep: bool) -> Comparison:
        """Raises HpcDetError where one of the trainings fails, or leaves no trace."""
        title = f"stopped after {', '.join(map(str, self.stops))} batches" if self.stops else "once more"
        both = [Training("undisturbed", ()), Training(title, self.stops)]
        with ShortRuns[Training, Trained](self._submit, Trained, keep=keep) as runs:
            series = [once(each) for each in both] if self.found.cluster.has_queue else [_in_turn(both)]
            trained = runs.run_all(series, side_by_side=len(both))
            if failed := [each for each in trained if not each.is_a_result]:
                raise HpcDetError([f"{each.training.title}: {each.summary}" for each in failed])
            experiments = {each.training: each.ended.experiment for each in trained}
            return compare(*(each.trial() for training in both if (each := experiments[training])))

    def _submit(self, training: Training) -> ExperimentFolder:
        config = training.config(self.found.tree, self.batches, self.seed)
        return submit(effective_of(self.request, config), store())


def places(batches: int, stops: int, seed: int) -> tuple[int, ...]:
    """So many different numbers of batches, in order.

    At least two: after one batch nobody knows yet which attributes are the same in each training.
    """
    return tuple(sorted(random.Random(seed).sample(range(2, batches), stops)))


def _too_many(stops: int, batches: int) -> Iterator[str]:
    if stops > (most := batches - 2):
        yield (
            f"--stops {stops}: a training of --batches {batches} can be stopped at most {most} times, after 2 batches "
            f"or more; give --batches {stops + 2} or more"
        )


def _in_turn(wanted: Sequence[Training]) -> Series[Training, Trained]:
    """Where both would share the same slots. Nothing follows a failure."""
    for training in wanted:
        trained = yield training
        if not trained.is_a_result:
            return
