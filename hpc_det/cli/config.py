"""hpc-det config: check experiment files without submitting them."""

from __future__ import annotations

import click

from hpc_det.cli.arguments import request_options
from hpc_det.cli.commands import Group
from hpc_det.client.creation import say_notes
from hpc_det.client.lookup import store
from hpc_det.config.request import Request
from hpc_det.plan.effective import Effective, effective
from hpc_det.submit.submission import prepare
from hpc_det.view.formatting import count, length_in_words


@click.group(cls=Group)
def config() -> None:
    """Check experiment files."""


@config.command()
@request_options
@click.pass_context
def check(context: click.Context, request: Request) -> None:
    """Check an experiment file without submitting it.

    Each problem is printed as one line on stderr; the exit code is then 2. CONTEXT_DIR is the folder of the code, as
    for `hpc-det experiment create`.

    \b
    Example:
      hpc-det config check digits.yaml --cluster slurm
      digits.yaml: valid: 1 trial of 2 slots, 20 epochs at most, on cluster slurm
    """
    found, experiments = effective(request), store()
    say_notes(found)
    submission = prepare(found, experiments.folder(experiments.next_id()))  # raises the errors that `create` would
    click.echo(f"{context.params['config']}: valid: {in_a_line(found, submission.trials)}")


def in_a_line(found: Effective, trials: int) -> str:
    """Return the experiment in one line: number of trials, slots, length and cluster."""
    slots = found.experiment.resources.slots_per_trial
    size = f"{count(trials, 'trial')} of {count(slots, 'slot')}"
    lengths = [
        f"{length_in_words(amount, unit)} at most"
        for unit, amount in (found.tree["searcher"]["max_length"] or {}).items()
    ]
    return ", ".join([size, *lengths, f"on cluster {found.cluster.name}"])
