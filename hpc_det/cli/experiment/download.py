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
from hpc_det.client.checkpoint import copied_to, insist_on_room
from hpc_det.errors import UsageError
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from hpc_det.view.checkpoints import StoredCheckpoint, best_of_experiment, best_of_trial, of_trial
from hpc_det.view.state import effective_config

_OPTION = "--output-dir"
output_dir = click.option(
    "-o",
    _OPTION,
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
    copy(_best(experiment, top_n or 1, sort_by, smaller_is_better), target)


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

    def copy_one(item: StoredCheckpoint) -> None:
        click.echo(copied_to(item, output / item.uuid, _OPTION))

    is_new = not output.exists()
    output.mkdir(parents=True, exist_ok=True)
    try:
        at_once(checkpoints, copy_one)
    finally:
        if is_new:
            with suppress(OSError):  # it is not empty
                output.rmdir()


def _best(
    experiment: ExperimentFolder, count: int, metric: str | None, smaller_is_better: bool | None
) -> list[StoredCheckpoint]:
    """Return the best `count` checkpoints. Raises UsageError if there is none, or if the order is not known."""
    searchers = effective_config(experiment)["searcher"]["metric"]
    if metric and smaller_is_better is None and metric != searchers:
        raise UsageError(f"--sort-by {metric}: add --smaller-is-better or --greater-is-better")
    return _insist_on_some(best_of_experiment(experiment, metric, smaller_is_better), metric or searchers)[:count]


def _insist_on_some(found: list[StoredCheckpoint], metric: str) -> list[StoredCheckpoint]:
    if found:
        return found
    none = "none was validated at the batches of a checkpoint"
    raise UsageError(f"no checkpoint has a validation with {metric!r}: {none}")


def of_one_trial(trial: TrialFolder, uuid: str | None, *, best: bool) -> StoredCheckpoint:
    """Return the checkpoint whose UUID begins with `uuid`; if that is None, the best or the latest one.

    Raises UsageError if there is none, or if `uuid` is not unique.
    """
    config = effective_config(trial.experiment())
    found = of_trial(trial, config)
    name = f"trial {trial.experiment().id}/{trial.id}"
    if not found:
        raise UsageError(
            f"{name} has no checkpoint; `hpc-det experiment list-checkpoints {trial.experiment().named()}` lists those "
            f"of all trials"
        )
    if uuid is not None:
        named = [item for item in found if item.uuid.startswith(uuid)]
        if len(named) == 1:
            return named[0]
        listed = ", ".join(item.uuid for item in named or found)
        raise UsageError(f"--uuid {uuid}: {name} has {'several matches' if named else 'no match'}: {listed}")
    return _insist_on_some(best_of_trial(trial), config["searcher"]["metric"])[0] if best else found[0]


def copy_model_def(experiment: ExperimentFolder, output: Path | None) -> Path:
    """Copy the submitted code and return the new folder. Raises UsageError if that exists."""
    if experiment.copied_code() is None:
        raise UsageError(
            f"experiment {experiment.id} is a sweep of a Hydra app: it uses the code in {experiment.code.resolve()} "
            f"directly and has no copy of it"
        )
    target = output or Path(f"experiment-{experiment.id}-model-def")
    insist_on_room(target, _OPTION)
    target.parent.mkdir(parents=True, exist_ok=True)
    # copied under another name first, so that `target` never exists incomplete
    partial = target.with_name(f".partial-{target.name}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        _copy_tree(experiment.submitted_code(), partial)
        os.rename(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _copy_tree(source: Path, target: Path) -> None:
    """Copy a folder. Raises OSError for the first file that could not be copied, with the path of the copy."""
    failed: list[OSError] = []

    def copy_file(path: str, copied: str) -> None:
        try:
            shutil.copyfile(path, copied)
        except OSError as error:
            failed.append(OSError(error.errno, error.strerror, copied))
            raise

    try:
        shutil.copytree(source, target, copy_function=copy_file)
    except shutil.Error as error:  # its message is a list of all files
        raise (failed[0] if failed else error) from None
