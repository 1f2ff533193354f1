"""What --follow shows of an experiment with one trial: batches and metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from hpc_det.cli.tail import Tail
from hpc_det.config.merge import Tree
from hpc_det.errors import visible
from hpc_det.node.json_files import parse_line
from hpc_det.store.folders import TrialFolder
from hpc_det.store.metrics import Record, reports_of
from hpc_det.view.formatting import duration, number, values_in_words
from hpc_det.view.state import ExperimentState, ExperimentView
from hpc_det.view.trial_history import Metrics, checkpoint_to_take


class OneTrial:
    def __init__(self, view: ExperimentView) -> None:
        self._view = view
        self._reader = MetricsReader(view.folder.trial(), view.config["searcher"])
        self._training: Mapping[str, float | str] = {}
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("batches"),
            TimeElapsedColumn(),
        )
        self._task = self._progress.add_task("", total=None)

    def news(self) -> Iterator[str]:
        """A line for each validation."""
        for record in self._reader.read():
            if record["kind"] == "training":
                self._training = record["metrics"]
            else:
                yield f"batch {record['steps']} of {record['total']}: {_last(self._training, record['metrics'])}"

    def bar(self, state: ExperimentState) -> Group:
        """The last metrics stand below it."""
        self._reader.read()
        metrics = self._reader.metrics
        description = f"experiment {self._view.id} {state.value}"
        self._progress.update(self._task, description=description, completed=metrics.batches, total=metrics.total)
        last = Text(visible(_last(metrics.training, metrics.validation)), no_wrap=True, overflow="ellipsis")
        return Group(self._progress, last)

    def summary(self, state: ExperimentState, seconds: float) -> Iterator[str]:
        """The state, the best validation and its checkpoint."""
        trial = self._view.folder.trial()
        metrics = Metrics.read(trial, self._view.config["searcher"])
        yield f"Experiment {self._view.id}: {state.value} after {metrics.batches} batches in {duration(seconds)}"
        if best := metrics.best:
            yield f"Best validation: {best.metric} {number(best.value)} at batch {best.batches}"
        if checkpoint := checkpoint_to_take(trial, metrics.best):
            yield f"Checkpoint: {checkpoint.path} (batch {checkpoint.steps})"


class MetricsReader:
    """The metrics so far. Each call reads what was appended since the last one."""

    def __init__(self, trial: TrialFolder, searcher: Tree) -> None:
        self._trial, self._searcher = trial, searcher
        self._tail = Tail(trial.metrics)
        self.metrics = Metrics(searcher)

    def read(self) -> list[Record]:
        """The reports that are new since the last call."""
        lines = [record for line in self._tail.lines() if (record := parse_line(line))]
        reports = reports_of(lines)
        if len(reports) < len(lines):  # an attempt began, and what earlier ones reported may be void
            self.metrics = Metrics.read(self._trial, self._searcher)
        else:
            self.metrics.take(reports)
        return reports


def _last(training: Mapping[str, float | str], validation: Mapping[str, float | str]) -> str:
    shown = {"training": training, "validation": validation}
    return "   ".join(f"{kind}: {values_in_words(metrics)}" for kind, metrics in shown.items() if metrics)
