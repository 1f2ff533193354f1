"""Arguments that several commands take."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from hpc_det.errors import HpcDetError, UsageError
from hpc_det.store.about import read_about
from hpc_det.store.files import read_json
from hpc_det.store.folders import ExperimentFolder, ExperimentStore, TrialFolder
from hpc_det.store.group import Group
from hpc_det.store.root import root_of, state_root

if TYPE_CHECKING:
    from concurrent.futures import Future

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


def completed_names(group: str) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Of the profiles of clusters, or of the templates."""

    def complete(context: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        from hpc_det.config.request import group_files

        return [name for name in sorted(group_files(group, os.environ)) if name.startswith(incomplete)]

    return complete


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

Thing = TypeVar("Thing")
Made = TypeVar("Made")


def at_once(things: Sequence[Thing], act: Callable[[Thing], Made]) -> list[Made]:
    """What came of each. What fails for one keeps nobody from the others; raises HpcDetError with all that failed."""
    made: list[Made] = []
    failed: list[HpcDetError] = []
    for thing in things:
        try:
            made.append(act(thing))
        except HpcDetError as error:
            failed.append(error)
    if failed:
        kind = UsageError if all(isinstance(error, UsageError) for error in failed) else HpcDetError
        raise kind([problem for error in failed for problem in error.problems])
    return made


def each(things: Sequence[Thing], act: Callable[[Thing], str | None], *, side_by_side: int = 1) -> None:
    """Do it to each, so many at a time, and say what came of it in their order."""
    from concurrent.futures import ThreadPoolExecutor  # it takes a third of the time of a small command

    def tell(said: Future[str | None]) -> None:
        if text := said.result():
            click.echo(text)

    with ThreadPoolExecutor(side_by_side) as workers:
        at_once([workers.submit(act, thing) for thing in things], tell)


class Words(click.ParamType):  # type: ignore[type-arg]
    """A text of a single line; others could not be told from what surrounds them, on a terminal or in a script."""

    name = "words"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not value.strip() or not value.isprintable():
            self.fail(f"{value!r}: expected a text that can be printed, and is not empty", param, ctx)
        return value


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


class GroupName(click.ParamType):  # type: ignore[type-arg]
    """A group's name on the command line, or nothing for the primary one."""

    name = "group"

    def convert(self, value: str | Group, param: click.Parameter | None, ctx: click.Context | None) -> Group:
        return value if isinstance(value, Group) else Group.of(value or None)


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


def request_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command gets the path `config` and, of that file and all that was said beside it, the `request`."""
    options = [
        click.argument("config", type=click.Path(path_type=Path)),
        click.argument("context_dir", required=False, type=click.Path(path_type=Path)),
        click.option(
            "--template",
            metavar="NAME",
            shell_complete=completed_names("template"),
            help="The template that the configuration is merged over.",
        ),
        click.option(
            "--config", "overrides", metavar="KEY=VALUE", multiple=True, help="Set a key of CONFIG; repeatable."
        ),
        click.option(
            "--cluster",
            metavar="NAME",
            shell_complete=completed_names("cluster"),
            help="The cluster profile; by default local, this machine.",
        ),
        include_option,
    ]

    @functools.wraps(command)
    def with_request(
        config: Path,
        context_dir: Path | None,
        template: str | None,
        overrides: tuple[str, ...],
        cluster: str | None,
        includes: tuple[Path, ...],
        **arguments: Any,
    ) -> Any:
        from hpc_det.config.request import from_file, with_includes

        request = from_file(config, context_dir, overrides, template, cluster, os.environ)
        return command(config=config, request=with_includes(request, includes), **arguments)

    return functools.reduce(lambda wrapped, option: option(wrapped), reversed(options), with_request)


def choices_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command gets one argument `choices` for all the flags."""
    options = [
        click.option("--dry-run", is_flag=True, help="Print the script that would be submitted; touch nothing."),
        click.option("--explain", is_flag=True, help="Show the effective configuration and who wrote each key."),
        click.option("-f", "--follow", is_flag=True, help="Show the training until it ends."),
        click.option("--paused", is_flag=True, help="Without a job yet; it gets one by `activate`."),
        click.option("--test", is_flag=True, help="Only one batch, one validation and one checkpoint."),
        click.option("--local", is_flag=True, help="Train in this process, on one slot, without a job."),
        click.option("--pdb", is_flag=True, help="With --local: open the debugger where the trial raises an error."),
        click.option(
            "--shared",
            type=GroupName(),
            is_flag=False,
            flag_value="",
            metavar="[=GROUP]",
            help="A group, by default your primary one, may look at the experiment and fork it.",
        ),
    ]
    names = [field.name for field in fields(Choices)]

    @functools.wraps(command)
    def with_choices(**arguments: Any) -> Any:
        return command(choices=Choices(**{name: arguments.pop(name) for name in names}), **arguments)

    return functools.reduce(lambda wrapped, option: option(wrapped), reversed(options), with_choices)
