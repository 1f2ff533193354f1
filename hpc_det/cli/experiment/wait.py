"""hpc-det experiment wait."""

from __future__ import annotations

from functools import partial

import click

from hpc_det.cli.arguments import any_experiments_argument
from hpc_det.cli.output import each
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.watch import Watch, insist_on_completion


@click.command()
@any_experiments_argument
@click.option(
    "--poll",
    "--polling-interval",
    "poll",
    type=click.FloatRange(min=0.05, max=3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
)
def wait(experiments: list[ExperimentFolder], poll: float) -> None:
    """Wait until experiments have ended; exit code 0 only if all are COMPLETED.

    Otherwise a sentence on stderr says why. A requeued job that the scheduler holds back is released.

    \b
    Example:
      hpc-det experiment wait 12
    """
    each(experiments, partial(wait_for, poll_s=poll))


def wait_for(experiment: ExperimentFolder, poll_s: float) -> None:
    """Return when it is COMPLETED; raise HpcDetError, which says why, when it has ended otherwise."""
    watch = Watch(experiment)
    insist_on_completion(watch.view, watch.wait(poll_s))
