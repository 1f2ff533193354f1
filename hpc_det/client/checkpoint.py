"""A checkpoint of a trial: its files, metrics and metadata, and how to copy, load and delete it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_det.checkpoint import metadata
from hpc_det.checkpoint.committed import LOAD_DATA
from hpc_det.checkpoint.storage import is_here
from hpc_det.client.creation import private_files
from hpc_det.client.lookup import insist_on_own
from hpc_det.errors import HpcDetError, UsageError, count, say
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.checkpoints import StoredCheckpoint
from hpc_det.view.watch import beginning_with, insist_on_end

if TYPE_CHECKING:
    from hpc_det.pytorch import PyTorchTrial


class Checkpoint:
    """A committed checkpoint. Its files never change, but it can be deleted, and metadata can be added to it.

    Checkpoints are equal if they are in the same place.
    """

    def __init__(self, stored: StoredCheckpoint) -> None:
        self._stored = stored

    def __repr__(self) -> str:
        trial = self._stored.trial
        return f"<Checkpoint {self.uuid} of trial {trial.experiment().id}/{trial.id} at {count(self.steps, 'batch')}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Checkpoint) and self._stored.checkpoint.path == other._stored.checkpoint.path

    def __hash__(self) -> int:
        return hash(self._stored.checkpoint.path)

    @property
    def uuid(self) -> str:
        return self._stored.uuid

    @property
    def experiment_id(self) -> int:
        return self._stored.trial.experiment().id

    @property
    def trial_id(self) -> int:
        return self._stored.trial.id

    @property
    def steps(self) -> int:
        """Number of batches trained."""
        return self._stored.checkpoint.steps

    @property
    def time(self) -> float:
        """Time of the commit, in seconds since the epoch."""
        return self._stored.checkpoint.time

    @property
    def state(self) -> str:
        """COMPLETED, PARTIALLY_DELETED, SET_ASIDE or DAMAGED, as in `hpc-det experiment list-checkpoints`."""
        return self._stored.state

    @property
    def metrics(self) -> dict[str, Any]:
        """Metrics of the validation at the same number of batches; empty if there was none."""
        return dict(self._stored.metrics)

    @property
    def files(self) -> dict[str, int]:
        """Size in bytes of each file, by its name relative to `path`."""
        return {name: entry.size for name, entry in sorted(self._stored.checkpoint.whole.files.items())}

    @property
    def path(self) -> Path:
        """The folder of the checkpoint, which must not be changed.

        Raises HpcDetError if it exists only in an object store, or was deleted.
        """
        if self._stored.set_aside:
            return Path(self._stored.set_aside.place)
        if not is_here(folder := self._stored.checkpoint.path):
            places = ", ".join(self._stored.storage.places(self.uuid))
            raise HpcDetError(
                f"checkpoint {self.uuid}: exists only in {places}; copy it with Checkpoint.download"
                if places
                else f"checkpoint {self.uuid}: {folder} does not exist; the checkpoint was deleted"
            )
        return folder

    @property
    def metadata(self) -> dict[str, Any]:
        """What the trial has saved, such as `steps_completed`, and the keys that were added with `add_metadata`."""
        return metadata.all_metadata(self._stored.trial, self._stored.checkpoint)

    def add_metadata(self, added: Mapping[str, Any]) -> None:
        """Add keys to the metadata, or replace values that were added before. The values must be JSON.

        Raises UsageError for another user's checkpoint, and for keys that the trial has saved.
        """
        insist_on_own(self._experiment)
        with private_files():
            metadata.add_metadata(self._stored.trial, self._stored.checkpoint, added)

    def remove_metadata(self, keys: str | Iterable[str]) -> None:
        """Remove keys that were added with `add_metadata`; keys may be missing. Raises UsageError as `add_metadata`."""
        insist_on_own(self._experiment)
        with private_files():
            named = [keys] if isinstance(keys, str) else keys
            metadata.remove_metadata(self._stored.trial, self._stored.checkpoint, named)

    def load(self, **options: Any) -> PyTorchTrial:
        """Return the trained trial, loaded by `hpc_det.pytorch.load_trial_from_checkpoint_path` with these options.

        Imports torch. Raises UsageError if the checkpoint was not saved by a PyTorchTrial.
        """
        if LOAD_DATA not in self._stored.checkpoint.files:
            raise UsageError(
                f"checkpoint {self.uuid}: was not saved by a trial class, so it cannot be loaded as one; read its "
                f"files in {self.path} yourself: {', '.join(self.files) or 'it has none'}"
            )
        from hpc_det.pytorch import load_trial_from_checkpoint_path

        return load_trial_from_checkpoint_path(self.path, **options)

    def download(self, target: str | os.PathLike[str]) -> Path:
        """Copy the checkpoint to the new folder `target`, from an object store if necessary, and return it.

        Every byte is verified. Raises UsageError if `target` exists, and HpcDetError if the checkpoint is damaged.
        """
        folder = Path(target)
        folder.parent.mkdir(parents=True, exist_ok=True)
        return copied_to(self._stored, folder)

    def delete(self) -> None:
        """Delete the checkpoint wherever it is stored. Raises UsageError if its experiment has not ended."""
        for warning in insist_on_removable([self._stored]):
            say(f"warning: {warning}")
        self._stored.storage.remove(self.uuid)

    @property
    def _experiment(self) -> ExperimentFolder:
        return self._stored.trial.experiment()


def copied_to(item: StoredCheckpoint, target: Path, option: str = "") -> Path:
    """Copy a checkpoint to `target`, return that, and print damage of its code on stderr.

    `option`: the command-line option for the folder, for messages. Raises UsageError if `target` exists, HpcDetError if
    the checkpoint is damaged.
    """
    insist_on_room(target, option)
    for problem in item.storage.copy(item.checkpoint, target):
        say(f"warning: {problem}")
    return target


def insist_on_room(target: Path, option: str = "") -> None:
    """Raise UsageError if `target` exists; `option` as for `copied_to`."""
    if os.path.lexists(target):
        other = f"another folder with {option}" if option else "another folder"
        raise UsageError(f"{target}: already exists; move it away, or choose {other}")


def insist_on_removable(checkpoints: Sequence[StoredCheckpoint]) -> list[str]:
    """Return a warning for each experiment that starts from one of the checkpoints.

    Raises UsageError if one of their experiments has not ended, or belongs to another user.
    """
    experiments = list(dict.fromkeys(item.trial.experiment() for item in checkpoints))
    for experiment in experiments:
        insist_on_own(experiment)
    insist_on_end(experiments)
    return beginning_with([item.checkpoint.path for item in checkpoints], experiments[0].root())
