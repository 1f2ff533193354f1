"""hpc-det experiment: what stays of experiments, here and elsewhere."""

from __future__ import annotations

from pathlib import Path

import click

from hpc_det.cli.confirm import yes_option
from hpc_det.cli.experiment.group import experiment
from hpc_det.cli.ids import any_experiment_argument, experiments_argument, store
from hpc_det.cli.output import Output, output_options, show
from hpc_det.store.folders import ExperimentFolder

output_dir = click.option(
    "-o",
    "--output-dir",
    "target",
    type=click.Path(path_type=Path),
    default="checkpoints",
    show_default=True,
    help="Where each checkpoint gets a folder, named by its uuid.",
)


@experiment.command("list-checkpoints")
@any_experiment_argument
@click.option("--best", type=click.IntRange(min=1), metavar="N", help="Only the best N, by the searcher's metric.")
@output_options
def list_checkpoints(experiment: ExperimentFolder, best: int | None, output: Output) -> None:
    """List the checkpoints of an experiment.

    The state is COMPLETED, PARTIALLY_DELETED (by `checkpoint rm --glob`), DAMAGED (files are missing or cut) or
    SET_ASIDE: it was damaged when a trial was to resume from it, and no longer counts; `trial describe` says why.

    \b
    Example:
      hpc-det experiment list-checkpoints 12 --best 3
    """
    from hpc_det.cli.checkpoint_records import COLUMNS, KEYS, listed

    output.table(listed(experiment, best), COLUMNS, KEYS)


@experiment.command()
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
    from hpc_det.cli.download import best_of_experiment
    from hpc_det.cli.download import download as copy

    if best and top_n is not None:
        raise click.UsageError("--best: --top-n was given, too; give one of them")
    copy(best_of_experiment(experiment, top_n or 1, sort_by, smaller_is_better), target)


@experiment.command("download-model-def")
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
    from hpc_det.cli.download import download_model_def

    click.echo(download_model_def(experiment, target))


@experiment.command()
@experiments_argument
@yes_option
def delete(experiments: list[ExperimentFolder], yes: bool) -> None:
    """Delete experiments that have ended, with their checkpoints, wherever these lie.

    Numbers of experiments do not come again.

    \b
    Example:
      hpc-det experiment delete 12 --yes
    """
    from hpc_det.cli.delete import delete

    delete(experiments, yes=yes)


@experiment.command("delete-tb-files")
@experiments_argument
@yes_option
def delete_tb_files(experiments: list[ExperimentFolder], yes: bool) -> None:
    """Delete the TensorBoard files of experiments that have ended, profiler traces too.

    \b
    Example:
      hpc-det experiment delete-tb-files 12 --yes
    """
    from hpc_det.cli.tensorboard_files import delete_files

    delete_files(experiments, yes=yes)


@experiment.command()
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
def cleanup(dry_run: bool) -> None:
    """Delete logs that are older than their experiment's `retention_policy` says; fit for cron.

    The logs of an experiment that has ended go so many days after its end. `experiment create` does the same once a
    day. What was left of an `experiment delete` that was killed goes, too.

    \b
    Example:
      hpc-det experiment cleanup --dry-run
    """
    from hpc_det.cli.cleanup import cleanup

    for line in cleanup(store(), dry_run=dry_run):
        show(line)
