"""What commands take: experiments, trials and jobs by their ids, and the options that several commands share."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from hpc_det.cli.commands import Decorator, bundle
from hpc_det.cli.output import at_once
from hpc_det.errors import UsageError
from hpc_det.node.json_files import read_json
from hpc_det.store.experiment_config import read_about
from hpc_det.store.experiments import ExperimentStore, root_of, state_root
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from hpc_det.store.group import Group

if TYPE_CHECKING:
    from hpc_det.config.request import Request

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


def completed_names(group: str) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Of the profiles of clusters, or of the templates."""

    def complete(context: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        from hpc_det.config.request import group_files

        return [name for name in sorted(group_files(group, os.environ)) if name.startswith(incomplete)]

    return complete


def words(text: str) -> str:
    """A text of a single line; others could not be told from what surrounds them, on a terminal or in a script."""
    if not text.strip() or not text.isprintable():
        raise click.BadParameter(f"{text!r}: expected a text that can be printed, and is not empty")
    return text


@dataclass(frozen=True, kw_only=True)
class Choices:
    """How an experiment is created: the flags of `experiment create` and `run`."""

    dry_run: bool
    explain: bool
    follow: bool
    paused: bool
    test: bool
    local: bool
    pdb: bool
    shared: Group | None

    def __post_init__(self) -> None:
        if self.pdb and not self.local:
            raise UsageError("--pdb: a job has no keyboard; add --local")
        if self.local and (self.dry_run or self.follow or self.paused):
            raise UsageError(
                "--local: there is no job to show, follow or pause; leave out --dry-run, --follow and --paused"
            )
        if self.paused and self.follow:
            raise UsageError("--paused: nothing happens until `hpc-det experiment activate`; leave out --follow")
        if self.local and self.shared:
            raise UsageError("--local: there is no experiment to share; leave out --shared")


include_option = click.option(
    "-i",
    "--include",
    "includes",
    type=click.Path(exists=True, path_type=Path),
    multiple=True,
    metavar="PATH",
    help="A file or folder that the job gets beside the code; repeatable.",
)


def _request(
    config: Path,
    context_dir: Path | None,
    template: str | None,
    overrides: tuple[str, ...],
    cluster: str | None,
    includes: tuple[Path, ...],
) -> Request:
    from hpc_det.config.request import from_file, with_includes

    return with_includes(from_file(config, context_dir, overrides, template, cluster, os.environ), includes)


request_options = bundle(
    "request",
    _request,
    click.argument("config", type=click.Path(path_type=Path)),
    click.argument("context_dir", required=False, type=click.Path(path_type=Path)),
    click.option(
        "--template",
        metavar="NAME",
        shell_complete=completed_names("template"),
        help="The template that the configuration is merged over.",
    ),
    click.option("--config", "overrides", metavar="KEY=VALUE", multiple=True, help="Set a key of CONFIG; repeatable."),
    click.option(
        "--cluster",
        metavar="NAME",
        shell_complete=completed_names("cluster"),
        help="The cluster profile; by default local, this machine.",
    ),
    include_option,
)
"""The command gets the `request` of an experiment's file and of all that was said beside it."""


choices_options = bundle(
    "choices",
    Choices,
    click.option("--dry-run", is_flag=True, help="Print the script that would be submitted; touch nothing."),
    click.option("--explain", is_flag=True, help="Show the effective configuration and who wrote each key."),
    click.option("-f", "--follow", is_flag=True, help="Show the training until it ends."),
    click.option("--paused", is_flag=True, help="Create without submitting; submit later with `activate`."),
    click.option("--test", is_flag=True, help="Only one batch, one validation and one checkpoint."),
    click.option("--local", is_flag=True, help="Train in this process, on one slot, without a job."),
    click.option("--pdb", is_flag=True, help="With --local: open the debugger where the trial raises an error."),
    click.option(
        "--shared",
        type=lambda name: Group.of(name or None),
        is_flag=False,
        flag_value="",
        metavar="[=GROUP]",
        help="A group, by default your primary one, may look at the experiment and fork it.",
    ),
)
"""The command gets one argument `choices` for all the flags."""
