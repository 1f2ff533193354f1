"""hpc-det experiment verify-resume: two short trainings, compared."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpc_det.cli.create import say_notes
from hpc_det.cli.ids import store
from hpc_det.cli.short_runs import Ended, Series, ShortRuns, once
from hpc_det.config.effective import Effective, effective
from hpc_det.config.merge import Tree
from hpc_det.config.request import Request, on_slots
from hpc_det.config.short_training import ranges, short_training
from hpc_det.errors import HpcDetError, UsageError
from hpc_det.resume_check import VARIABLE, as_variable
from hpc_det.resume_check.comparison import Comparison, compare
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from hpc_det.submit.submission import submit

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
            variable=f"{VARIABLE}={as_variable(self.stops)}",
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

    def trial(self) -> TrialFolder:
        assert self.ended.experiment
        return self.ended.experiment.trial()


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
        found = effective(request)
        problems = list(ranges(found.tree["hyperparameters"]))
        if stops >= batches:
            problems.append(f"--stops {stops}: a training of {batches} batches can be stopped {batches - 1} times")
        if problems:
            raise UsageError(problems)
        say_notes(found)
        places = random.Random(seed).sample(range(1, batches), stops)
        return cls(request, found, batches, tuple(sorted(places)), seed)

    def run(self, *, keep: bool) -> Comparison:
        """Raises HpcDetError where one of the trainings fails, or leaves no trace."""
        title = f"stopped after {', '.join(map(str, self.stops))} batches" if self.stops else "once more"
        wanted = [Training("undisturbed", ()), Training(title, self.stops)]
        with ShortRuns[Training, Trained](self._submit, Trained, keep=keep) as runs:
            both: list[Series[Training, Trained]] = []
            both += map(once, wanted) if self.found.cluster.has_queue else [_in_turn(wanted)]
            trained = {each.training.title: each for each in runs.run_all(both, side_by_side=2)}
            if failed := [each for each in trained.values() if not each.is_a_result]:
                raise HpcDetError([f"{each.training.title}: {each.summary}" for each in failed])
            return compare(*(trained[training.title].trial() for training in wanted))

    def _submit(self, training: Training) -> ExperimentFolder:
        """What the cluster says of experiments is in the configuration by now."""
        cluster = {key: value for key, value in self.request.cluster.items() if key != "experiment"}
        config = training.config(self.found.tree, self.batches, self.seed)
        request = replace(self.request, cluster=cluster, template=None, template_name=None, config=config, overrides=())
        return submit(effective(request), store())


def _in_turn(wanted: Sequence[Training]) -> Series[Training, Trained]:
    """Where both would share the same slots. Nothing follows a failure."""
    for training in wanted:
        trained = yield training
        if not trained.is_a_result:
            return
