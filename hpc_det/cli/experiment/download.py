"""hpc-det experiment download and download-model-def, and how `checkpoint` and `trial` copy checkpoints."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import click

from hpc_det.cli.arguments import any_experiment_argument
from hpc_det.cli.output import at_once
from hpc_det.errors import UsageError
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from hpc_det.view.checkpoints import StoredCheckpoint, best_first, of_experiment, of_trial
from hpc_det.view.state import effective_config
from hpc_det.view.watch import say

output_dir = click.option(
    "-o",
    "--output-dir",
    "target",
    type=click.Path(path_type=Path),
    default="checkpoints",
    show_default=True,
    help="Where each checkpoint gets a folder, named by its uuid.",
)


@click.command()
@any_experiment_argument
@output_dir
@click.option("--best", is_flag=True, help="The best checkpoint; this is the default.")
@click.option("--top-n", type=click.IntRange(min=1), metavar="N", help="The best N.")
@click.option("--sort-by", metavar="METRIC", help="What decides; by default the searcher's metric.")
@click.option("--smaller-is-better/--greater-is-better", default=None, help="By default as the searcher says.")
def download(
    experiment: ExperimentFolder,
    target: Path,
    best: bool,
    top_n: int | None,
    sort_by: str | None,
    smaller_is_better: bool | None,
) -> None:
    """Copy the best checkpoints of an experiment, and print their folders.

    Every byte is compared with the checksums of the manifest, and nothing is overwritten. Where checkpoints lie in an
    object store, they come from there.

    \b
    Example:
      hpc-det experiment download 12 --top-n 2 -o best
    """
    if best and top_n is not None:
        raise click.UsageError("--best: --top-n was given, too; give one of them")
    copy(best_of_experiment(experiment, top_n or 1, sort_by, smaller_is_better), target)


@click.command("download-model-def")
@any_experiment_argument
@click.option(
    "-o",
    "--output-dir",
    "target",
    type=click.Path(path_type=Path),
    help="The new folder; by default experiment-ID-model-def.",
)
def download_model_def(experiment: ExperimentFolder, target: Path | None) -> None:
    """Copy the code of an experiment as it was submitted, and print the folder.

    \b
    Example:
      hpc-det experiment download-model-def 12 -o code-of-12
    """
    click.echo(copy_model_def(experiment, target))


def copy(checkpoints: Sequence[StoredCheckpoint], output: Path) -> None:
    """Each into a folder of `output` that is named by its uuid. Raises HpcDetError for those that are damaged."""

    def copied(item: StoredCheckpoint) -> None:
        target = output / item.uuid
        _insist_on_room(target)
        for problem in item.storage.copy(item.checkpoint, target):
            say(f"warning: {problem}")
        click.echo(target)

    output.mkdir(parents=True, exist_ok=True)
    at_once(checkpoints, copied)


def best_of_experiment(
    experiment: ExperimentFolder, count: int, metric: str | None, smaller_is_better: bool | None
) -> list[StoredCheckpoint]:
    """The best `count` by `metric`; None: by the searcher's. Raises UsageError where no checkpoint has it."""
    config = effective_config(experiment)
    return _best(of_experiment(experiment, config), config["searcher"], count, metric, smaller_is_better)


def of_one_trial(trial: TrialFolder, uuid: str | None, *, best: bool) -> StoredCheckpoint:
    """The one that is named, or the best, or the latest."""
    config = effective_config(trial.experiment())
    found = of_trial(trial, config)
    name = f"trial {trial.experiment().id}/{trial.id}"
    if not found:
        raise UsageError(f"{name} has no checkpoint")
    if uuid is not None:
        named = [item for item in found if item.uuid.startswith(uuid)]
        if len(named) == 1:
            return named[0]
        listed = ", ".join(item.uuid for item in named or found)
        raise UsageError(f"--uuid {uuid}: {name} has {'several such' if named else 'no such'} checkpoint: {listed}")
    return _best(found, config["searcher"], 1, None, None)[0] if best else found[0]


def _best(
    found: Sequence[StoredCheckpoint],
    searcher: dict[str, object],
    count: int,
    metric: str | None,
    smaller_is_better: bool | None,
) -> list[StoredCheckpoint]:
    by = metric or str(searcher["metric"])
    if smaller_is_better is None:
        if by != searcher["metric"]:
            raise UsageError(f"--sort-by {by}: say which is better, --smaller-is-better or --greater-is-better")
        smaller_is_better = bool(searcher["smaller_is_better"])
    whole = [item for item in found if not item.checkpoint.removed]
    if best := best_first(whole, by, smaller_is_better=smaller_is_better)[:count]:
        return best
    known = sorted({name for item in found for name in item.metrics if item.value(name) is not None})
    has = f"they have {', '.join(known)}" if known else "none was validated at the batches of a checkpoint"
    raise UsageError(f"no checkpoint has a validation with {by!r}: {has}")


def copy_model_def(experiment: ExperimentFolder, output: Path | None) -> Path:
    """A copy of the submitted code; the folder."""
    if experiment.code.is_symlink():
        raise UsageError(
            f"experiment {experiment.id} is a sweep of a Hydra app: its code is {experiment.code.resolve()} itself, "
            f"of which no copy was made"
        )
    target = output or Path(f"experiment-{experiment.id}-model-def")
    _insist_on_room(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".partial-{target.name}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        shutil.copytree(experiment.submitted_code(), partial, copy_function=shutil.copyfile)
        os.rename(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _insist_on_room(target: Path) -> None:
    if os.path.lexists(target):
        raise UsageError(f"{target}: is there already; move it away, or name another folder with --output-dir")
