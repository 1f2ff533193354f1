"""Experiments and trials on the command line: an id there, what it names in the command."""

from __future__ import annotations

import os
from contextlib import suppress

import click
from click.shell_completion import CompletionItem

from hpc_det.cli.several import at_once
from hpc_det.errors import UsageError
from hpc_det.node.json_files import read_json
from hpc_det.store.about import read_about
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from hpc_det.store.root import root_of, state_root

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


def completed_ids(incomplete: str) -> list[CompletionItem]:
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


class ExperimentId(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2, and not before
    """An id on the command line, an existing experiment in the command.

    Where `others` may be meant, for commands that change nothing, it may follow their owner's name or root and a colon.
    """

    name = "id"

    def __init__(self, *, others: bool = False) -> None:
        self.others = others

    def convert(
        self, value: str | ExperimentFolder, param: click.Parameter | None, ctx: click.Context | None
    ) -> ExperimentFolder:
        if isinstance(value, ExperimentFolder):
            return value
        owner, _, number = value.rpartition(":")
        if not number.isdecimal() or len(number) > 9:
            example = "12, or ada:12 for one of ada's" if self.others else "12"
            self.fail(f"{value!r} is no experiment id; expected a number such as {example}", param, ctx)
        found = store(owner).existing(int(number))
        return found if self.others else insist_on_own(found)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return completed_ids(incomplete)


experiment_argument = click.argument("experiment", metavar="ID", type=ExperimentId())
any_experiment_argument = click.argument("experiment", metavar="[OWNER:]ID", type=ExperimentId(others=True))
"""For commands that change nothing: it may be a colleague's."""


class ExperimentIds(click.ParamType):  # type: ignore[type-arg]
    """`12,15-18` on the command line, existing experiments in the command, each once."""

    name = "ids"

    def __init__(self, *, others: bool = False) -> None:
        self.others = others

    def convert(
        self, value: str | list[ExperimentFolder], param: click.Parameter | None, ctx: click.Context | None
    ) -> list[ExperimentFolder]:
        if not isinstance(value, str):
            return value
        named = dict.fromkeys(text for part in value.split(",") for text in _spelt_out(part))
        return at_once(list(named), lambda text: ExperimentId(others=self.others).convert(text, param, ctx))

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return completed_ids(incomplete)


def _spelt_out(part: str) -> list[str]:
    """`15-18` is 15, 16, 17, 18, of the same owner; what is no such range stays as it is."""
    owner, colon, numbers = part.rpartition(":")
    first, _, last = numbers.partition("-")
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last) < int(first) + MOST_IN_RANGE):
        return [part]
    return [f"{owner}{colon}{number}" for number in range(int(first), int(last) + 1)]


experiments_argument = click.argument("experiments", metavar="IDS", type=ExperimentIds())
any_experiments_argument = click.argument("experiments", metavar="[OWNER:]IDS", type=ExperimentIds(others=True))


class TrialId(click.ParamType):  # type: ignore[type-arg]
    """EXPERIMENT/TRIAL on the command line, a trial that the search has created in the command."""

    name = "trial"

    def __init__(self, *, others: bool = False) -> None:
        self.others = others

    def convert(
        self, value: str | TrialFolder, param: click.Parameter | None, ctx: click.Context | None
    ) -> TrialFolder:
        if isinstance(value, TrialFolder):
            return value
        experiment, _, trial = value.rpartition("/")
        ids = (experiment.rpartition(":")[2], trial)
        if not all(number.isdecimal() and len(number) <= 9 for number in ids):
            self.fail(f"{value!r} is no trial; expected EXPERIMENT/TRIAL such as 12/7", param, ctx)
        return created_trial(ExperimentId(others=self.others).convert(experiment, param, ctx), int(trial))

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        number, slash, typed = incomplete.partition("/")
        if not slash:
            return [CompletionItem(f"{item.value}/", help=item.help) for item in completed_ids(number)]
        trials = store().folder(int(number)).trials() if number.isdecimal() else []
        return [CompletionItem(f"{number}/{trial.id}") for trial in trials if str(trial.id).startswith(typed)]


def created_trial(experiment: ExperimentFolder, number: int) -> TrialFolder:
    """Raises UsageError for a trial that the search has not created."""
    from hpc_det.view.state import ExperimentView

    created = ExperimentView(experiment).search.trials
    if number in created:
        return experiment.trial(number)
    has = f"it has 1 to {max(created)}" if created else "none has begun"
    raise UsageError(f"experiment {experiment.id}: no trial {number} so far; {has}")


trial_argument = click.argument("trial", metavar="EXPERIMENT/TRIAL", type=TrialId())
any_trial_argument = click.argument("trial", metavar="[OWNER:]EXPERIMENT/TRIAL", type=TrialId(others=True))
