"""hpc-det config: look at experiment files without a submission."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from hpc_det.config.effective import Effective


@click.group()
def config() -> None:
    """Check experiment files."""


@config.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("context_dir", required=False, type=click.Path(path_type=Path))
@click.option("--template", metavar="NAME", help="The template that the configuration is merged over.")
@click.option("--config", "overrides", metavar="KEY=VALUE", multiple=True, help="Set a key of FILE; repeatable.")
@click.option("--cluster", metavar="NAME", help="The cluster profile; by default local, this machine.")
def check(
    file: Path, context_dir: Path | None, template: str | None, overrides: tuple[str, ...], cluster: str | None
) -> None:
    """Check an experiment file and submit nothing.

    Every problem is one line on stderr, and the exit code is 2. CONTEXT_DIR is the folder of the code, as for
    `hpc-det experiment create`.

    \b
    Example:
      hpc-det config check digits.yaml --cluster slurm
      digits.yaml: valid: 1 trial of 2 slots, 20 epochs at most, on cluster slurm
    """
    from hpc_det.cli.create import say_notes
    from hpc_det.config.effective import effective
    from hpc_det.config.request import from_file

    found = effective(from_file(file, context_dir, overrides, template, cluster, os.environ))
    say_notes(found)
    click.echo(f"{file}: valid: {in_a_line(found)}")


def in_a_line(found: Effective) -> str:
    """The experiment as one line: how many trials, how long, on what."""
    from hpc_det.submit.submission import trials_expected

    trials, slots = trials_expected(found), found.experiment.resources.slots_per_trial
    size = f"{trials} trial{'s' * (trials > 1)} of {slots} slot{'s' * (slots > 1)}"
    lengths = [f"{amount} {unit} at most" for unit, amount in (found.tree["searcher"]["max_length"] or {}).items()]
    return ", ".join([size, *lengths, f"on cluster {found.cluster.name}"])
