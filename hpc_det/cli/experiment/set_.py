"""hpc-det experiment set: what an owner changes after the submission."""

from __future__ import annotations

import click

from hpc_det.cli.confirm import yes_option
from hpc_det.cli.experiment.group import experiment
from hpc_det.cli.ids import experiments_argument
from hpc_det.cli.parameters import words
from hpc_det.cli.several import each
from hpc_det.store.folders import ExperimentFolder

_COUNT = click.IntRange(min=0)


@experiment.group("set")
def set_() -> None:
    """Change what is said of experiments, and what is kept of them."""


@set_.command()
@experiments_argument
@click.argument("name", type=words)
def name(experiments: list[ExperimentFolder], name: str) -> None:
    """Give experiments another name.

    \b
    Example:
      hpc-det experiment set name 12 digits-wide
    """
    from hpc_det.cli import about

    each(experiments, lambda experiment: about.rename(experiment, name))


@set_.command()
@experiments_argument
@click.argument("description")
def description(experiments: list[ExperimentFolder], description: str) -> None:
    """Say in free text what experiments are about.

    \b
    Example:
      hpc-det experiment set description 12 "with dropout, for the paper"
    """
    from hpc_det.cli import about

    each(experiments, lambda experiment: about.describe_as(experiment, description))


@set_.command("max-slots")
@experiments_argument
@click.argument("slots", type=click.IntRange(min=1))
def max_slots(experiments: list[ExperimentFolder], slots: int) -> None:
    """Limit the slots that all trials of an experiment have together.

    The jobs that are in the queue keep their limit; `pause` and `activate` make others.

    \b
    Example:
      hpc-det experiment set max-slots 13 4
    """
    from hpc_det.cli import again

    each(experiments, lambda experiment: again.set_max_slots(experiment, slots))


@set_.command("gc-policy")
@experiments_argument
@click.option("--save-experiment-best", type=_COUNT, metavar="N", help="Keep the best N of the experiment.")
@click.option("--save-trial-best", type=_COUNT, metavar="N", help="Keep the best N of each trial.")
@click.option("--save-trial-latest", type=_COUNT, metavar="N", help="Keep the latest N of each trial.")
@yes_option
def gc_policy(experiments: list[ExperimentFolder], yes: bool, **counts: int | None) -> None:
    """Change how many checkpoints experiments keep.

    Of an experiment that has ended, those that the new policy does not keep are shown and, if you agree, deleted. One
    that has not ended keeps to the new policy from its next checkpoint on; what is gone already does not come back.

    \b
    Example:
      hpc-det experiment set gc-policy 12 --save-experiment-best 1 \\
          --save-trial-best 0 --save-trial-latest 0 --yes
    """
    from hpc_det.cli.gc_policy import set_policy

    set_policy(experiments, {key: count for key, count in counts.items() if count is not None}, yes=yes)


@set_.command()
@experiments_argument
@click.argument("priority", metavar="N")
def priority(experiments: list[ExperimentFolder], priority: str) -> None:
    """Change the priority of the jobs of experiments: from 1 to 99, lower is earlier.

    Does for all their jobs what `hpc-det job update` does for one.

    \b
    Example:
      hpc-det experiment set priority 15 60
    """
    from hpc_det.cli.job.of_experiments import update_jobs

    click.echo("\n".join(update_jobs(experiments, priority)))
