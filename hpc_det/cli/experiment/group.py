"""hpc-det experiment, without its commands."""

from __future__ import annotations

import click

from hpc_det.cli.groups import Group


@click.group(cls=Group)
def experiment() -> None:
    """Create experiments and look after them."""
