"""hpc-det checkpoint: checkpoints by their uuids."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpc_det.cli.confirm import yes_option
from hpc_det.cli.experiment.keep import output_dir
from hpc_det.cli.groups import Group
from hpc_det.cli.ids import store
from hpc_det.cli.output import Output, output_options, show
from hpc_det.cli.several import at_once

if TYPE_CHECKING:
    from hpc_det.view.checkpoints import StoredCheckpoint


def stored_checkpoints(text: str) -> list[StoredCheckpoint]:
    """Checkpoints by their uuids, or the beginnings of these, with commas between; each once."""
    from hpc_det.view.checkpoints import find

    found = at_once(list(dict.fromkeys(text.split(","))), lambda uuid: find(store(), uuid))
    return list({item.uuid: item for item in found}.values())


checkpoints_argument = click.argument("checkpoints", metavar="UUID[,UUID...]", type=stored_checkpoints)


@click.group(cls=Group)
def checkpoint() -> None:
    """Look at checkpoints, copy and remove them.

    Of a uuid the first characters will do, four or more.
    """


@checkpoint.command()
@checkpoints_argument
@click.option("--verify", is_flag=True, help="Read every byte; exit code 1 where one differs from the manifest.")
@output_options
def describe(checkpoints: list[StoredCheckpoint], verify: bool, output: Output) -> None:
    """Describe checkpoints: whose they are, where they lie, and what was validated.

    \b
    Example:
      hpc-det checkpoint describe 1f0c --json
      {"uuid": "1f0c...", "experiment": 12, "trial": 7, "batches": 400,
       "state": "COMPLETED", "time": "2026-11-20T10:05:00+01:00",
       "size_bytes": 52117, "places": ["/home/me/hpc_det/experiments/..."],
       "validation": {"accuracy": 0.96}, "hyperparameters": {"lr": 0.01},
       "files": [{"name": "state_dict.pth", "size_bytes": 40960}, ...],
       "removed": [], "damage": null}
    `validation` is null where there was none at these batches; `removed` names files that `checkpoint rm --glob` took.
    """
    from hpc_det.cli.checkpoint_records import described, in_words, insist_on_whole

    records = [described(item, verify=verify) for item in checkpoints]
    if output.is_for_people:
        show("\n\n".join(in_words(record) for record in records))
    else:
        output.details(records)
    insist_on_whole(records)


@checkpoint.command()
@checkpoints_argument
@output_dir
def download(checkpoints: list[StoredCheckpoint], target: Path) -> None:
    """Copy checkpoints, and print their folders.

    Every byte is compared with the checksums of the manifest, and nothing is overwritten.

    \b
    Example:
      hpc-det checkpoint download 1f0c -o best
    """
    from hpc_det.cli.download import download as copy

    copy(checkpoints, target)


@checkpoint.command()
@checkpoints_argument
@click.option("--glob", "pattern", metavar="PATTERN", help="Only the files whose names match; * matches /, too.")
@yes_option
def rm(checkpoints: list[StoredCheckpoint], pattern: str | None, yes: bool) -> None:
    """Remove checkpoints of experiments that have ended, wherever they lie.

    With --glob the rest stays, for you to load: no trial goes on from such a checkpoint any more.

    \b
    Example:
      hpc-det checkpoint rm 1f0c --yes
    """
    from hpc_det.cli.remove_checkpoints import remove

    remove(checkpoints, pattern, yes=yes)
