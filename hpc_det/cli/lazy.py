"""A command group that knows its commands by name and imports one only when it is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

import click


@dataclass(frozen=True, kw_only=True)
class LazyCommand:
    name: str
    where: str
    """module:attribute"""
    help: str
    """The command's own first sentence; it stands here so that `--help` imports nothing."""
    alias: str | None = None

    def load(self) -> click.Command:
        module, attribute = self.where.split(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command


class LazyGroup(click.Group):
    def __init__(self, *args: object, lazy: Sequence[LazyCommand] = (), **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.lazy = tuple(lazy)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [command.name for command in self.lazy]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return next((lazy.load() for lazy in self.lazy if cmd_name in (lazy.name, lazy.alias)), None)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(", ".join(filter(None, [lazy.name, lazy.alias])), lazy.help) for lazy in self.lazy]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
