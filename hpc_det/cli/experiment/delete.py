"""hpc-det experiment delete and delete-tb-files, and the completion of deletions that were killed."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

import click

from hpc_det.checkpoint.committed import committed
from hpc_det.checkpoint.object_store import Remote, options
from hpc_det.checkpoint.storage import answering
from hpc_det.cli.arguments import experiments_argument
from hpc_det.cli.output import at_once, confirm, each, yes_option
from hpc_det.client.stopping import withdraw_jobs_left
from hpc_det.errors import HpcDetError, count, say
from hpc_det.node.json_files import read_json
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.local_run import kind_of_run, run_of_driver
from hpc_det.store.run_folder import remove_run
from hpc_det.view.formatting import size
from hpc_det.view.watch import beginning_with, insist_on_end


@click.command()
@experiments_argument
@yes_option
def delete(experiments: list[ExperimentFolder], yes: bool) -> None:
    """Delete finished experiments and their checkpoints, wherever these are stored.

    The IDs of deleted experiments are not used again.

    \b
    Example:
      hpc-det experiment delete 12 --yes
    """
    insist_on_end(experiments)
    root = experiments[0].root()
    for warning in beginning_with([experiment.path for experiment in experiments], root):
        say(f"warning: {warning}")
    numbers = ", ".join(str(experiment.id) for experiment in experiments)
    trials = [trial for experiment in experiments for trial in experiment.trials()]
    sizes = [checkpoint.size_bytes for trial in trials for checkpoint in committed(trial.checkpoints)]
    has = f"{count(len(sizes), 'checkpoint')} ({size(sum(sizes))})"
    confirm(f"Delete experiment {numbers} with {has} for good?", yes=yes)
    each(experiments, delete_one)
    try:
        finish_deletions(ExperimentStore(root))
    except HpcDetError as error:  # concerns earlier deletions: those of this command have succeeded
        say(f"note: {error}")


def delete_one(experiment: ExperimentFolder) -> str:
    """Delete an experiment of which nothing runs any more, and return a sentence for the user."""
    withdraw_jobs_left(experiment)
    aside = ExperimentStore(experiment.root()).deleted(experiment.id)
    os.rename(experiment.path, aside)  # atomic: a deletion that is killed leaves no half-deleted experiment in sight
    _empty(aside, experiment.id)
    return f"Deleted experiment {experiment.id}"


def finish_deletions(store: ExperimentStore) -> None:
    """Complete the deletions that were killed.

    Raises HpcDetError with all object stores that do not answer, after all other deletions have been completed.
    """
    left = store.all_deleted()

    def finish(aside: Path) -> None:
        with suppress(FileNotFoundError):  # another process is deleting the same folder
            if any(aside.iterdir()):
                _empty(aside, int(aside.name.rpartition("-")[2]))
            if aside != left[-1]:  # the newest folder stays, empty, so that no ID up to its own is used again
                aside.rmdir()

    at_once(left, finish)


def _empty(aside: Path, number: int) -> None:
    """Delete all files of a folder that was set aside for deletion, and the experiment's files stored elsewhere.

    Raises HpcDetError if an object store does not answer.
    """
    folder = ExperimentFolder(aside)
    if elsewhere := folder.checkpoints_elsewhere():
        _remove(elsewhere)
    if run := run_of_driver(folder):
        remove_run(run, number, kind_of_run(folder))
    if url := folder.checkpoints_url():
        _empty_store(url, folder, number)
    # deleted last: these files contain where other files are stored, which a repeated deletion needs
    places = (folder.storage, folder.effective, folder.local_run)
    for entry in sorted(aside.iterdir(), key=places.__contains__):
        _remove(entry)


def _empty_store(url: str, folder: ExperimentFolder, number: int) -> None:
    """Delete the experiment's checkpoints in the object store; raise HpcDetError if it does not answer."""
    config = read_json(folder.effective) or {"checkpoint_storage": {}}
    try:
        remote = Remote(url, options(config["checkpoint_storage"]))
        with answering(remote):
            remote.remove_all()
    except HpcDetError as error:
        raise HpcDetError(
            [
                *error.problems,
                f"experiment {number} is deleted except for {url}; `hpc-det experiment cleanup` tries again",
            ]
        ) from None


def _remove(entry: Path) -> None:
    """Remove a file or folder, even while another process removes files from it."""
    while os.path.lexists(entry):  # `rmtree` stops at a file that another process has removed, so it is repeated
        with suppress(FileNotFoundError):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()


@click.command("delete-tb-files")
@experiments_argument
@yes_option
def delete_tb_files(experiments: list[ExperimentFolder], yes: bool) -> None:
    """Delete the TensorBoard files of finished experiments, including profiler traces.

    \b
    Example:
      hpc-det experiment delete-tb-files 12 --yes
    """
    insist_on_end(experiments)
    total = sum(file.stat().st_size for experiment in experiments for file in _files(experiment))
    confirm(
        f"Delete the TensorBoard files of {count(len(experiments), 'experiment')} ({size(total)}) for good?", yes=yes
    )
    each(experiments, _delete)


def _files(experiment: ExperimentFolder) -> list[Path]:
    return [file for trial in experiment.trials() for file in trial.tensorboard.rglob("*") if file.is_file()]


def _delete(experiment: ExperimentFolder) -> str:
    number = len(_files(experiment))
    for trial in experiment.trials():
        shutil.rmtree(trial.tensorboard, ignore_errors=True)
    return f"Deleted {count(number, 'TensorBoard file')} of experiment {experiment.id}"
