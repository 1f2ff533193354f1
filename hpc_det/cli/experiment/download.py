"""hpc-det experiment download and download-model-def, and the copying of checkpoints for `checkpoint` and `trial`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click

from hpc_det.cli.arguments import any_experiment_argument
from hpc_det.cli.output import at_once
from hpc_det.errors import UsageError
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.checkpoints import StoredCheckpoint, best_of_experiment
from hpc_det.view.watch import say

output_dir = click.option(
    "-o",
    "--output-dir",
    "target",
    type=click.Path(path_type=Path),
    default="checkpoints",
    show_default=True,
    help="Folder for the copies; each checkpoint gets a subfolder named by its UUID.",
)


@click.command()
@any_experiment_argument
@output_dir
@click.option("--best", is_flag=True, help="Copy the best checkpoint (default).")
@click.option("--top-n", type=click.IntRange(min=1), metavar="N", help="Copy the best N checkpoints.")
@click.option("--sort-by", metavar="METRIC", help="Metric that determines the best; default: the searcher's.")
@click.option(
    "--smaller-is-better/--greater-is-better", default=None, help="Order of the metric; default: the searcher's."
)
def download(
    experiment: ExperimentFolder,
    target: Path,
    best: bool,
    top_n: int | None,
    sort_by: str | None,
    smaller_is_better: bool | None,
) -> None:
    """Copy the best checkpoints of an experiment and print their folders.

    Every byte is verified against the checksums in the manifest, and existing files are never overwritten. Checkpoints
    in an object store are copied from there.

    \b
    Example:
      hpc-det experiment download 12 --top-n 2 -o best
    """
    if best and top_n is not None:
        raise click.UsageError("--best: conflicts with --top-n; give one of them")
    copy(best_of_experiment(experiment, top_n or 1, sort_by, smaller_is_better), target)


@click.command("download-model-def")
@any_experiment_argument
@click.option(
    "-o",
    "--output-dir",
    "target",
    type=click.Path(path_type=Path),
    help="New folder for the code; default: experiment-ID-model-def.",
)
def download_model_def(experiment: ExperimentFolder, target: Path | None) -> None:
    """Copy the code of an experiment as it was submitted and print the folder.

    \b
    Example:
      hpc-det experiment download-model-def 12 -o code-of-12
    """
    click.echo(copy_model_def(experiment, target))


def copy(checkpoints: Sequence[StoredCheckpoint], output: Path) -> None:
    """Copy each checkpoint into a folder of `output` named by its UUID. Raises HpcDetError for damaged ones."""

    def copied(item: StoredCheckpoint) -> None:
        target = output / item.uuid
        _insist_on_room(target)
        for problem in item.storage.copy(item.checkpoint, target):
            say(f"warning: {problem}")
        click.echo(target)

    is_new = not output.exists()
    output.mkdir(parents=True, exist_ok=True)
    try:
        at_once(checkpoints, copied)
    finally:
        if is_new:
            with suppress(OSError):  # it is not empty
                output.rmdir()


def copy_model_def(experiment: ExperimentFolder, output: Path | None) -> Path:
    """Copy the submitted code and return the new folder. Raises UsageError if that exists."""
    if experiment.code.is_symlink():
        raise UsageError(
            f"experiment {experiment.id} is a sweep of a Hydra app: it uses the code in {experiment.code.resolve()} "
            f"directly and has no copy of it"
        )
    target = output or Path(f"experiment-{experiment.id}-model-def")
    _insist_on_room(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    # copied under another name first, so that `target` never exists incomplete
    partial = target.with_name(f".partial-{target.name}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        shutil.copytree(experiment.submitted_code(), partial, copy_function=shutil.copyfile)
        os.rename(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _insist_on_room(target: Path) -> None:
    """Raise UsageError if `target` exists."""
    if os.path.lexists(target):
        raise UsageError(f"{target}: already exists; move it away, or choose another folder with --output-dir")
