"""The checkpoints of a trial in all places: in its folder and, if the experiment has one, in an object store.

Commands use this module to list, copy and delete checkpoints while no rank writes them; a running trial has a Mirror
instead. At the end of an experiment, `collect` deletes the checkpoints that its retention policy does not keep.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from hpc_det.checkpoint.committed import (
    FORMAT,
    MANIFEST,
    Committed,
    committed,
    committed_at,
    copy_whole,
    newest_first,
    outside,
)
from hpc_det.checkpoint.committed_folder import delete, in_words
from hpc_det.checkpoint.damaged import remove_damaged, repair_code
from hpc_det.checkpoint.object_store import Remote, remote_of
from hpc_det.checkpoint.reading import open_regular
from hpc_det.checkpoint.retention import Policy, TrialCheckpoints, policies, superfluous_of_all
from hpc_det.errors import HpcDetError
from hpc_det.node import disk
from hpc_det.node.files import write_atomic
from hpc_det.node.json_files import NewerFormat, Shape, checked, read_json
from hpc_det.search.journal import SearchJournal
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from hpc_det.store.metrics import validations


class TrialStorage:
    """The checkpoints of one trial, on disk and in the object store.

    All methods raise HpcDetError if there is a store and it does not answer.
    """

    def __init__(self, trial: TrialFolder, storage: Mapping[str, Any]) -> None:
        """`storage`: checkpoint_storage of the effective config. Raises UsageError if the store cannot be opened."""
        self.trial = trial
        self._remote = remote_of(trial, storage)

    def all(self) -> list[Committed]:
        """Return all checkpoints on disk and in the store, newest first."""
        stored: list[Committed] = []
        if self._remote:
            with answering(self._remote):
                stored = self._remote.stored(self.trial.checkpoints)
        here = {checkpoint.uuid: checkpoint for checkpoint in committed(self.trial.checkpoints)}
        return newest_first({**{checkpoint.uuid: checkpoint for checkpoint in stored}, **here}.values())

    def places(self, uuid: str) -> list[str]:
        """Return the folder of a checkpoint, if it is on disk, and its URL, if it is in the store."""
        folder = self.trial.checkpoints / uuid
        found = [str(folder)] if is_here(folder) else []
        if remote := self._store_with(uuid):
            found.append(f"{remote.url}/{uuid}")
        return found

    def remove(self, uuid: str) -> None:
        """Delete a checkpoint on disk and in the store, also if it was set aside as damaged. It may be missing."""
        if self._remote:  # first, because it may fail: then the checkpoint stays on disk, too
            with answering(self._remote):
                self._remote.remove(uuid)
        delete(self.trial.checkpoints / uuid, hidden=f".deleted-{uuid}")
        remove_damaged(self.trial.checkpoints, uuid)
        disk.unlink(self.trial.checkpoint_metadata(uuid), missing_ok=True)

    def remove_files(self, checkpoint: Committed, names: Sequence[str]) -> None:
        """Delete some files of a checkpoint. Raises HpcDetError for names that lead out of its folder."""
        if problems := outside(names):
            raise HpcDetError([f"checkpoint {checkpoint.uuid}: {problem}" for problem in problems])
        # The files of nodes move into the manifest, because several manifests cannot be replaced at once.
        left = {name: entry for name, entry in checkpoint.whole.files.items() if name not in names}
        rest = replace(checkpoint.whole, files=left, removed=(*checkpoint.removed, *names))
        if remote := self._store_with(rest.uuid):
            with answering(remote):
                remote.remove_files(rest, names)
        if is_here(rest.path):
            # the manifest first: after a kill, files that it does not name do no harm, but missing ones are damage
            write_atomic(rest.path / MANIFEST, FORMAT.text(rest.manifest))
            for name in names:
                disk.unlink(rest.path / name, missing_ok=True)

    def copy(self, checkpoint: Committed, target: Path) -> list[str]:
        """Copy a checkpoint to `target` from its folder, or from the store if it is missing or damaged there.

        Returns a sentence for each damaged file of its code. Raises HpcDetError with all problems of its state; then
        nothing is at `target`.
        """
        copied, damage = replace(checkpoint.whole, path=target), ["not in its folder"]
        if committed_at(checkpoint.path):
            damage = in_words(checkpoint.irregularities(checkpoint.path, is_code=False)) or copy_whole(
                copied, lambda name, to: _copy_file(checkpoint.path / name, to)
            )
        if damage and (remote := self._store_with(checkpoint.uuid)):
            with answering(remote):
                damage = remote.download(copied)
        if damage:
            trial = f"{self.trial.experiment().named()}/{self.trial.id}"
            others = f"`hpc-det trial list-checkpoints {trial}` lists others"
            raise HpcDetError([f"checkpoint {checkpoint.uuid}: damaged: {problem}; {others}" for problem in damage])
        experiment = self.trial.experiment()
        return repair_code(copied, [], [experiment.code_kept, experiment.code])

    def _store_with(self, uuid: str) -> Remote | None:
        """Return the store if it contains this checkpoint, otherwise None."""
        if self._remote is None:
            return None
        with answering(self._remote):
            return self._remote if self._remote.has(uuid) else None


def _copy_file(source: Path, target: Path) -> None:
    """Copy a file. Raises FileNotFoundError, for which copy_whole reports damage, if it cannot be opened."""
    try:
        file = open_regular(source)
    except OSError as error:
        raise FileNotFoundError(error.errno, error.strerror, str(source)) from None
    with file:
        disk.copy_content(file, target)


def clear_leftovers(trial: TrialFolder) -> None:
    """Delete what interrupted deletions left."""
    for leftover in trial.checkpoints.glob(".deleted-*"):
        disk.remove_tree(leftover)


def is_here(folder: Path) -> bool:
    """Return whether the checkpoint in `folder` has a manifest there."""
    return (folder / MANIFEST).exists()


@contextmanager
def answering(remote: Remote) -> Iterator[None]:
    """Raise HpcDetError for any exception of the store's library in this block."""
    try:
        yield
    except HpcDetError:
        raise
    except Exception as error:  # the libraries have no common base class for exceptions
        raise HpcDetError(f"checkpoint_storage: {remote.url}: {remote.in_words(error)}") from None


# --- the checkpoints of an experiment

_SHAPE: Shape = {"searcher": {"metric": str, "smaller_is_better": bool}, "checkpoint_storage": dict}
"""The keys of an effective configuration that decide which checkpoints are kept."""


class Superfluous(NamedTuple):
    """A checkpoint that no policy keeps, and the storage of its trial."""

    storage: TrialStorage
    checkpoint: Committed


def collect(experiment: ExperimentFolder) -> list[Superfluous]:
    """Delete the checkpoints that no policy keeps and no other experiment starts from, and return them.

    For an experiment that has no more work. Several processes may call this at once, and gangs may still save: a newer
    checkpoint never makes the policy keep an older one that it did not keep before. Raises HpcDetError if a store does
    not answer; the next call deletes the rest.
    """
    found = superfluous_in(experiment, policies(experiment))
    if found:
        wanted = set(wanted_by_later(experiment, {each.checkpoint.uuid for each in found}))
        found = [each for each in found if each.checkpoint.uuid not in wanted]
    for trial in experiment.trials():
        clear_leftovers(trial)
    for storage, checkpoint in found:
        storage.remove(checkpoint.uuid)
    return found


def superfluous_in(experiment: ExperimentFolder, policy_of: Callable[[int], Policy]) -> list[Superfluous]:
    """Return the checkpoints that no policy keeps. `policy_of`: from the number of a trial to its policy."""
    config = checked(read_json(experiment.effective) or {}, _SHAPE, experiment.effective)
    searcher = config["searcher"]
    owners: dict[str, TrialStorage] = {}
    trials: list[TrialCheckpoints] = []
    for trial in experiment.trials():
        storage = TrialStorage(trial, config["checkpoint_storage"])
        known = storage.all()
        owners |= {checkpoint.uuid: storage for checkpoint in known}
        found = validations(trial.metrics, searcher["metric"])
        trials.append(TrialCheckpoints(checkpoints=known, validations=found, policy=policy_of(trial.id)))
    gone = superfluous_of_all(trials, smaller_is_better=searcher["smaller_is_better"])
    return [Superfluous(owners[checkpoint.uuid], checkpoint) for checkpoint in gone]


# --- checkpoints that other experiments start from (searcher.source_...)


def source_of(experiment: ExperimentFolder) -> Path | None:
    """Return the checkpoint whose weights all trials of the experiment start from, or None. Raises NewerFormat."""
    try:
        warm_start = read_json(experiment.warm_start)
    except NewerFormat:  # unlike after damage, its trials may still start, from a checkpoint that must not be deleted
        raise
    except (ValueError, OSError):  # damaged, or readable only by its owner
        return None
    return Path(warm_start["checkpoint"]) if warm_start else None


def wanted_by_later(experiment: ExperimentFolder, uuids: Container[str]) -> Iterator[str]:
    """Yield those of `uuids`, checkpoints of `experiment`, from which an unfinished experiment starts.

    Only files are read, since some nodes cannot query the scheduler. So a checkpoint is also kept for an experiment
    whose jobs have ended without recording it.
    """
    for other in ExperimentStore(experiment.root()).all():
        # only a later experiment can: the checkpoint existed when it was created
        source = source_of(other) if other.id > experiment.id else None
        if source and source.name in uuids and not _has_ended(other):
            yield source.name


def _has_ended(experiment: ExperimentFolder) -> bool:
    try:
        return SearchJournal(experiment).state().finished
    except (HpcDetError, OSError, ValueError, LookupError, TypeError):  # damaged: keep the checkpoint
        return False
