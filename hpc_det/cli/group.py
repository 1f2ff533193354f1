"""Command groups whose commands also answer to the other names that Determined's users type."""

from __future__ import annotations

import click

OTHERWISE = {"ls": ("list",), "rm": ("remove", "delete"), "delete": ("rm",)}
"""What a name stands for in a group without a command of that name."""


class Group(click.Group):
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        names = (cmd_name, *OTHERWISE.get(cmd_name, ()))
        return next((found for name in names if (found := super(Group, self).get_command(ctx, name))), None)


# Groups within a group are of the same kind.
Group.group_class = Group
