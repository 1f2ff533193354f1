"""hpc-det experiment describe: the state and details of experiments, as text or records."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import click

from hpc_det.cli import describe_trial
from hpc_det.cli.arguments import any_experiments_argument
from hpc_det.cli.experiment.list import progress_in_words
from hpc_det.cli.experiment.list_trials import table as trials_table
from hpc_det.cli.output import Output, output_options, show_description
from hpc_det.errors import count, printable, some
from hpc_det.node.json_files import Shape
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.attempt_sentences import gist
from hpc_det.view.formatting import batches_of, iso, labelled, number, section, settings
from hpc_det.view.state import ExperimentState, ExperimentView
from hpc_det.view.summary import progress, why
from hpc_det.view.trial_facts import TrialFacts, trials_of
from hpc_det.view.trial_history import read_tolerantly, why_not_completed
from hpc_det.view.trials import TrialState
from hpc_det.view.watch import state as state_of
from hpc_det.view.watch import what_to_do


@click.command()
@any_experiments_argument
@output_options
def describe(experiments: list[ExperimentFolder], output: Output) -> None:
    """Describe experiments: state and trials, or attempts, metrics and checkpoints of the only trial.

    \b
    Example:
      hpc-det experiment describe 12 --json
      {"id": 12, "name": "digits", "state": "RUNNING", "why": null,
       "code": {"commit": "1a2b3c4...", "branch": "main", "dirty": true,
                "remote": "git@example.org:me/digits.git"},
       "folder": "/home/me/hpc_det/experiments/12",
       "owner": "me", "shared_with": null, "entrypoint": "...",
       "searcher": {"name": "single", "metric": "accuracy", ...},
       "slots": 8, "nodes": 2, "ranks_per_node": 4,
       "scheduler": "slurm", "job_id": "4711", "job_ids": ["4711"],
       "submitted": "2026-11-20T10:02:05+01:00",
       "trial_counts": {"expected": 1, "created": 1, "running": 1,
                        "completed": 0, "failed": 0, "invalid": 0},
       "batches": 200, "total_batches": 460,
       "best": {"metric": "accuracy", "value": 0.97,
                "batches": 180, "trial": 1}, "progress": 0.43,
       "training": {"loss": 0.1}, "validation": {"accuracy": 0.96},
       "checkpoints": [{"uuid": "...", "batches": 180, "complete": true,
                        "time": "2026-11-20T10:05:00+01:00"}],
       "set_aside": [],
       "attempts": [{"number": 1, "job_id": "4711", "host": "node1",
                     "nodes": ["node1", "node2"],
                     "started": "...", "ended": "...",
                     "cause": "preempted", "batches": 120,
                     "action": "requeue", "why": "preempted",
                     "failure": null, "problems": []}],
       "trials": [...]}
    Each item of `trials` is a record of `hpc-det trial describe --json`. If there are
    several trials, `training` and `validation` are null here, and `checkpoints` and
    `attempts` are empty. `code` is null if git reported no commit for the code.
    `why` is one sentence about what ended an ERROR or CANCELED experiment.
    `complete`: every file exists with its full size. For an open attempt, the
    keys from `ended` to `failure` are null. `cause` is finished, failed, preempted, time limit,
    node lost, unhealthy node, scheduler away, disk full, hung, cancelled, paused,
    waiting (for the searcher) or resume check; `action` is done, restart, requeue, give up, pause or wait.
    """
    if output.is_for_people:
        show_description("\n\n".join(in_words(experiment) for experiment in experiments))
    else:
        output.details([described(experiment) for experiment in experiments])


_COMMIT: Shape = {"commit": str, "branch": str | None, "remote": str | None, "dirty": bool}  # in git.json
Record = dict[str, Any]


def described(experiment: ExperimentFolder) -> Record:
    """Return the record that `experiment describe --json` prints."""
    view = ExperimentView(experiment)
    state = state_of(view)
    found = [*trials_of(view, state)]
    trials = [describe_trial.as_json(trial) for trial in found]
    return {**_record(view, state, found), **_of_only_trial(view, trials), "trials": trials}


def _record(view: ExperimentView, state: ExperimentState, trials: list[TrialFacts]) -> Record:
    """Return the record of the experiment without those of its trials."""
    known = progress(view, state, trials[0].metrics if trials and not view.has_many_trials else None)
    plan = view.plan()
    # A run outside a job has no job when it rests; then these are its former processes.
    job_ids = view.job_ids() or [*dict.fromkeys(job.job_id for job in view.jobs)]
    return {
        "id": view.id,
        **view.about().as_json(),
        "state": state.value,
        "why": why(view, state),
        "folder": str(view.folder.path),
        "code": _commit(view.folder),
        "owner": view.folder.owner(),
        "shared_with": group.name if (group := view.folder.shared_with()) else None,
        "entrypoint": view.config["entrypoint"],
        "searcher": view.config["searcher"],
        "slots": plan.world_size,
        "nodes": plan.nodes,
        "ranks_per_node": plan.ranks_per_node,
        "scheduler": plan.scheduler,
        "job_id": next(iter([*view.search.present.values(), *reversed(job_ids)]), None),
        "job_ids": job_ids,
        "submitted": iso(view.jobs[0].submitted) if view.jobs else None,
        "trial_counts": known.pop("trials"),
        **known,
    }


def _commit(experiment: ExperimentFolder) -> Record | None:
    """Return the git commit of the submitted code without the names of changed files; None if git reported none."""
    found = read_tolerantly(experiment.git, _COMMIT)
    return found and {key: found[key] for key in _COMMIT}


def _code(commit: Record) -> str:
    return f"commit {commit['commit'][:SHOWN_DIGITS]}" + (" with changes" if commit["dirty"] else "")


def _of_only_trial(view: ExperimentView, trials: list[Record]) -> Record:
    """Return the keys that the experiment's record repeats from a single trial; empty values for several trials."""
    nothing: Record = {"training": None, "validation": None, "checkpoints": [], "set_aside": [], "attempts": []}
    return nothing if view.has_many_trials or not trials else {key: trials[0][key] for key in nothing}


def in_words(experiment: ExperimentFolder) -> str:
    """Return the experiment as text for people."""
    view = ExperimentView(experiment)
    return in_words_of(view, state_of(view))


def in_words_of(view: ExperimentView, state: ExperimentState) -> str:
    """Return the experiment, whose state is `state`, as text for people."""
    trials = [*trials_of(view, state)]
    record = _record(view, state, trials)
    failures = list(_failures(trials)) if view.has_many_trials else []
    if failures and record["why"] and record["why"].startswith(view.not_done()):
        record["why"] = view.not_done()  # the causes follow in `failures`
    sections = [list(_facts(record, _checkpoint(record, trials)))]
    if view.has_many_trials:
        sections += [section("Trials", trials_table(trials, view)), section("Failures", failures)]
        sections.append(section("Set aside", list(_set_aside(trials))))
    elif trials:
        sections += describe_trial.sections(trials[0], known=record["why"] or "")
    if state is ExperimentState.ERROR:
        todo = what_to_do(view)
        sections.append([todo[0].upper() + todo[1:]])
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _set_aside(trials: Sequence[TrialFacts]) -> Iterator[str]:
    for trial in trials:
        yield from (f"trial {trial.id}: {describe_trial.set_aside_in_words(item)}" for item in trial.set_aside())


def _checkpoint(record: Record, trials: Sequence[TrialFacts]) -> str | None:
    """Return the checkpoint of the best trial, or of the only one; None without one."""
    best = record["best"]["trial"] if record["best"] else None
    chosen = [trial for trial in trials if trial.id == best or len(trials) == 1]
    return chosen[0].checkpoint() if chosen else None


def _facts(record: Record, checkpoint: str | None) -> Iterator[str]:
    yield f"Experiment {record['id']}: {printable(record['name'])}"
    jobs = record["job_ids"]
    rows = {
        "State": record["state"] + (f": {record['why']}" if record["why"] else ""),
        "Progress": _progress(record),
        "Jobs" if len(jobs) > 1 else "Job": _jobs(record),
        "Slots": f"{record['slots']} on {count(record['nodes'], 'node')}, {record['ranks_per_node']} each",
        "Entrypoint": _command(record["entrypoint"]),
        "Searcher": _searcher(record["searcher"]),
        "Folder": record["folder"],
        **({"Checkpoint": checkpoint} if checkpoint else {}),
        **({"About": record["description"]} if record["description"] else {}),
        **({"Labels": ", ".join(record["labels"])} if record["labels"] else {}),
        **({"Archived": "listed only with --all"} if record["archived"] else {}),
        **({"Code": _code(record["code"])} if record["code"] else {}),
        **({"Shared": f"by {record['owner']}, with group {record['shared_with']}"} if record["shared_with"] else {}),
    }
    yield from labelled(rows)


def _searcher(searcher: Record) -> str:
    return f"{searcher['name']}, " + settings(
        {key: value for key, value in searcher.items() if key != "name" and value is not None}
    )


def _progress(record: Record) -> str:
    if record["batches"] is not None:
        return batches_of(record["batches"], record["total_batches"])
    counts, best = record["trial_counts"], record["best"]
    parts = [
        progress_in_words({**record, "trials": counts}),
        f"{counts['created']} created, {counts['running']} running, {counts['failed']} failed"
        + (f", {counts['invalid']} invalid" if counts["invalid"] else ""),
        *([f"best {best['metric']} {number(best['value'])} in trial {best['trial']}"] if best else []),
    ]
    return "; ".join(parts)


SHOWN_DIGITS = 7  # of a commit's hash, as in git's short form
SHOWN_JOBS = 5
SHOWN_FAILURES = 5
MOST_READ = 100  # failed trials whose causes are read


def _jobs(record: Record) -> str:
    if record["submitted"] is None:
        return f"none yet ({record['scheduler']})"
    return f"{_short(record['job_ids'])} ({record['scheduler']}), submitted {record['submitted']}"


def _short(job_ids: Sequence[str]) -> str:
    more = f" and {len(job_ids) - SHOWN_JOBS} more" if len(job_ids) > SHOWN_JOBS else ""
    return ", ".join(job_ids[:SHOWN_JOBS]) + more if job_ids else "-"


def _command(entrypoint: str | list[str]) -> str:
    """Return the entrypoint as one command line."""
    # str() because the file may be damaged
    return shlex.join(map(str, entrypoint)) if isinstance(entrypoint, list) else str(entrypoint)


def _failures(trials: Sequence[TrialFacts]) -> Iterator[str]:
    """Yield the first SHOWN_FAILURES causes, each with the trials that failed for it, and the number of the others."""
    failed = [found for found in trials if found.state in (TrialState.ERROR, TrialState.INVALID)]
    by_gist: dict[str, list[int]] = {}
    causes: dict[str, str] = {}
    for found in failed[:MOST_READ]:
        cause = why_not_completed(found.folder)
        by_gist.setdefault(gist(cause), []).append(found.id)
        causes.setdefault(gist(cause), cause)
    shown = [*by_gist][:SHOWN_FAILURES]
    yield from (f"{_trials(by_gist[key])}: {causes[key]}" for key in shown)
    if others := len(failed) - sum(len(by_gist[key]) for key in shown):
        yield f"and {others} more"


def _trials(numbers: Sequence[int]) -> str:
    return f"{'trial' if len(numbers) == 1 else 'trials'} {some([*map(str, numbers)])}"
