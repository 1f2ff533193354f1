"""hpc-det config: check experiment files without submitting them, and import those of Determined."""

from __future__ import annotations

from pathlib import Path

import click

from hpc_det.cli.arguments import request_options
from hpc_det.cli.commands import Group
from hpc_det.cli.output import write_file
from hpc_det.client.creation import say_notes
from hpc_det.client.lookup import store
from hpc_det.config.plain_yaml import dump_yaml, parse_map, read_text
from hpc_det.config.request import Request
from hpc_det.errors import count, length_in_words, say
from hpc_det.plan.effective import Effective, effective
from hpc_det.submit.submission import prepare


@click.group(cls=Group)
def config() -> None:
    """Check experiment files, and import those of Determined."""


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


@config.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write the result to this file.")
def import_(file: Path, output: Path | None) -> None:
    """Rewrite a stored configuration of Determined as an experiment file of hpc_det.

    FILE is what `det experiment config ID` prints, or any other experiment file of Determined. The result contains
    what differs from the defaults. The keys that were left out, and why, are listed on stderr.

    \b
    Example:
      hpc-det config import stored.yaml -o digits.yaml
    """
    from hpc_det.config.determined_stored import OURS, imported

    found = imported(parse_map(read_text(file), str(file)), str(file))
    text = dump_yaml(found.tree)
    if output is None:
        click.echo(text, nl=False)
    else:
        write_file(output, text)
    for key, new in found.renamed.items():
        say(f"note: {key}: now part of {new}")
    for key, why in found.dropped.items():
        say(f"note: {key}: dropped: {why}")
    for key in found.escaped:
        say(f"note: {key}: ${{ is now \\${{: in Determined it is text, and here an interpolation")
    if found.defaults:
        known = [f"{key} ({OURS[key]})" if key in OURS else key for key in found.defaults]
        say(f"note: dropped with their default values: {', '.join(known)}")


def in_a_line(found: Effective, trials: int) -> str:
    """Return the experiment in one line: number of trials, slots, length and cluster."""
    slots = found.experiment.resources.slots_per_trial
    size = f"{count(trials, 'trial')} of {count(slots, 'slot')}"
    lengths = [
        f"{length_in_words(amount, unit)} at most"
        for unit, amount in (found.tree["searcher"]["max_length"] or {}).items()
    ]
    return ", ".join([size, *lengths, f"on cluster {found.cluster.name}"])
