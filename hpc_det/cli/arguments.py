"""Arguments and options that several commands share: experiments, trials and jobs by ID, and how to create one."""

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
from hpc_det.client.lookup import created_trial, insist_on_own, store
from hpc_det.errors import UsageError
from hpc_det.node.json_files import read_json
from hpc_det.store.experiment_config import read_about
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from hpc_det.store.group import Group

if TYPE_CHECKING:
    from hpc_det.config.request import Request

MOST_IN_RANGE = 10_000  # IDs in one range such as 15-18; a longer one is a typing error, rejected as an invalid ID
MOST_COMPLETED = 50  # newest experiment IDs that are offered to shell completion


def any_experiment(text: str) -> ExperimentFolder:
    """Return an experiment for a read-only command, by ID (`12`) or by its owner's name or root and ID (`ada:12`)."""
    return _experiment(text, "12, or ada:12 for an experiment of ada")


def own_experiment(text: str) -> ExperimentFolder:
    """Return one of the user's own experiments by ID."""
    return insist_on_own(_experiment(text, "12"))


def _experiment(text: str, example: str) -> ExperimentFolder:
    owner, _, number = text.rpartition(":")
    if not number.isdecimal() or len(number) > 9:  # no ID has more digits; a very long one is no file name
        raise click.BadParameter(f"{text!r} is not an experiment ID; expected a number such as {example}")
    return store(owner).existing(int(number))


def any_experiments(text: str) -> list[ExperimentFolder]:
    """Return experiments for a read-only command by their IDs, such as `12,15-18`, each once."""
    return at_once(_ids(text), any_experiment)


def own_experiments(text: str) -> list[ExperimentFolder]:
    """Return the user's own experiments by their IDs, such as `12,15-18`, each once."""
    return at_once(_ids(text), own_experiment)


def _ids(text: str) -> list[str]:
    return list(dict.fromkeys(number for part in text.split(",") for number in _spelt_out(part)))


def _spelt_out(part: str) -> list[str]:
    """Return the IDs of a range: `ada:15-18` gives `ada:15` to `ada:18`. Any other text is returned unchanged."""
    owner, colon, numbers = part.rpartition(":")
    first, _, last = numbers.partition("-")
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last) < int(first) + MOST_IN_RANGE):
        return [part]
    return [f"{owner}{colon}{number}" for number in range(int(first), int(last) + 1)]


def any_trial(text: str) -> TrialFolder:
    """Return a trial for a read-only command, by `[OWNER:]EXPERIMENT/TRIAL`."""
    return _trial(text, any_experiment)


def own_trial(text: str) -> TrialFolder:
    """Return a trial of one of the user's own experiments, by `EXPERIMENT/TRIAL`."""
    return _trial(text, own_experiment)


def _trial(text: str, experiment_of: Callable[[str], ExperimentFolder]) -> TrialFolder:
    experiment, _, trial = text.rpartition("/")
    ids = (experiment.rpartition(":")[2], trial)
    if not all(number.isdecimal() and len(number) <= 9 for number in ids):
        example = f"{text}/1 for trial 1 of experiment {text}" if text.isdecimal() else "12/7"
        raise click.BadParameter(f"{text!r} is not a trial; expected EXPERIMENT/TRIAL such as {example}")
    return created_trial(experiment_of(experiment), int(trial))


def job_ids(text: str) -> list[str]:
    """Return the comma-separated job IDs, each once."""
    if not all(named := text.split(",")):
        raise click.BadParameter(f"{text!r} contains an empty job ID; expected IDs such as 4711,4712")
    return list(dict.fromkeys(named))


def _completed_ids(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the newest experiments whose IDs begin like the last of the comma-separated IDs in `incomplete`."""
    before, comma, typed = incomplete.rpartition(",")
    found = [experiment for experiment in store().all() if str(experiment.id).startswith(typed)]
    return [
        CompletionItem(f"{before}{comma}{experiment.id}", help=_name_of(experiment))
        for experiment in reversed(found[-MOST_COMPLETED:])
    ]


def _name_of(experiment: ExperimentFolder) -> str | None:
    """Return the experiment's name for the list of completions, or None if its files cannot be read."""
    with suppress(OSError, ValueError, LookupError, TypeError):  # shell completion has no place to show an error
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


# Arguments named any_* also accept a colleague's shared experiments; only read-only commands use them.
experiment_argument = _argument("experiment", "ID", own_experiment, _completed_ids)
any_experiment_argument = _argument("experiment", "[OWNER:]ID", any_experiment, _completed_ids)
experiments_argument = _argument("experiments", "IDS", own_experiments, _completed_ids)
any_experiments_argument = _argument("experiments", "[OWNER:]IDS", any_experiments, _completed_ids)
several_experiments_argument = click.argument(
    "experiments",
    metavar="[OWNER:]IDS...",
    nargs=-1,
    required=True,
    type=any_experiments,
    callback=lambda context, param, given: list({each.path: each for part in given for each in part}.values()),
    shell_complete=_completed_ids,
)
trial_argument = _argument("trial", "EXPERIMENT/TRIAL", own_trial, _completed_trials)
any_trial_argument = _argument("trial", "[OWNER:]EXPERIMENT/TRIAL", any_trial, _completed_trials)
jobs_argument = click.argument("jobs", metavar="JOB[,JOB...]", type=job_ids)


def completed_names(group: str) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Return a shell completion for the names in `group`: "cluster" or "template"."""

    def complete(context: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        from hpc_det.config.conf_files import group_files

        with suppress(UsageError):  # shell completion has no place to show an error
            return [name for name in sorted(group_files(group, os.environ)) if name.startswith(incomplete)]
        return []

    return complete


def words(text: str) -> str:
    """Return `text` if it is one printable line that is not blank; raise BadParameter otherwise."""
    # A line break or control character could pass for the text around it, on a terminal or in a job script.
    if not text.strip() or not text.isprintable():
        raise click.BadParameter(f"{text!r}: expected printable text on one line that is not empty")
    return text


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The flags of `experiment create`, `experiment fork` and `run`; raises UsageError for flags that conflict."""

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
            raise UsageError("--pdb: a job has no terminal for the debugger; add --local")
        if self.local and (self.dry_run or self.follow or self.paused):
            raise UsageError(
                "--local: submits no job to show, follow or pause; remove --dry-run, --follow and --paused"
            )
        if self.paused and self.follow:
            raise UsageError("--paused: nothing trains until `hpc-det experiment activate`; remove --follow")
        if self.local and self.shared:
            raise UsageError("--local: creates no experiment that could be shared; remove --shared")


include_option = click.option(
    "-i",
    "--include",
    "includes",
    type=click.Path(exists=True, path_type=Path),
    multiple=True,
    metavar="PATH",
    help="Copy a file or folder for the job, next to the code; repeatable.",
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


def _only_one(context: click.Context, param: click.Parameter, values: tuple[str, ...]) -> str | None:
    """Return the value of an option that may be given once; click itself would use the last of several."""
    if len(values) > 1:
        raise UsageError(f"--{param.name}: {' and '.join(map(repr, values))} are given; name one")
    return values[0] if values else None


def _cluster(context: click.Context, param: click.Parameter, values: tuple[str, ...]) -> str | None:
    """Return the cluster profile that is named; with --local it is this machine unless another one is named."""
    named = _only_one(context, param, values)
    return "local" if named is None and context.params.get("local") else named


request_options = bundle(
    "request",
    _request,
    click.argument("config", type=click.Path(path_type=Path)),
    click.argument("context_dir", required=False, type=click.Path(path_type=Path)),
    click.option(
        "--template",
        metavar="NAME",
        multiple=True,
        callback=_only_one,
        shell_complete=completed_names("template"),
        help="Template that CONFIG is merged over.",
    ),
    click.option("--config", "overrides", metavar="KEY=VALUE", multiple=True, help="Set a key of CONFIG; repeatable."),
    click.option(
        "--cluster",
        metavar="NAME",
        multiple=True,
        callback=_cluster,
        shell_complete=completed_names("cluster"),
        help="Cluster profile; default: HPC_DET_CLUSTER, the site's, the only one found, or this machine.",
    ),
    include_option,
)
"""Decorator: the command receives `request`, made from the experiment file and these options."""


choices_options = bundle(
    "choices",
    Choices,
    click.option("--dry-run", is_flag=True, help="Print the script that would be submitted; change nothing."),
    click.option("--explain", is_flag=True, help="Show the effective configuration and the source of each key."),
    click.option("-f", "--follow", is_flag=True, help="Show the training until it ends."),
    click.option("--paused", is_flag=True, help="Create without submitting; submit later with `activate`."),
    click.option("--test", is_flag=True, help="Train one batch, with one validation and one checkpoint."),
    # eager, so that `_cluster` knows it
    click.option("--local", is_flag=True, is_eager=True, help="Train in this process, on one slot, without a job."),
    click.option("--pdb", is_flag=True, help="With --local: start the debugger where the trial raises an exception."),
    click.option(
        "--shared",
        type=lambda name: Group.of(name or None),
        is_flag=False,  # the value is optional: click passes "" for --shared alone
        flag_value="",
        metavar="[=GROUP]",
        help="Let a group, by default your primary one, view and fork the experiment.",
    ),
)
"""Decorator: the command receives all flags as one argument `choices`."""
