"""Experiments, trials and jobs on the command line: an id there, what it names in the command."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import click
from click.shell_completion import CompletionItem

from hpc_det.cli.actions import at_once
from hpc_det.cli.parameters import Decorator
from hpc_det.errors import UsageError
from hpc_det.node.json_files import read_json
from hpc_det.store.experiment_config import read_about
from hpc_det.store.experiments import ExperimentStore, root_of, state_root
from hpc_det.store.folders import ExperimentFolder, TrialFolder

MOST_IN_RANGE = 10_000
MOST_COMPLETED = 50
"""Ids that a shell is offered."""


def store(owner: str | None = None) -> ExperimentStore:
    """The user's own experiments, or those of an `owner` as the command line names one.

    Raises UsageError where an owner has none.
    """
    if not owner:
        return ExperimentStore(state_root(os.environ))
    found = ExperimentStore(root_of(owner))
    try:
        found.folder(1).path.parent.stat()
    except FileNotFoundError:
        raise UsageError(
            f"{owner}: no experiments are below {found.root}; give the folder that is their HPC_DET_ROOT"
        ) from None
    except PermissionError:
        pass  # whoever reads them is told
    return found


def insist_on_own(experiment: ExperimentFolder) -> ExperimentFolder:
    """Raises UsageError for an experiment of somebody else's, whatever the file system would let happen."""
    if experiment.is_own():
        return experiment
    named = experiment.named()
    raise UsageError(
        f"experiment {named}: is {experiment.owner()}'s, who alone may change it; you may look at it with `hpc-det "
        f"experiment describe {named}` and `hpc-det experiment logs {named}`, and run it again as yours with "
        f"`hpc-det experiment fork {named}`"
    )


def any_experiment(text: str) -> ExperimentFolder:
    """An experiment by its id, for commands that change nothing: `12`, or with its owner's name or root, `ada:12`."""
    return _experiment(text, "12, or ada:12 for one of ada's")


def own_experiment(text: str) -> ExperimentFolder:
    """An experiment of the user's own by its id."""
    return insist_on_own(_experiment(text, "12"))


def _experiment(text: str, example: str) -> ExperimentFolder:
    owner, _, number = text.rpartition(":")
    if not number.isdecimal() or len(number) > 9:
        raise click.BadParameter(f"{text!r} is no experiment id; expected a number such as {example}")
    return store(owner).existing(int(number))


def any_experiments(text: str) -> list[ExperimentFolder]:
    """Experiments by their ids, such as `12,15-18`, each once."""
    return at_once(_ids(text), any_experiment)


def own_experiments(text: str) -> list[ExperimentFolder]:
    return at_once(_ids(text), own_experiment)


def _ids(text: str) -> list[str]:
    return list(dict.fromkeys(number for part in text.split(",") for number in _spelt_out(part)))


def _spelt_out(part: str) -> list[str]:
    """`15-18` is 15, 16, 17, 18, of the same owner; what is no such range stays as it is."""
    owner, colon, numbers = part.rpartition(":")
    first, _, last = numbers.partition("-")
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last) < int(first) + MOST_IN_RANGE):
        return [part]
    return [f"{owner}{colon}{number}" for number in range(int(first), int(last) + 1)]


def any_trial(text: str) -> TrialFolder:
    """A trial that the search has created, by EXPERIMENT/TRIAL."""
    return _trial(text, any_experiment)


def own_trial(text: str) -> TrialFolder:
    return _trial(text, own_experiment)


def _trial(text: str, experiment_of: Callable[[str], ExperimentFolder]) -> TrialFolder:
    experiment, _, trial = text.rpartition("/")
    ids = (experiment.rpartition(":")[2], trial)
    if not all(number.isdecimal() and len(number) <= 9 for number in ids):
        raise click.BadParameter(f"{text!r} is no trial; expected EXPERIMENT/TRIAL such as 12/7")
    return created_trial(experiment_of(experiment), int(trial))


def job_ids(text: str) -> list[str]:
    """Ids with commas between, each once."""
    if not all(named := text.split(",")):
        raise click.BadParameter(f"{text!r} names no job; expected ids such as 4711,4712")
    return list(dict.fromkeys(named))


def created_trial(experiment: ExperimentFolder, number: int) -> TrialFolder:
    """Raises UsageError for a trial that the search has not created."""
    from hpc_det.view.state import ExperimentView

    created = ExperimentView(experiment).search.trials
    if number in created:
        return experiment.trial(number)
    has = f"it has 1 to {max(created)}" if created else "none has begun"
    raise UsageError(f"experiment {experiment.id}: no trial {number} so far; {has}")


def _completed_ids(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The newest experiments whose ids go on as what was typed so far, which may be the last id of several."""
    before, comma, typed = incomplete.rpartition(",")
    found = [experiment for experiment in store().all() if str(experiment.id).startswith(typed)]
    return [
        CompletionItem(f"{before}{comma}{experiment.id}", help=_name_of(experiment))
        for experiment in reversed(found[-MOST_COMPLETED:])
    ]


def _name_of(experiment: ExperimentFolder) -> str | None:
    """None where its files do not say it: a shell that completes has no place for errors."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        return read_about(experiment, read_json(experiment.effective) or {}).name
    return None


def _completed_trials(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    number, slash, typed = incomplete.partition("/")
    if not slash:
        return [CompletionItem(f"{item.value}/", help=item.help) for item in _completed_ids(ctx, param, number)]
    trials = store().folder(int(number)).trials() if number.isdecimal() else []
    return [CompletionItem(f"{number}/{trial.id}") for trial in trials if str(trial.id).startswith(typed)]


def _argument(name: str, metavar: str, type_: Callable[[str], Any], completed: Callable[..., Any]) -> Decorator:
    return click.argument(name, metavar=metavar, type=type_, shell_complete=completed)


experiment_argument = _argument("experiment", "ID", own_experiment, _completed_ids)
any_experiment_argument = _argument("experiment", "[OWNER:]ID", any_experiment, _completed_ids)
experiments_argument = _argument("experiments", "IDS", own_experiments, _completed_ids)
any_experiments_argument = _argument("experiments", "[OWNER:]IDS", any_experiments, _completed_ids)
trial_argument = _argument("trial", "EXPERIMENT/TRIAL", own_trial, _completed_trials)
any_trial_argument = _argument("trial", "[OWNER:]EXPERIMENT/TRIAL", any_trial, _completed_trials)
"""Those that begin with any_ are for commands that change nothing: what they name may be a colleague's."""
jobs_argument = click.argument("jobs", metavar="JOB[,JOB...]", type=job_ids)
