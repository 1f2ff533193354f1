"""hpc-det experiment wait: wait until experiments have ended."""

from __future__ import annotations

import sys
from functools import partial

import click

from hpc_det.cli.arguments import any_experiments_argument
from hpc_det.cli.output import each
from hpc_det.errors import say
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
    help="Time between two checks.",
)
def wait(experiments: list[ExperimentFolder], poll: float) -> None:
    """Wait until experiments have ended; exit code 0 only if all are COMPLETED.

    Otherwise a sentence on stderr gives the reason. A requeued job that the scheduler holds is released.

    \b
    Example:
      hpc-det experiment wait 12
    """
    each(experiments, partial(wait_for, poll_s=poll))


def wait_for(experiment: ExperimentFolder, poll_s: float) -> None:
    """Return when the experiment is COMPLETED; raise HpcDetError with the reason if it ends in another state."""
    watch = Watch(experiment)
    if sys.stderr.isatty():
        logs = f"hpc-det experiment logs -f {experiment.named()}"
        say(f"waiting for experiment {experiment.id}; `{logs}` shows its output")
    try:
        state = watch.wait(poll_s)
    except KeyboardInterrupt:
        end = f"; end it with `hpc-det experiment kill {experiment.id}`" if experiment.is_own() else ""
        say(f"stopped waiting; experiment {experiment.id} continues{end}")
        raise
    insist_on_completion(watch.view, state)
