"""hpc-det experiment: whether one resumes exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hpc_det.cli.experiment.group import experiment
from hpc_det.cli.output import Output, output_options
from hpc_det.cli.parameters import request_options

if TYPE_CHECKING:
    from hpc_det.config.request import Request


@experiment.command("verify-resume")
@request_options
@click.option(
    "--batches", type=click.IntRange(min=3), default=40, show_default=True, metavar="N", help="Length of each training."
)
@click.option(
    "--ranks", type=click.IntRange(min=1), metavar="N", help="Slots of each training; by default the experiment's own."
)
@click.option(
    "--stops",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    metavar="N",
    help="How often the second training is stopped; 0 compares two undisturbed ones.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="Chooses where it stops."
)
@click.option("--keep", is_flag=True, help="Keep both experiments, not only failed ones.")
@output_options
@click.pass_context
def verify_resume(
    context: click.Context,
    request: Request,
    batches: int,
    ranks: int | None,
    stops: int,
    seed: int,
    keep: bool,
    output: Output,
) -> None:
    """Check that a trial resumes bit for bit, before you trust it with a month of GPUs.

    Trains it twice for a few batches: once undisturbed, and once with stops after random batches, each followed by a
    resume from the checkpoint in new processes. Data, metrics, weights, optimizer states and generators of every batch
    and rank are compared bit by bit. The first difference is shown with its likely cause, such as a generator in a
    Python attribute or a non-deterministic kernel. Exits with 1 where the trainings differ. Both are experiments of
    their own, and are deleted afterwards. See docs/verify_resume.md.

    \b
    Example:
      hpc-det experiment verify-resume digits.yaml . --cluster slurm --ranks 2 --stops 5
    """
    from hpc_det.cli.verify_resume import Check
    from hpc_det.cli.verify_resume_words import show_result

    found = Check.of(request, batches, ranks, stops, seed).run(keep=keep)
    show_result(found, output)
    context.exit(0 if found.is_identical else 1)
