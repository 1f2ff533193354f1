"""hpc-det experiment: what limits one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hpc_det.cli.experiment.group import experiment
from hpc_det.cli.output import Output, output_options
from hpc_det.cli.parameters import request_options

if TYPE_CHECKING:
    from hpc_det.config.request import Request


@experiment.command("tune-throughput")
@request_options
@click.option(
    "--batches",
    type=click.IntRange(min=10),
    default=200,
    show_default=True,
    metavar="N",
    help="How long each training is. Its first tenth does not count.",
)
@click.option(
    "--max-slots",
    "most_slots",
    type=click.IntRange(min=1),
    metavar="N",
    help="Measure 1, 2, 4, ... up to so many slots; by default up to the experiment's own.",
)
@click.option("--keep", is_flag=True, help="Leave the experiments of all trainings, not only of those that failed.")
@click.option("--dry-run", is_flag=True, help="Only say what would be measured.")
@output_options
def tune_throughput(
    request: Request,
    batches: int,
    most_slots: int | None,
    keep: bool,
    dry_run: bool,
    output: Output,
) -> None:
    """Find out what limits the throughput of an experiment, and which settings to try.

    Short trainings of it, with one thing otherwise each, are compared with it: on its first batch over and over (is it
    the data?), with gradients that are hardly ever exchanged (is it the network?), on fewer slots, with larger batches.
    They are experiments of their own, which save nothing, and are deleted afterwards. Where no scheduler queues them,
    one waits for the other. Ctrl-C ends them all.

    \b
    Example:
      hpc-det experiment tune-throughput digits.yaml . --config hyperparameters.lr=0.01 \\
          --cluster slurm --max-slots 4 --dry-run
    """
    from hpc_det.cli.throughput import Tuning
    from hpc_det.cli.throughput_words import show_plan, show_results

    tuning = Tuning.of(request, batches, most_slots)
    if dry_run:
        show_plan(tuning.variations, output)
    else:
        show_results(tuning.variations, tuning.run(keep=keep), output)
