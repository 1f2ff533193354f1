"""Commands: lazy ones, which are imported when they are called, groups of them, and options taken as one bundle."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem

OTHER_NAMES = {"ls": ("list",), "rm": ("remove", "delete"), "delete": ("rm",)}
"""What a name means in a group without a command of that name."""


@dataclass(frozen=True)
class LazyCommand:
    """A command that is not imported yet."""

    name: str
    where: str
    """The module below hpc_det.cli that has the command of this name."""
    help: str
    """The command's own first sentence, repeated here so that `--help` imports nothing."""
    alias: str | None = None

    def load(self) -> click.Command:
        found = vars(import_module(f"hpc_det.cli.{self.where}")).values()
        return next(each for each in found if isinstance(each, click.Command) and each.name == self.name)

    @property
    def names(self) -> str:
        return f"{self.name}, {self.alias}" if self.alias else self.name

    def short_help(self, limit: int) -> str:
        """The help, cut to `limit` characters as click cuts it."""
        return click.Command(self.name, help=self.help).get_short_help_str(limit)


class Group(click.Group):
    """A group whose commands also answer to the other names that Determined's users type."""

    def __init__(
        self, *args: object, lazy: tuple[LazyCommand, ...] = (), wraps_helps: bool = False, **kwargs: object
    ) -> None:
        """`wraps_helps`: `--help` shows the helps of lazy commands whole, where it would cut them to a line."""
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
        begun = [each for each in self.lazy if each.name.startswith(incomplete)]
        offered = [CompletionItem(each.name, help=each.short_help(45)) for each in begun]
        return [*offered, *click.Command.shell_complete(self, ctx, incomplete)]


# Groups within a group are of the same kind.
Group.group_class = Group


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
