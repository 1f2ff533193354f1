"""Arguments that several commands take."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpc_det.errors import UsageError
from hpc_det.store.group import Group

if TYPE_CHECKING:
    from hpc_det.config.request import Request


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


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def bundle(name: str, make: Callable[..., Any], *options: Decorator) -> Decorator:
    """Return a decorator for commands: they get what `make` returns of the values of `options` as one argument `name`.

    The options must be called as the parameters of `make`; in `--help` they stand in this order.
    """
    given = inspect.signature(make).parameters

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_bundle(**arguments: Any) -> Any:
            values = {each: arguments.pop(each) for each in given}
            return command(**{name: make(**values)}, **arguments)

        decorated: Callable[..., Any] = with_bundle
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate


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
    click.option("--paused", is_flag=True, help="Without a job yet; it gets one by `activate`."),
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
