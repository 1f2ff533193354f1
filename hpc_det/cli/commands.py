"""Command classes: commands that are imported when called, groups of them, and options bundled into one argument."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem

from hpc_det.errors import nearest

# If a group has no command with the typed name, these are tried in order.
OTHER_NAMES = {"ls": ("list",), "rm": ("remove", "delete"), "delete": ("rm",)}


@dataclass(frozen=True)
class LazyCommand:
    """A command whose module is imported only when it is called."""

    name: str
    where: str
    """The module below hpc_det.cli that defines the command."""
    help: str
    """The first sentence of the command's own help, repeated here so that `--help` imports no command."""
    alias: str | None = None
    """Another name, which `--help` lists too."""

    def load(self) -> click.Command:
        """Import the module and return the command."""
        found = vars(import_module(f"hpc_det.cli.{self.where}")).values()
        return next(each for each in found if isinstance(each, click.Command) and each.name == self.name)

    @property
    def names(self) -> str:
        """The name and the alias, as `--help` lists them."""
        return f"{self.name}, {self.alias}" if self.alias else self.name

    def short_help(self, limit: int) -> str:
        """Return the help, cut to `limit` characters as click cuts it."""
        return click.Command(self.name, help=self.help).get_short_help_str(limit)


class Group(click.Group):
    """A command group that also accepts the aliases and alternative names that Determined's users type."""

    def __init__(
        self, *args: object, lazy: tuple[LazyCommand, ...] = (), wraps_helps: bool = False, **kwargs: object
    ) -> None:
        """Create a group; with `wraps_helps`, `--help` wraps long helps of lazy commands instead of cutting them."""
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.lazy = lazy
        self.wraps_helps = wraps_helps

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*(each.name for each in self.lazy), *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        for name in (cmd_name, *OTHER_NAMES.get(cmd_name, ())):
            if lazy := next((each for each in self.lazy if name in (each.name, each.alias)), None):
                return lazy.load()
            if found := super().get_command(ctx, name):
                return found
        return None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None and args[0][:1].isalnum():
            known = self.list_commands(ctx)
            meant = self._in_a_group(ctx, args[0]) or nearest(args[0], known) or f"the commands are {', '.join(known)}"
            ctx.fail(f"No such command {args[0]!r}; {meant}")
        return super().resolve_command(ctx, args)

    def _in_a_group(self, ctx: click.Context, name: str) -> str | None:
        """Return a hint to the first group that has a command with this name, or None."""
        for each in self.list_commands(ctx):
            group = self.get_command(ctx, each)
            if isinstance(group, click.Group) and group.get_command(ctx, name):
                return f"did you mean `{ctx.command_path} {each} {name}`?"
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if not self.lazy:
            super().format_commands(ctx, formatter)
            return
        limit = formatter.width - 6 - max(len(each.name) for each in self.lazy)
        rows = [(each.names, each.help if self.wraps_helps else each.short_help(limit)) for each in self.lazy]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        if not self.lazy:
            return super().shell_complete(ctx, incomplete)
        # click's own completion would import every command to read its help
        begun = [each for each in self.lazy if each.name.startswith(incomplete)]
        offered = [CompletionItem(each.name, help=each.short_help(45)) for each in begun]
        return [*offered, *click.Command.shell_complete(self, ctx, incomplete)]


Group.group_class = Group  # click creates the groups within a group with this class


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def bundle(name: str, make: Callable[..., Any], *options: Decorator) -> Decorator:
    """Return a decorator that calls `make` with the values of `options` and passes the result to a command as `name`.

    The parameters of `make` must be named like the options. `--help` lists the options in this order.
    """
    given = inspect.signature(make).parameters

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_bundle(**arguments: Any) -> Any:
            values = {each: arguments.pop(each) for each in given}
            return command(**{name: make(**values)}, **arguments)

        decorated: Callable[..., Any] = with_bundle
        for option in reversed(options):  # as stacked decorators, which click applies from the bottom up
            decorated = option(decorated)
        return decorated

    return decorate
