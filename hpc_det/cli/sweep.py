"""hpc-det sweep: sweeps of Hydra apps that were started by a launcher of hpc_det."""

from __future__ import annotations

from pathlib import Path

import click

from hpc_det.cli.commands import Group
from hpc_det.cli.output import Column, Output, Record, output_options
from hpc_det.client.lookup import store
from hpc_det.errors import HpcDetError, printable
from hpc_det.store.folders import ExperimentFolder
from hpc_det.sweep.files import experiments_of
from hpc_det.sweep.status import failures, points
from hpc_det.sweep.status import wait as wait_for

SHOWN = 40  # characters to which a return value is cut in the table


def sweep_experiments(text: str) -> list[ExperimentFolder]:
    """Return the experiments of a sweep, given its hydra.sweep.dir or an experiment ID."""
    # a folder takes precedence over an ID, since hydra.sweep.dir may be named like a number
    if text.isdecimal() and len(text) < 10 and not Path(text).is_dir():
        return [store().existing(int(text))]
    return experiments_of(Path(text).absolute())


sweep_argument = click.argument("experiments", metavar="DIR|ID", type=sweep_experiments)


@click.group(cls=Group)
def sweep() -> None:
    """Show sweeps of Hydra apps, and wait for them.

    A sweep is an experiment, so all commands of `hpc-det experiment` work as well.
    """


@sweep.command()
@sweep_argument
@output_options
def status(experiments: list[ExperimentFolder], output: Output) -> None:
    """Show the points of a sweep: overrides, state, return value and folder.

    DIR is the sweep's hydra.sweep.dir.

    \b
    Example:
      hpc-det sweep status multirun/2026-11-20/10-30-00
    """
    output.table([vars(point) for experiment in experiments for point in points(experiment)], COLUMNS)


@sweep.command()
@sweep_argument
@click.option(
    "--poll",
    metavar="SECONDS",
    type=click.FloatRange(min=0.05),
    default=0.5,
    show_default=True,
    help="Time between two checks.",
)
def wait(experiments: list[ExperimentFolder], poll: float) -> None:
    """Wait until all points of a sweep have ended.

    The exit code is 0 if every point has a return value, 1 otherwise.

    \b
    Example:
      hpc-det sweep wait multirun/2026-11-20/10-30-00
    """
    for experiment in experiments:
        wait_for(experiment, poll)
    if failed := [line for experiment in experiments for line in failures(experiment)]:
        raise HpcDetError(failed)


def _returned(record: Record) -> str:
    return printable(record["text"] or "-")[:SHOWN]


COLUMNS = (
    Column("POINT", lambda record: str(record["num"])),
    Column("STATE", lambda record: record["state"].value),
    Column("RETURNED", _returned),
    Column("OVERRIDES", lambda record: printable(" ".join(record["overrides"]))),
    Column("FOLDER", lambda record: record["folder"] or "-"),
)
