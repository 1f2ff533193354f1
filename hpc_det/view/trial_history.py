"""The history of a trial: its attempts and their ends, its metrics, and the checkpoint to use.

This module writes nothing. A missing or torn file is not an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hpc_det.checkpoint.committed import Committed, committed, newest_steps
from hpc_det.config.merge import Tree
from hpc_det.node.json_files import DamagedFile, Shape, fits, made, read_json, read_map
from hpc_det.requeue import Action, AttemptEnd, Cause, decide
from hpc_det.search.method import Exit, better
from hpc_det.store.attempt import StopRequest, first_failure
from hpc_det.store.folders import TrialFolder
from hpc_det.store.journal import Journal
from hpc_det.store.metrics import Record, as_written, last_reports, number_in, validations
from hpc_det.view.formatting import one_line

# --- ends


def final_exit(trial: TrialFolder) -> Exit | None:
    """Return how the trial ended, from its journal; None if it may continue."""
    match Journal(trial.journal).verdict():
        case (Cause.FINISHED, Action.DONE, _):
            return Exit.COMPLETED
        case (_, Action.DONE, _):
            return Exit.CANCELLED
        case (_, Action.GIVE_UP, _):
            return Exit.FAILED
    return None


def why_not_completed(trial: TrialFolder) -> str:
    """Return in a sentence why the trial was not completed, with the first failure if there is one."""
    attempts = read_attempts(trial)
    last = attempts[-1] if attempts else None
    if last is None:
        return "the job exited without reporting a cause, before its first attempt"
    if final_exit(trial):
        return f"{last.failure or last.cause} ({last.why})"
    if last.problems:
        return f"the job ended: {last.problems[-1]}"
    failure = first_failure(trial, last.number)
    return ": ".join(["the job exited without reporting a cause", *([one_line(failure.sentence())] if failure else [])])


def cancellation(trial: TrialFolder) -> StopRequest | None:
    """Return the request of `cancel` or `kill` that concerns the last attempt of the trial, or None."""
    data = read_tolerantly(trial.stop)
    try:
        request = made(StopRequest, data, trial.stop) if data else None
    except DamagedFile:
        return None
    is_meant = request and request.concerns(Journal(trial.journal).last_attempt())
    return request if request and is_meant and request.reason in ("cancel", "kill") else None


# --- attempts


@dataclass(kw_only=True)
class AttemptHistory:
    """One start of the trial's gang. The fields from `ended` to `failure` are None until its end is recorded."""

    number: int
    job_id: str
    worker: int
    host: str
    """Host of the job process, the first of the nodes."""
    started: float
    """Seconds since the epoch, as `ended`."""
    ended: float | None = None
    cause: str | None = None
    batches: int | None = None
    """Number of batches in the newest checkpoint at its end."""
    action: str | None = None
    why: str | None = None
    failure: str | None = None
    nodes: list[str] = field(default_factory=list)
    """Hosts of the gang by node rank, from the end of the attempt on; empty in journals of earlier versions."""
    problems: list[str] = field(default_factory=list)
    late: bool = False
    """True if a later attempt recorded the end, because the job was killed; `ended` is then the time of the record."""
    continued: bool = False
    """True if the owner continued the trial after a final end."""

    @property
    def is_open(self) -> bool:
        return self.ended is None

    @property
    def is_requeued(self) -> bool:
        """True if its end put the job back into the queue."""
        return self.action == Action.REQUEUE


def read_attempts(trial: TrialFolder) -> list[AttemptHistory]:
    """Return all attempts, oldest first."""
    found: dict[int, AttemptHistory] = {}
    for event in Journal(trial.journal).events():
        number = event["attempt"]
        if event["event"] == "started":
            found[number] = AttemptHistory(
                number=number,
                job_id=event["job_id"],
                worker=event["worker"],
                host=event["host"],
                started=event["time"],
            )
        elif number in found:
            _add(found[number], event)
    return list(found.values())


def closed_attempt(trial: TrialFolder, attempt: AttemptHistory, *, is_completed: bool) -> AttemptHistory:
    """Return the last attempt of a trial whose job was killed before it could record the end.

    The end is that of the ranks' outcome, or `finished` if the trial `is_completed` for the search. Without either, the
    attempt is returned unchanged and stays open.
    """
    outcome = read_tolerantly(trial.outcome, {"attempt": int, "kind": str}) or {}
    is_its = outcome.get("attempt") == attempt.number and outcome["kind"] in (Cause.FINISHED, Cause.WAITING)
    if not is_its and not is_completed:
        return attempt
    cause = Cause(outcome["kind"]) if is_its else Cause.FINISHED
    batches = (
        (outcome["steps"] if fits(outcome.get("steps"), int) else 0) if is_its else newest_steps(trial.checkpoints)
    )
    last_file = trial.outcome if is_its else trial.metrics
    return replace(
        attempt,
        ended=last_file.stat().st_mtime if last_file.exists() else attempt.started,
        cause=cause.value,
        action=decide([AttemptEnd(cause=cause, steps=batches)], 0).action.value,
        batches=batches,
        why="its job was killed before it could record the end",
    )


def _add(attempt: AttemptHistory, event: dict[str, Any]) -> None:
    if event["event"] == "problem":
        attempt.problems.append(event["problem"])
    elif event["event"] == "continued":
        attempt.continued = True
    elif event["event"] == "ended":
        attempt.ended, attempt.batches = event["time"], event["steps"]
        attempt.cause, attempt.action, attempt.why = event["cause"], event["action"], event["why"]
        attempt.failure = event["failure"] and one_line(event["failure"])
        attempt.late = event.get("late", False)
        nodes = event.get("nodes", [])  # missing in journals of earlier versions
        attempt.nodes = nodes if fits(nodes, list[str]) else []


# --- metrics


@dataclass(frozen=True)
class Validation:
    """One value of a metric, from a validation."""

    metric: str
    value: float | str
    """The value as stored: JSON has no NaN and infinities, so these are "NaN", "Infinity" and "-Infinity"."""
    batches: int


class Metrics:
    """Progress, and the last and best metrics of a trial, from the valid reports in metrics.jsonl."""

    def __init__(self, searcher: Tree) -> None:
        """Create metrics without any report. `searcher`: that section of the effective configuration."""
        self.name: str = searcher["metric"]
        self._smaller_is_better: bool = searcher["smaller_is_better"]
        self.batches = 0
        """Number of batches trained: of the last report, or what `advance` has found since."""
        self.total: int | None = None
        """Number of batches of the whole trial; None before the first report, or if it has no fixed length."""
        self.training: dict[str, float | str] = {}
        self.validation: dict[str, float | str] = {}
        self.best: Validation | None = None

    @classmethod
    def read(cls, trial: TrialFolder, searcher: Tree) -> Metrics:
        """Return the metrics of a trial. Its file may have a million lines, of which only a few are parsed."""
        metrics = cls(searcher)
        # in the order of writing, so that the newest report determines the progress
        for report in reversed(last_reports(trial.metrics).values()):
            metrics._take(report)
        for steps, value in validations(trial.metrics, metrics.name).items():
            metrics._compare(value, steps)
        metrics.advance(trial)
        return metrics

    def advance(self, trial: TrialFolder) -> None:
        """Raise the number of batches to what the trial has reached since its last report.

        In an open attempt that is what the heartbeat of rank 0 shows; after it, the newest checkpoint.
        """
        with suppress(DamagedFile, PermissionError):
            journal = Journal(trial.journal)
            self.batches = max(self.batches, _reached(trial, journal.open_attempt(), journal.history(), self.batches))

    def take(self, reports: Iterable[Record]) -> None:
        """Add new reports of the current attempt. When another attempt has started, `read` must be used instead."""
        for report in reports:
            self._take(report)
            value = number_in(report["metrics"].get(self.name)) if report["kind"] == "validation" else None
            if value is not None:
                self._compare(value, report["steps"])

    @property
    def lacking_metric(self) -> str | None:
        """A sentence if validations were reported without a number for the searcher's metric."""
        if self.best is not None or not self.validation:
            return None
        if self.name in self.validation:
            return f"no validation has reported a number as {self.name!r}; the last one is {self.validation[self.name]}"
        return f"no validation has reported searcher.metric {self.name!r}, but {', '.join(sorted(self.validation))}"

    def _take(self, report: Record) -> None:
        self.batches, self.total = report["steps"], report.get("total")
        if report["kind"] == "training":
            self.training = report["metrics"]
        else:
            self.validation = report["metrics"]

    def _compare(self, value: float, steps: int) -> None:
        than = None if self.best is None else float(self.best.value)
        if better(value, than, self._smaller_is_better):
            self.best = Validation(self.name, as_written(value), steps)


def _reached(trial: TrialFolder, attempt: int | None, ends: Sequence[AttemptEnd], reported: int) -> int:
    """Return the batches of the heartbeat of the open attempt, or of the newest checkpoint. `attempt` None: none is."""
    live = read_tolerantly(trial.live_progress, {"attempt": int, "batches": int}) if attempt else None
    if live and live["attempt"] == attempt:
        batches: int = live["batches"]
        return batches
    # The end of a script without reports counts its saves instead of batches, so read the checkpoints.
    return newest_steps(trial.checkpoints) if ends and ends[-1].steps > reported else reported


# --- checkpoints


def checkpoint_to_take(trial: TrialFolder, best: Validation | None) -> Committed | None:
    """Return the checkpoint of the best validation or, if it was not kept, the newest one."""
    found = committed(trial.checkpoints)
    same = (checkpoint for checkpoint in found if best and checkpoint.steps == best.batches)
    return next(same, None) or next(iter(found), None)


def is_complete(checkpoint: Committed) -> bool:
    """Return whether every file of the manifest exists with its full size; the content is not read."""
    try:
        return all(
            (checkpoint.path / name).stat().st_size == entry.size for name, entry in checkpoint.whole.files.items()
        )
    except OSError:
        return False


SPEC: Shape = {"hparams": dict, "trial_seed": int}
"""The fields of trial.json that are read here."""


def hosts_of(trial: TrialFolder, attempt: AttemptHistory) -> list[str]:
    """Return the hosts of the gang, or only the first one if the list of nodes cannot be read."""
    if attempt.nodes:
        return attempt.nodes
    with suppress(DamagedFile, PermissionError):
        found = read_json(trial.nodes(attempt.number))
        return found if found and fits(found, list[str]) else [attempt.host]
    return [attempt.host]


def read_tolerantly(path: Path, shape: Shape = MappingProxyType({})) -> dict[str, Any] | None:
    """Return the map in a file; None if the file is missing, damaged or not readable for this user."""
    try:
        return read_map(path, shape)
    except (DamagedFile, PermissionError):
        return None


def read_visible(path: Path) -> Any | None:
    """Return the JSON in a file; None if the file is missing or not readable for this user. Raises DamagedFile."""
    try:
        return read_json(path)
    except PermissionError:
        return None
