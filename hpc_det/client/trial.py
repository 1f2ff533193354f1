"""A trial of an experiment: its state, hyperparameters, metrics, logs and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hpc_det.client.checkpoint import Checkpoint
from hpc_det.client.creation import private_files
from hpc_det.client.lookup import insist_on_own
from hpc_det.client.metrics import Metrics
from hpc_det.client.stopping import kill_trial
from hpc_det.store.folders import TrialFolder
from hpc_det.view.checkpoints import best_of_trial, of_trial
from hpc_det.view.logs.follow import of_rank, text_lines
from hpc_det.view.logs.merged import TrialLogs
from hpc_det.view.state import effective_config
from hpc_det.view.trial_facts import TrialFacts
from hpc_det.view.trials import TrialState, state_now
from hpc_det.view.watch import Watch

if TYPE_CHECKING:
    from hpc_det.client.experiment import Experiment


class Trial:
    """A trial. Its properties are read from files at each access."""

    def __init__(self, experiment: Experiment, number: int) -> None:
        """Create the object; the search must have created trial `number`."""
        self.experiment = experiment
        """The experiment that the trial belongs to."""
        self.id = number
        """Number of the trial within its experiment, from 1."""

    def __repr__(self) -> str:
        return f"<Trial {self.experiment.id}/{self.id}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trial) and self.folder == other.folder

    def __hash__(self) -> int:
        return hash(self.folder)

    @property
    def folder(self) -> TrialFolder:
        """The files of the trial."""
        return self.experiment.folder.trial(self.id)

    @property
    def state(self) -> TrialState:
        """QUEUED, RUNNING, PAUSED, COMPLETED, ERROR, INVALID or CANCELED."""
        return self._facts().state

    @property
    def hparams(self) -> dict[str, Any]:
        """Hyperparameters."""
        return self._facts().hparams

    @property
    def seed(self) -> int:
        return self._facts().seed

    @property
    def batches(self) -> int:
        """Number of batches trained, as far as the last report, checkpoint or heartbeat shows."""
        return self._facts().metrics.batches

    @property
    def best(self) -> dict[str, Any] | None:
        """Best validation by the searcher's metric: a map of `metric`, `value`, `batches` and `trial`, or None."""
        return self._facts().best

    def metrics(self, group: str | None = "validation") -> Metrics:
        """Return the reports of a group, "validation" or "training"; None: of both.

        Raises UsageError for another group.
        """
        return Metrics([self.folder], group)

    def logs(
        self, *, follow: bool = False, rank: int | None = None, tail: int | None = None, level: str | None = None
    ) -> Iterator[str]:
        """Return an iterator over the lines of the trial's logs. The arguments are those of `Experiment.logs`."""
        watch = Watch(self.experiment.folder)
        logs = TrialLogs(self.folder, of_rank(watch.view, rank, level=level))

        def state() -> TrialState:
            is_over = watch.state().is_final
            return state_now(watch.view.search, self.folder, is_over=is_over)

        return text_lines(logs, state, follow=follow, tail=tail, names_trials=False)

    def checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints of the trial, newest first."""
        return [*map(Checkpoint, of_trial(self.folder, effective_config(self.experiment.folder)))]

    def top_checkpoint(self, sort_by: str | None = None, smaller_is_better: bool | None = None) -> Checkpoint | None:
        """Return the best checkpoint, as `Experiment.top_checkpoint` does for all trials."""
        best = best_of_trial(self.folder, sort_by, smaller_is_better)
        return Checkpoint(best[0]) if best else None

    def kill(self) -> None:
        """End the trial without saving; the other trials continue. Raises UsageError if no worker trains it."""
        insist_on_own(self.experiment.folder)
        with private_files():
            kill_trial(self.folder)

    def _facts(self) -> TrialFacts:
        is_over = self.experiment.state.is_final
        return TrialFacts(view=self.experiment.view(), id=self.id, is_over=is_over)
