"""What --follow shows of an experiment with several trials: how the search goes on."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from hpc_det.search.best import BestTrial, best_trial
from hpc_det.search.method import Exit
from hpc_det.search.metric import better
from hpc_det.search.state import Entry
from hpc_det.view.formatting import duration, length_in_words, number
from hpc_det.view.state import ExperimentState, ExperimentView
from hpc_det.view.trial_history import Metrics, checkpoint_to_take, why_not_completed
from hpc_det.view.trials import TrialCounts, counted, length_unit


class ManyTrials:
    def __init__(self, view: ExperimentView) -> None:
        self._view = view
        self._searcher = view.config["searcher"]
        self._read = 0
        self._best: float | None = None
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[told]}", markup=False),
            TimeElapsedColumn(),
        )
        self._task = self._progress.add_task("", total=1.0, told="")

    def news(self) -> Iterator[str]:
        """A line for each report of a trial to the search, and each failure."""
        for entry in self._view.told[self._read :]:
            yield self._reported(entry) if entry["event"] == "reported" else self._ended(entry)
        self._read = len(self._view.told)

    def bar(self, state: ExperimentState) -> Progress:
        """In one line, with the best trial so far."""
        search = self._view.search
        counts = counted(search, is_running=state.has_job)
        best = best_trial(self._view.told, self._searcher)
        parts = [f"{counts.ended}/{counts.expected} trials", f"{counts.running} running", *_invalid(counts)]
        self._progress.update(
            self._task,
            description=f"experiment {self._view.id} {state.value}",
            completed=search.method.progress,
            told=", ".join([*parts, *([f"best {_in_words(best, self._view)}"] if best else [])]),
        )
        return self._progress

    def summary(self, state: ExperimentState, seconds: float) -> Iterator[str]:
        """The state, the best trial and its checkpoint."""
        view = self._view
        counts = counted(view.search, is_running=False)
        failed = [f"{counts.failed} failed"] if counts.failed else []
        created = f"Experiment {view.id}: {state.value} with {counts.created} trials in {duration(seconds)}"
        yield ", ".join([created, *failed, *_invalid(counts)])
        best = best_trial(view.told, self._searcher)
        if best is None:
            return
        yield f"Best validation: {_in_words(best, view)}"
        trial = view.folder.trial(best.trial)
        if checkpoint := checkpoint_to_take(trial, Metrics.read(trial, self._searcher).best):
            yield f"Checkpoint: {checkpoint.path} (batch {checkpoint.steps})"

    def _reported(self, entry: Entry) -> str:
        trial, value = entry["trial"], math.nan if entry["value"] is None else entry["value"]
        is_best = better(value, self._best, self._searcher["smaller_is_better"])
        self._best = value if is_best else self._best
        mark = " (best)" if is_best else ""
        end = ", completed" if self._view.search.method.is_closed(trial) else ""
        at = _at(entry["until"], self._view)
        return f"trial {trial}{at}: {self._searcher['metric']} {number(value)}{mark}{end}"

    def _ended(self, entry: Entry) -> str:
        trial, how = entry["trial"], Exit(entry["how"])
        failed = how in (Exit.FAILED, Exit.INVALID_HP)
        why = f": {why_not_completed(self._view.folder.trial(trial))}" if failed else ""
        return f"trial {trial} ended: {how.value}{why}"


def _invalid(counts: TrialCounts) -> list[str]:
    return [f"{counts.invalid} invalid"] if counts.invalid else []


def _in_words(best: BestTrial, view: ExperimentView) -> str:
    return f"{best.metric} {number(best.value)} of trial {best.trial}{_at(best.length, view)}"


def _at(length: int | None, view: ExperimentView) -> str:
    unit = length_unit(view.config["searcher"])
    if length is None or unit is None:
        return ""
    return f" at {length_in_words(length, unit)}"
