"""hpc-det checkpoint: describe, copy and remove checkpoints by UUID."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from hpc_det.checkpoint.metadata import all_metadata
from hpc_det.checkpoint.storage import is_here
from hpc_det.cli.commands import Group
from hpc_det.cli.experiment.download import copy, output_dir
from hpc_det.cli.output import Output, Record, at_once, confirm, output_options, show_description, yes_option
from hpc_det.client.checkpoint import insist_on_removable
from hpc_det.client.lookup import store
from hpc_det.errors import HpcDetError, UsageError, count, say
from hpc_det.view.checkpoints import StoredCheckpoint, find
from hpc_det.view.formatting import NONE, iso, labelled, settings, size, values_in_words
from hpc_det.view.trial_history import read_tolerantly


def stored_checkpoints(text: str) -> list[StoredCheckpoint]:
    """Return checkpoints by comma-separated UUIDs or UUID prefixes, each once."""
    found = at_once(list(dict.fromkeys(text.split(","))), lambda uuid: find(store(), uuid))
    # keyed by UUID: two prefixes may name the same checkpoint
    return list({item.uuid: item for item in found}.values())


checkpoints_argument = click.argument("checkpoints", metavar="UUID[,UUID...]", type=stored_checkpoints)


@click.group(cls=Group)
def checkpoint() -> None:
    """Describe, copy and remove checkpoints.

    A UUID may be shortened to its first four or more characters.
    """


@checkpoint.command()
@checkpoints_argument
@click.option("--verify", is_flag=True, help="Compare every byte with the manifest; exit code 1 on a difference.")
@output_options
def describe(checkpoints: list[StoredCheckpoint], verify: bool, output: Output) -> None:
    """Describe checkpoints: trial, location, validation metrics and files.

    \b
    Example:
      hpc-det checkpoint describe 1f0c --json
      {"uuid": "1f0c...", "experiment": 12, "trial": 7, "batches": 400,
       "state": "COMPLETED", "time": "2026-11-20T10:05:00+01:00",
       "size_bytes": 52117, "places": ["/home/me/hpc_det/experiments/..."],
       "validation": {"accuracy": 0.96}, "hyperparameters": {"lr": 0.01},
       "metadata": {"steps_completed": 400},
       "files": [{"name": "state_dict.pth", "size_bytes": 40960}, ...],
       "removed": [], "damage": null}
    `validation` is null if the trial was not validated at this batch; `metadata`
    includes the keys that were added from Python; `removed` lists the files that
    `checkpoint rm --glob` deleted.
    """
    records = [described(item, verify=verify) for item in checkpoints]
    if output.is_for_people:
        show_description("\n\n".join(in_words(record) for record in records))
    else:
        output.details(records)
    insist_on_whole(records)


@checkpoint.command()
@checkpoints_argument
@output_dir
def download(checkpoints: list[StoredCheckpoint], target: Path) -> None:
    """Copy checkpoints and print their folders.

    Every byte is verified against the checksums in the manifest, and existing files are never overwritten.

    \b
    Example:
      hpc-det checkpoint download 1f0c -o best
    """
    copy(checkpoints, target)


@checkpoint.command()
@checkpoints_argument
@click.option("--glob", "pattern", metavar="PATTERN", help="Remove only files whose names match; * also matches /.")
@yes_option
def rm(checkpoints: list[StoredCheckpoint], pattern: str | None, yes: bool) -> None:
    """Remove checkpoints of finished experiments, wherever they are stored.

    With --glob, the other files stay for you to load, but no trial can resume from such a checkpoint.

    \b
    Example:
      hpc-det checkpoint rm 1f0c --yes
    """
    for warning in insist_on_removable(checkpoints):
        say(f"warning: {warning}")
    if pattern is None:
        _remove_whole(checkpoints, yes=yes)
    else:
        _remove_files(checkpoints, pattern, yes=yes)


def described(item: StoredCheckpoint, *, verify: bool) -> dict[str, Any]:
    """Return the record that `checkpoint describe --json` prints; `verify` reads every byte to fill in `damage`."""
    checkpoint = item.checkpoint
    spec = read_tolerantly(item.trial.trial) or {}
    return {
        "uuid": item.uuid,
        "experiment": item.trial.experiment().id,
        "trial": item.trial.id,
        "batches": checkpoint.steps,
        "state": item.state,
        "time": iso(checkpoint.time),
        "size_bytes": checkpoint.size_bytes,
        "places": [item.set_aside.place] if item.set_aside else item.storage.places(item.uuid),
        "validation": item.metrics or None,
        "hyperparameters": spec.get("hparams"),
        "metadata": all_metadata(item.trial, checkpoint),
        "files": [{"name": name, "size_bytes": entry.size} for name, entry in sorted(checkpoint.whole.files.items())],
        "removed": sorted(checkpoint.removed),
        "damage": _damage(item) if verify else None,
    }


def insist_on_whole(records: Sequence[Record]) -> None:
    """Raise HpcDetError if the verification found a damaged checkpoint."""
    problems = [
        f"checkpoint {record['uuid']}: damaged: {problem}" for record in records for problem in record["damage"] or []
    ]
    if problems:
        raise HpcDetError(problems)


def _damage(item: StoredCheckpoint) -> list[str]:
    """Return what is damaged in a checkpoint; raise HpcDetError if it exists only in an object store."""
    if item.set_aside:  # its problems were recorded when a trial tried to resume from it
        return item.set_aside.problems
    if not is_here(item.checkpoint.path):
        raise HpcDetError(
            f"checkpoint {item.uuid}: exists only in {', '.join(item.storage.places(item.uuid))}; "
            f"`hpc-det checkpoint download {item.uuid}` verifies it while copying"
        )
    return [*item.checkpoint.damage(), *item.checkpoint.code_damage()]


def in_words(record: Record) -> str:
    """Return the record as text for people."""
    files = [f"  {size(file['size_bytes']):>10}  {file['name']}" for file in record["files"]]
    rows = {
        "Trial": f"{record['experiment']}/{record['trial']}",
        "Batches": str(record["batches"]),
        "State": record["state"],
        "Saved": record["time"],
        "Size": size(record["size_bytes"]),
        "Validation": values_in_words(record["validation"] or {}) or "none at these batches",
        "Hparams": NONE if record["hyperparameters"] is None else settings(record["hyperparameters"]),
        "Metadata": settings(record["metadata"]) or NONE,
        "Place": ", ".join(record["places"]),
        **({"Removed": ", ".join(record["removed"])} if record["removed"] else {}),
        **({} if record["damage"] is None else {"Damage": "; ".join(record["damage"]) or "none"}),
    }
    return "\n".join([f"Checkpoint {record['uuid']}", *labelled(rows), "  Files:", *files])


def _remove_whole(checkpoints: Sequence[StoredCheckpoint], *, yes: bool) -> None:
    total = size(sum(item.checkpoint.size_bytes for item in checkpoints))
    confirm(f"Remove {count(len(checkpoints), 'checkpoint')} ({total}) for good?", yes=yes)
    for item in checkpoints:
        item.storage.remove(item.uuid)
        click.echo(f"Removed checkpoint {item.uuid}")


def _remove_files(checkpoints: Sequence[StoredCheckpoint], pattern: str, *, yes: bool) -> None:
    matching = {item.uuid: fnmatch.filter(item.checkpoint.whole.files, pattern) for item in checkpoints}
    problems = [
        f"--glob {pattern}: checkpoint {item.uuid} has no matching file; its files: "
        f"{', '.join(sorted(item.checkpoint.whole.files))}"
        for item in checkpoints
        if not matching[item.uuid]
    ]
    if problems:
        raise UsageError(problems)
    names = [f"{uuid}/{name}" for uuid, matched in matching.items() for name in matched]
    click.echo("\n".join(names))
    confirm(f"Remove {count(len(names), 'file')} for good? No trial can resume from the remaining files.", yes=yes)
    for item in checkpoints:
        item.storage.remove_files(item.checkpoint, matching[item.uuid])
        click.echo(f"Removed {count(len(matching[item.uuid]), 'file')} of checkpoint {item.uuid}")
