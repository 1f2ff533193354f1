"""hpc-det checkpoint rm."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

import click

from hpc_det.cli.confirm import confirm
from hpc_det.cli.ids import insist_on_own
from hpc_det.cli.several import at_once
from hpc_det.errors import UsageError
from hpc_det.view.checkpoints import StoredCheckpoint
from hpc_det.view.ended import beginning_with, insist_on_end
from hpc_det.view.formatting import count, size
from hpc_det.view.watch import say


def remove(checkpoints: Sequence[StoredCheckpoint], pattern: str | None, *, yes: bool) -> None:
    """All, or only the files that match `pattern`. Raises UsageError, and removes nothing, where one experiment is
    somebody else's, has not ended or has no such file.
    """
    experiments = at_once(list(dict.fromkeys(item.trial.experiment() for item in checkpoints)), insist_on_own)
    insist_on_end(experiments)
    for warning in beginning_with([item.checkpoint.path for item in checkpoints], experiments[0].root()):
        say(f"warning: {warning}")
    if pattern is None:
        _remove_whole(checkpoints, yes=yes)
    else:
        _remove_files(checkpoints, pattern, yes=yes)


def _remove_whole(checkpoints: Sequence[StoredCheckpoint], *, yes: bool) -> None:
    total = size(sum(item.checkpoint.size_bytes for item in checkpoints))
    confirm(f"Remove {count(len(checkpoints), 'checkpoint')} ({total}) for good?", yes=yes)
    for item in checkpoints:
        item.storage.remove(item.uuid)
        click.echo(f"Removed checkpoint {item.uuid}")


def _remove_files(checkpoints: Sequence[StoredCheckpoint], pattern: str, *, yes: bool) -> None:
    matching = {item.uuid: fnmatch.filter(item.checkpoint.files, pattern) for item in checkpoints}
    problems = [
        f"--glob {pattern}: checkpoint {item.uuid} has no such file; it has {', '.join(sorted(item.checkpoint.files))}"
        for item in checkpoints
        if not matching[item.uuid]
    ]
    if problems:
        raise UsageError(problems)
    names = [f"{uuid}/{name}" for uuid, matched in matching.items() for name in matched]
    click.echo("\n".join(names))
    confirm(f"Remove {count(len(names), 'file')} for good? No trial goes on from what is left.", yes=yes)
    for item in checkpoints:
        item.storage.remove_files(item.checkpoint, matching[item.uuid])
        click.echo(f"Removed {count(len(matching[item.uuid]), 'file')} of checkpoint {item.uuid}")
