"""Continues an experiment, or uses it as the base of a new one (a fork).

A fork of another user's experiment must not use that user's secrets or notification hooks, or refer to that user's
trials and checkpoints by number. An experiment that is continued may get another length, unless a trial has already
trained further.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpc_det.checkpoint.committed import committed
from hpc_det.config.merge import Tree, leaves
from hpc_det.config.secrets import MASK, masked_names, masked_paths
from hpc_det.errors import UsageError
from hpc_det.node.json_files import read_json, read_map, write_json
from hpc_det.plan.job_plan import JobPlan
from hpc_det.plan.pool import save_notes
from hpc_det.search.journal import SearchJournal
from hpc_det.store.experiment_config import read_effective, read_secrets
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from hpc_det.store.journal import Journal
from hpc_det.store.local_run import insist_on_jobs
from hpc_det.store.metrics import last_reports
from hpc_det.store.save_times import SaveTimes, read_saves
from hpc_det.store.submitting import Unsettled, submitting
from hpc_det.submit.jobs import Jobs, prepare_jobs, queue_jobs, write_jobs
from hpc_det.submit.submission import check_storage, write_config, write_effective

if TYPE_CHECKING:
    from hpc_det.config.request import Request
    from hpc_det.plan.effective import Effective

MaxLength = Mapping[str, int] | None
"""{unit: amount}; None if trials end by themselves."""
_VARIABLES = "environment.environment_variables"
FIXED = ("hyperparameters", "reproducibility", "entrypoint")
"""Sections that must not change while an experiment has trials."""


def stored(
    experiment: ExperimentFolder,
    overrides: Sequence[str],
    cluster: dict[str, Any] | None = None,
    *,
    change: Callable[[Request], Request] = lambda request: request,
) -> Effective:
    """Return the effective configuration of the experiment with `a.b=value` overrides.

    `cluster`: another cluster profile than the experiment's. `change`: further overrides, such as those of `--test`.
    Raises UsageError with all problems.
    """
    from hpc_det.config.request import from_stored
    from hpc_det.plan.effective import effective

    insist_on_jobs(experiment)
    config, profile = read_effective(experiment) or {}, cluster or read_secrets(experiment.cluster) or {}
    of_others = not experiment.is_own()
    base = without_hooks(config) if of_others else config
    found = effective(change(from_stored(base, profile, experiment.submitted_code(), overrides)))
    if of_others:
        check_is_ones_own(found, config, experiment.owner())
    origins, former = dict(read_map(experiment.origin) or {}), dict(leaves(config))
    now = {
        path: origins.get(path, "config") if former.get(path) == value else "config"
        for path, value in leaves(found.tree)
    }
    # Only these notes: the user has seen all others when the experiment was created.
    notes = save_notes(found.experiment, found.cluster, experiment.id, _longest_save(experiment))
    return replace(found, points=read_secrets(experiment.points) or [], origins=now, notes=notes)


def _longest_save(experiment: ExperimentFolder) -> SaveTimes | None:
    """Return the save times of the trial with the longest save; None if no trial has saved."""
    measured = [times for trial in experiment.trials() if (times := read_saves(trial.saves))]
    return max(measured, key=lambda times: times.longest_s, default=None)


def set_once_more(experiment: ExperimentFolder, overrides: Sequence[str]) -> None:
    """Change settings of the experiment for its future jobs. Raises UsageError if they are invalid or trials depend on
    them.
    """
    found = stored(experiment, overrides)
    _check_unchanged(experiment, read_effective(experiment) or {}, found)
    write_effective(experiment, found.tree)
    write_config(experiment, found.tree, found.origins)


def go_on(experiment: ExperimentFolder, overrides: Sequence[str]) -> int:
    """Submit jobs for the unfinished trials of the experiment, and return how many trials that are. No job may be
    running.

    Failed and cancelled trials are continued. A greater `searcher.max_length` also continues finished ones, and a
    greater `searcher.max_trials` creates more. Raises UsageError if nothing is left to do, or if a trial has trained
    further than the new length.
    """
    found, before = stored(experiment, overrides), read_effective(experiment) or {}
    _check_unchanged(experiment, before, found)
    check_storage(found)
    check_max_length(experiment, before["searcher"].get("max_length"), found.tree["searcher"].get("max_length"))
    origins_before = dict(read_map(experiment.origin) or {})
    queued = list[str]()
    submissions = SearchJournal(experiment).state().submissions
    with submitting(experiment, first_script=_submitted(experiment) + 1, before=submissions):
        # Before `_Left.of`: the search takes its length and its number of trials from this file.
        write_effective(experiment, found.tree)
        try:
            left = _Left.of(experiment)
            jobs = _jobs_for(left, found, experiment)
            write_jobs(jobs, experiment)
            write_config(experiment, found.tree, found.origins)
            _reopen(experiment, left)
            queue_jobs(jobs, experiment, left.search, queued)
        except Unsettled:  # jobs may be queued, and they need the new configuration
            raise
        except BaseException:
            if not queued:
                write_effective(experiment, before)
                write_config(experiment, before, origins_before)
            raise
    return left.count


def _jobs_for(left: _Left, found: Effective, experiment: ExperimentFolder) -> Jobs:
    """Return the jobs for what is left, of the same code and so with the same startup hook. Raises UsageError."""
    has_hook = JobPlan.of(experiment).startup_hook
    return prepare_jobs(
        found,
        experiment,
        left.count,
        worker=left.next_worker,
        script=left.next_script,
        startup_hook=has_hook,
    )


def submit_again(experiment: ExperimentFolder) -> int:
    """Submit jobs for the unfinished trials of a paused experiment, and return how many trials that are.

    No job of the experiment may be running.
    """
    found = stored(experiment, [])
    left = _Left.of(experiment)
    jobs = _jobs_for(left, found, experiment)
    with submitting(experiment, first_script=left.next_script, before=left.search.state().submissions):
        write_jobs(jobs, experiment)
        paused_by = left.search.state().paused or ""
        _lose_workers(left.search)
        left.search.activate()
        for trial in experiment.trials():
            trial.stop.unlink(missing_ok=True)
        queued = list[str]()
        try:
            queue_jobs(jobs, experiment, left.search, queued)
        except Unsettled:  # jobs may be queued, so the experiment is no longer paused
            raise
        except BaseException:
            if not queued:
                left.search.pause(paused_by)
            raise
    return left.count


@dataclass(frozen=True)
class _Left:
    """The unfinished part of the search of an experiment."""

    search: SearchJournal
    again: list[int]
    """Trials that failed or were cancelled."""
    count: int
    """Number of trials to train, at least 1."""
    next_worker: int
    """The number of the first new worker."""
    next_script: int
    """The number of the first new job script."""

    @classmethod
    def of(cls, experiment: ExperimentFolder) -> _Left:
        """Return the unfinished part, read from the search. Raises UsageError if nothing is left to do."""
        search = SearchJournal(experiment)
        state = search.state()
        again = state.stopped_early()
        if state.given_up and not again:
            raise UsageError(f"experiment {experiment.id}: {state.given_up}")
        if state.method.finished and not again:
            raise UsageError(
                f"experiment {experiment.id}: nothing is left to do; set a greater searcher.max_length or "
                f"searcher.max_trials with --config, or run it again with `hpc-det experiment fork {experiment.id}`"
            )
        closed = sum(state.method.is_closed(number) for number in state.trials if number not in again)
        count = max(state.method.trials_expected + state.replaced - closed, 1)
        # A script that the scheduler refused did not become a job; the next script gets its number.
        return cls(search, again, count, state.workers, _submitted(experiment) + 1)


def _submitted(experiment: ExperimentFolder) -> int:
    """Return the number of scripts that became jobs."""
    number = 0
    while experiment.job(number + 1).exists():
        number += 1
    return number


def _reopen(experiment: ExperimentFolder, left: _Left) -> None:
    """Record in the journals of the search and of its unfinished trials that they continue."""
    _lose_workers(left.search)
    left.search.continue_(left.again)
    state = left.search.state()
    for trial in experiment.trials():
        if not state.method.is_closed(trial.id):
            _reopen_trial(trial, left.search)


def _lose_workers(search: SearchJournal) -> None:
    """Record as lost the workers that were ended before they could record it themselves."""
    state = search.state()
    for worker in {*state.open, *state.present}:
        search.lose(worker, state.present.get(worker, ""))


def _reopen_trial(trial: TrialFolder, search: SearchJournal) -> None:
    """Delete the trial's stop request, update its configuration, and record in its journal that it continues."""
    trial.stop.unlink(missing_ok=True)
    if spec := read_json(trial.trial):
        write_json(trial.trial, {**spec, "config": search.config(trial.id)}, private=True)
    Journal(trial.journal).continued()


def _check_unchanged(experiment: ExperimentFolder, before: Tree, found: Effective) -> None:
    """Raise UsageError with each changed key that trials depend on."""
    changed = [key for key in FIXED if found.tree[key] != before[key]]
    changed += _changed_storage(found.tree["checkpoint_storage"], before["checkpoint_storage"])
    changed += _changed_searcher(found.tree["searcher"], before["searcher"])
    if changed:
        raise UsageError(
            [
                f"--config {key}: experiment {experiment.id} has trials with the old value; start another experiment "
                f"with `hpc-det experiment fork {experiment.id}`"
                for key in changed
            ]
        )


def _changed_storage(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Return the changed keys that say where checkpoints are. Credentials, addresses and retention may change."""
    places = ("type", "host_path", "storage_path", "container_path", "bucket", "prefix", "container")
    return [f"checkpoint_storage.{key}" for key in places if now.get(key) != before.get(key)]


def _changed_searcher(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Return the changed keys of the searcher that must not change."""
    # A search that compares trials, or a class of the user's, has made decisions that depend on these settings.
    decides = "divisor" in before or before["name"] == "custom"
    may_grow = () if decides else ("max_length", "max_trials", "max_concurrent_trials")
    return [f"searcher.{key}" for key in {**before, **now} if key not in may_grow and now.get(key) != before.get(key)]


def check_max_length(experiment: ExperimentFolder, before: MaxLength, now: MaxLength) -> None:
    """Raise UsageError if a trial has trained further than the new length."""
    if not now or now == before:
        return
    ((unit, amount),) = now.items()
    trained, number = max(((_trained(trial, before, unit), trial.id) for trial in experiment.trials()), default=(0, 0))
    if amount < trained:
        wanted = f"{{{unit}: {amount}}}"
        raise UsageError(
            f"--config searcher.max_length: {wanted}: trial {experiment.id}/{number} has a checkpoint at "
            f"{round(trained, 2):.12g} {unit} and would not train; set at least {math.ceil(trained)}, or start "
            f"another experiment with `hpc-det experiment fork {experiment.id} --config searcher.max_length='{wanted}'`"
        )


def _trained(trial: TrialFolder, before: MaxLength, unit: str) -> float:
    """Return how much the trial has trained, in `unit`, by its latest checkpoint; 0 if that is unknown."""
    steps = next((found.steps for found in committed(trial.checkpoints) if not found.removed), 0)
    if unit == "batches":
        return steps
    # A checkpoint records batches only. Records and epochs follow from the reported total of batches for the former
    # length.
    length, total = (before or {}).get(unit), _total(trial)
    return steps * length / total if length and total else 0


def _total(trial: TrialFolder) -> int | None:
    """Return the total number of batches that the trial reported last, since it was last continued; None without a
    report.
    """
    events, reports = Journal(trial.journal).events(), last_reports(trial.metrics)
    former = max((event["attempt"] for event in events if event["event"] == "continued"), default=0)
    newest = next(iter(reports.values()), None)
    # Reports before that may be for another length.
    return newest["total"] if newest and newest["attempt"] > former else None


def without_hooks(before: Tree) -> Tree:
    """Return the configuration without notification hooks, for a fork of another user's experiment."""
    # The owner must not be notified of the fork, and the URL of a webhook is a secret.
    return {key: value for key, value in before.items() if key != "notify"}


def check_is_ones_own(found: Effective, before: Tree, owner: str) -> None:
    """Raise UsageError with each key whose value belongs to the owner of the forked experiment and must be set again.

    `before`: the configuration of the `owner`, with masked secrets.
    """
    if problems := [*_secrets(found, owner), *_sources(found, before, owner)]:
        raise UsageError(problems)


def _secrets(found: Effective, owner: str) -> Iterator[str]:
    """Yield a message for each masked secret."""
    for path in masked_paths(found.tree):
        yield f"{path}: is a secret of user {owner}; set your own with --config {path}=VALUE"
    variables = found.experiment.environment.variables(found.cluster.slot_type)
    if names := masked_names(variables):
        again = ", ".join(item.replace(MASK, "VALUE") for item in dict.fromkeys(variables))
        yield (
            f"{_VARIABLES}: {', '.join(names)}: secrets of user {owner}; set your own with --config "
            f"'{_VARIABLES}=[{again}]'"
        )
    if MASK in found.cluster.setup:
        yield f"cluster.setup: a line sets a secret of user {owner}; choose another profile with --cluster NAME"


def _sources(found: Effective, before: Tree, owner: str) -> Iterator[str]:
    """Yield a message for each source trial or checkpoint that is the owner's."""
    for key in ("source_trial_id", "source_checkpoint_uuid"):
        # Each user's experiments have their own numbers, so the owner's number would mean another experiment here.
        value = found.tree["searcher"].get(key)
        if value and value == before["searcher"].get(key):
            yield f"searcher.{key}: {value!r} is of user {owner}; set yours, or null, with --config searcher.{key}="
