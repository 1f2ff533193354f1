"""Experiments once more: the same one further, or the base of another one.

A fork of somebody else's experiment cannot take along their secrets, their other experiments, and whom they notify. An
experiment that goes on may get another length, unless trials have come further already.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpc_det.checkpoint.committed import committed
from hpc_det.config.merge import Tree, leaves
from hpc_det.config.secrets import MASK, masked_names, masked_paths
from hpc_det.errors import UsageError
from hpc_det.node.json_files import read_json, read_map, write_json
from hpc_det.plan.pool import save_notes
from hpc_det.search.journal import SearchJournal
from hpc_det.store.experiment_config import read_effective, read_secrets
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from hpc_det.store.journal import Journal
from hpc_det.store.metrics import last_reports
from hpc_det.store.save_times import SaveTimes, read_saves
from hpc_det.store.submitting import Unsettled, submitting
from hpc_det.submit.jobs import prepare_jobs, queue_jobs, write_jobs
from hpc_det.submit.submission import check_storage, write_config, write_effective

if TYPE_CHECKING:
    from hpc_det.plan.effective import Effective

MaxLength = Mapping[str, int] | None
"""{unit: amount}; None where a trial trains to an end of its own."""
_VARIABLES = "environment.environment_variables"
FIXED = ("hyperparameters", "reproducibility", "entrypoint")
"""What makes the trials of an experiment what they are."""


def stored(experiment: ExperimentFolder, overrides: Sequence[str], cluster: dict[str, Any] | None = None) -> Effective:
    """What the experiment was, with `a.b=value` overrides, on its own cluster or that of the profile `cluster`.

    Raises UsageError with all that is wrong.
    """
    from hpc_det.config.request import from_stored
    from hpc_det.plan.effective import effective

    config, profile = read_effective(experiment) or {}, cluster or read_secrets(experiment.cluster) or {}
    of_others = not experiment.is_own()
    base = without_hooks(config) if of_others else config
    found = effective(from_stored(base, profile, experiment.submitted_code(), overrides))
    if of_others:
        check_is_ones_own(found, config, experiment.owner())
    origins, former = dict(read_map(experiment.origin) or {}), dict(leaves(config))
    now = {
        path: origins.get(path, "config") if former.get(path) == value else "config"
        for path, value in leaves(found.tree)
    }
    # What has no effect was said when the experiment was created.
    notes = save_notes(found.experiment, found.cluster, experiment.id, _longest_save(experiment))
    return replace(found, points=read_secrets(experiment.points) or [], origins=now, notes=notes)


def _longest_save(experiment: ExperimentFolder) -> SaveTimes | None:
    """The times of the trial with the longest one."""
    measured = [times for trial in experiment.trials() if (times := read_saves(trial.saves))]
    return max(measured, key=lambda times: times.longest_s, default=None)


def set_once_more(experiment: ExperimentFolder, overrides: Sequence[str]) -> None:
    """Change settings that no trial depends on, for the jobs to come. Raises UsageError for what is not valid."""
    found = stored(experiment, overrides)
    _check_unchanged(experiment, read_effective(experiment) or {}, found)
    write_effective(experiment, found.tree)
    write_config(experiment, found.tree, found.origins)


def go_on(experiment: ExperimentFolder, overrides: Sequence[str]) -> int:
    """Submit jobs for what the experiment has not done; for how many trials. Nothing of it may run any more.

    Trials that failed or were cancelled get another chance; with a greater `searcher.max_length` finished ones go on,
    with a greater `searcher.max_trials` others come. Raises UsageError where nothing is left to do, or a trial has come
    further already.
    """
    found, before = stored(experiment, overrides), read_effective(experiment) or {}
    _check_unchanged(experiment, before, found)
    check_storage(found)
    check_max_length(experiment, before["searcher"].get("max_length"), found.tree["searcher"].get("max_length"))
    origins_before = dict(read_map(experiment.origin) or {})
    queued = list[str]()
    submissions = SearchJournal(experiment).state().submissions
    with submitting(experiment, first_script=_submitted(experiment) + 1, before=submissions):
        write_effective(experiment, found.tree)
        try:
            left = _Left.of(experiment)
            jobs = prepare_jobs(found, experiment, left.count, worker=left.next_worker, script=left.next_script)
            write_jobs(jobs, experiment)
            write_config(experiment, found.tree, found.origins)
            _reopen(experiment, left)
            queue_jobs(jobs, experiment, left.search, queued)
        except Unsettled:
            raise
        except BaseException:
            if not queued:
                write_effective(experiment, before)
                write_config(experiment, before, origins_before)
            raise
    return left.count


def submit_again(experiment: ExperimentFolder) -> int:
    """Submit jobs for what a paused experiment has not done; for how many trials. Nothing of it may run any more."""
    found = stored(experiment, [])
    left = _Left.of(experiment)
    jobs = prepare_jobs(found, experiment, left.count, worker=left.next_worker, script=left.next_script)
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
        except Unsettled:
            raise
        except BaseException:
            if not queued:
                left.search.pause(paused_by)
            raise
    return left.count


@dataclass(frozen=True)
class _Left:
    """What the search of an experiment has not done."""

    search: SearchJournal
    again: list[int]
    """Trials that failed or were cancelled."""
    count: int
    next_worker: int
    next_script: int

    @classmethod
    def of(cls, experiment: ExperimentFolder) -> _Left:
        """Raises UsageError where there is nothing."""
        search = SearchJournal(experiment)
        state = search.state()
        again = state.stopped_early()
        if state.given_up and not again:
            raise UsageError(f"experiment {experiment.id}: {state.given_up}")
        if state.method.finished and not again:
            raise UsageError(
                f"experiment {experiment.id}: nothing is left to do; give it a greater searcher.max_length or "
                f"searcher.max_trials with --config, or run it again with `hpc-det experiment fork {experiment.id}`"
            )
        closed = sum(state.method.is_closed(number) for number in state.trials if number not in again)
        count = max(state.method.trials_expected + state.replaced - closed, 1)
        # A script that was refused is no job; the next one takes its number.
        return cls(search, again, count, state.workers, _submitted(experiment) + 1)


def _submitted(experiment: ExperimentFolder) -> int:
    """How many scripts became jobs."""
    number = 0
    while experiment.job(number + 1).exists():
        number += 1
    return number


def _reopen(experiment: ExperimentFolder, left: _Left) -> None:
    _lose_workers(left.search)
    left.search.continue_(left.again)
    state = left.search.state()
    for trial in experiment.trials():
        if not state.method.is_closed(trial.id):
            _reopen_trial(trial, left.search)


def _lose_workers(search: SearchJournal) -> None:
    """Those that had no time to leave."""
    state = search.state()
    for worker in {*state.open, *state.present}:
        search.lose(worker, state.present.get(worker, ""))


def _reopen_trial(trial: TrialFolder, search: SearchJournal) -> None:
    trial.stop.unlink(missing_ok=True)
    if spec := read_json(trial.trial):
        write_json(trial.trial, {**spec, "config": search.config(trial.id)}, private=True)
    Journal(trial.journal).continued()


def _check_unchanged(experiment: ExperimentFolder, before: Tree, found: Effective) -> None:
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
    """Keys of a store and the address of its server may change, and how many checkpoints are kept."""
    places = ("type", "host_path", "storage_path", "container_path", "bucket", "prefix", "container")
    return [f"checkpoint_storage.{key}" for key in places if now.get(key) != before.get(key)]


def _changed_searcher(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """A search that compares trials has taken its decisions by all of this, a user's own may have; the others count."""
    decides = "divisor" in before or before["name"] == "custom"
    may_grow = () if decides else ("max_length", "max_trials", "max_concurrent_trials")
    return [f"searcher.{key}" for key in {**before, **now} if key not in may_grow and now.get(key) != before.get(key)]


def check_max_length(experiment: ExperimentFolder, before: MaxLength, now: MaxLength) -> None:
    """Raises UsageError for a new length with which a trial would begin beyond its end."""
    if not now or now == before:
        return
    ((unit, amount),) = now.items()
    trained, number = max(((_trained(trial, before, unit), trial.id) for trial in experiment.trials()), default=(0, 0))
    if amount < trained:
        wanted = f"{{{unit}: {amount}}}"
        raise UsageError(
            f"--config searcher.max_length: {wanted}: trial {experiment.id}/{number} goes on from a checkpoint at "
            f"{round(trained, 2):.12g} {unit}, and would train nothing; give at least {math.ceil(trained)}, or start "
            f"another experiment with `hpc-det experiment fork {experiment.id} --config searcher.max_length='{wanted}'`"
        )


def _trained(trial: TrialFolder, before: MaxLength, unit: str) -> float:
    """How much of `unit` the checkpoint has that the trial goes on from; 0 where nothing tells.

    Of records and epochs, reports tell how many batches the length is that the trial had until now, `before`.
    """
    steps = next((found.steps for found in committed(trial.checkpoints) if not found.removed), 0)
    if unit == "batches":
        return steps
    length, total = (before or {}).get(unit), _total(trial)
    return steps * length / total if length and total else 0


def _total(trial: TrialFolder) -> int | None:
    """Batches in all, by the last report since the trial was continued, with another length perhaps."""
    events, reports = Journal(trial.journal).events(), last_reports(trial.metrics)
    former = max((event["attempt"] for event in events if event["event"] == "continued"), default=0)
    newest = next(iter(reports.values()), None)
    return newest["total"] if newest and newest["attempt"] > former else None


def without_hooks(before: Tree) -> Tree:
    """News of the fork are none of the owner's business, and the address of a webhook is a secret."""
    return {key: value for key, value in before.items() if key != "notify"}


def check_is_ones_own(found: Effective, before: Tree, owner: str) -> None:
    """`before`: the configuration of the `owner`, masked. Raises UsageError with each key that has to be said anew."""
    if problems := [*_secrets(found, owner), *_sources(found, before, owner)]:
        raise UsageError(problems)


def _secrets(found: Effective, owner: str) -> Iterator[str]:
    for path in masked_paths(found.tree):
        yield f"{path}: a secret of {owner}'s; give yours with --config {path}=VALUE"
    variables = found.experiment.environment.variables(found.cluster.slot_type)
    if names := masked_names(variables):
        again = ", ".join(item.replace(MASK, "VALUE") for item in dict.fromkeys(variables))
        yield (
            f"{_VARIABLES}: {', '.join(names)}: secrets of {owner}'s; give yours with --config '{_VARIABLES}=[{again}]'"
        )
    if MASK in found.cluster.setup:
        yield (
            f"cluster.setup: a line sets a secret of {owner}'s; choose a profile that you may use with --cluster NAME"
        )


def _sources(found: Effective, before: Tree, owner: str) -> Iterator[str]:
    """Numbers of experiments are each user's own."""
    for key in ("source_trial_id", "source_checkpoint_uuid"):
        value = found.tree["searcher"].get(key)
        if value and value == before["searcher"].get(key):
            yield f"searcher.{key}: {value!r} is {owner}'s; say one of yours, or null, with --config searcher.{key}="
