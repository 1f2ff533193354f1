"""hpc-det experiment, without its commands."""

from __future__ import annotations

import click


@click.group()
def experiment() -> None:
    """Create experiments and look after them."""
