"""hpc-det experiment delete-tb-files."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from hpc_det.cli.confirm import confirm
from hpc_det.cli.several import at_once, each
from hpc_det.errors import UsageError
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.formatting import count, size
from hpc_det.view.state import ExperimentView
from hpc_det.view.watch import state


def delete_files(experiments: Sequence[ExperimentFolder], *, yes: bool) -> None:
    """Raises UsageError where one has not ended: its ranks write these files."""
    at_once(experiments, _insist_on_end)
    total = sum(file.stat().st_size for experiment in experiments for file in _files(experiment))
    confirm(
        f"Delete the TensorBoard files of {count(len(experiments), 'experiment')} ({size(total)}) for good?", yes=yes
    )
    each(experiments, _delete)


def _insist_on_end(experiment: ExperimentFolder) -> None:
    if not (found := state(ExperimentView(experiment))).is_final:
        raise UsageError(
            f"experiment {experiment.id} is {found.value}, and its ranks write TensorBoard files; wait for its end, or "
            f"end it with `hpc-det experiment kill {experiment.id}`"
        )


def _files(experiment: ExperimentFolder) -> list[Path]:
    return [file for trial in experiment.trials() for file in trial.tensorboard.rglob("*") if file.is_file()]


def _delete(experiment: ExperimentFolder) -> str:
    number = len(_files(experiment))
    for trial in experiment.trials():
        shutil.rmtree(trial.tensorboard, ignore_errors=True)
    return f"Deleted {count(number, 'TensorBoard file')} of experiment {experiment.id}"
