"""The checkpoints of a trial, wherever they lie: in its folder and, where the experiment has one, in an object store.

For whoever looks at them or removes them when no rank writes them; a trial that trains has a Mirror. At the end of an
experiment, `collect` deletes what its retention policy does not keep.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
from hpc_det.node.json_files import Shape, checked, read_json
from hpc_det.search.journal import SearchJournal
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from hpc_det.store.metrics import validations


class TrialStorage:
    """All methods raise HpcDetError where there is a store that does not answer."""

    def __init__(self, trial: TrialFolder, storage: Mapping[str, Any]) -> None:
        """`storage`: checkpoint_storage of its config. Raises UsageError where nothing here reaches the store."""
        self.trial = trial
        self._remote = remote_of(trial, storage)

    def all(self) -> list[Committed]:
        """Those here and those in the store, the newest first."""
        stored: list[Committed] = []
        if self._remote:
            with answering(self._remote):
                stored = self._remote.stored(self.trial.checkpoints)
        here = {checkpoint.uuid: checkpoint for checkpoint in committed(self.trial.checkpoints)}
        return newest_first({**{checkpoint.uuid: checkpoint for checkpoint in stored}, **here}.values())

    def places(self, uuid: str) -> list[str]:
        """The checkpoint's folder, and its URL."""
        folder = self.trial.checkpoints / uuid
        found = [str(folder)] if is_here(folder) else []
        if remote := self._store_with(uuid):
            found.append(f"{remote.url}/{uuid}")
        return found

    def remove(self, uuid: str) -> None:
        """From everywhere. What is gone already is no error."""
        if self._remote:
            with answering(self._remote):
                self._remote.remove(uuid)
        delete(self.trial.checkpoints / uuid, hidden=f".deleted-{uuid}")
        remove_damaged(self.trial.checkpoints, uuid)

    def remove_files(self, checkpoint: Committed, names: Sequence[str]) -> None:
        """A kill on the way leaves files that no manifest names, and no checkpoint that seems damaged."""
        if problems := outside(names):
            raise HpcDetError([f"checkpoint {checkpoint.uuid}: {problem}" for problem in problems])
        left = {name: entry for name, entry in checkpoint.files.items() if name not in names}
        rest = replace(checkpoint, files=left, removed=(*checkpoint.removed, *names))
        if remote := self._store_with(rest.uuid):
            with answering(remote):
                remote.remove_files(rest, names)
        if is_here(rest.path):
            write_atomic(rest.path / MANIFEST, FORMAT.text(rest.manifest))
            for name in names:
                disk.unlink(rest.path / name, missing_ok=True)

    def copy(self, checkpoint: Committed, target: Path) -> list[str]:
        """A copy with its whole state at `target`, out of its folder, or else out of the store.

        Returns a sentence for each file of its code that was damaged. Raises HpcDetError with all that is damaged of
        its state; then nothing is at `target`.
        """
        copied, damage = replace(checkpoint, path=target), ["not in its folder"]
        if committed_at(checkpoint.path):
            damage = in_words(checkpoint.irregularities(checkpoint.path, is_code=False)) or copy_whole(
                copied, lambda name, to: _copy_file(checkpoint.path / name, to)
            )
        if damage and (remote := self._store_with(checkpoint.uuid)):
            with answering(remote):
                damage = remote.download(copied)
        if damage:
            raise HpcDetError([f"checkpoint {checkpoint.uuid}: damaged: {problem}" for problem in damage])
        experiment = self.trial.experiment()
        return repair_code(copied, [], [experiment.code_kept, experiment.code])

    def _store_with(self, uuid: str) -> Remote | None:
        """The store, if it has this checkpoint."""
        if self._remote is None:
            return None
        with answering(self._remote):
            return self._remote if self._remote.has(uuid) else None


def _copy_file(source: Path, target: Path) -> None:
    """Raises FileNotFoundError for what cannot be read, which the store may have."""
    try:
        file = open_regular(source)
    except OSError as error:
        raise FileNotFoundError(error.errno, error.strerror, str(source)) from None
    with file:
        disk.copy_content(file, target)


def clear_leftovers(trial: TrialFolder) -> None:
    """Of removals that were killed."""
    for leftover in trial.checkpoints.glob(".deleted-*"):
        disk.remove_tree(leftover)


def is_here(folder: Path) -> bool:
    return (folder / MANIFEST).exists()


@contextmanager
def answering(remote: Remote) -> Iterator[None]:
    """No two stores' libraries agree on what they raise."""
    try:
        yield
    except HpcDetError:
        raise
    except Exception as error:
        raise HpcDetError(f"checkpoint_storage: {remote.url}: {remote.in_words(error)}") from None


# --- of a whole experiment

_SHAPE: Shape = {"searcher": {"metric": str, "smaller_is_better": bool}, "checkpoint_storage": dict}
"""What decides, of an effective configuration."""


class Superfluous(NamedTuple):
    """A checkpoint that no policy keeps, and where it lies."""

    storage: TrialStorage
    checkpoint: Committed


def collect(experiment: ExperimentFolder) -> list[Superfluous]:
    """Delete what no policy keeps and no other experiment begins with, and return it. For an experiment without work.

    Any number of processes may do it, and gangs may still save: a newer checkpoint never makes that one worth keeping
    again which it has put behind. Raises HpcDetError where a store does not answer; the next call does the rest.
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
    """What `policy_of` each trial, by its number, does not keep."""
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


# --- checkpoints that other experiments begin with: all their trials do, by searcher.source_...


def source_of(experiment: ExperimentFolder) -> Path | None:
    """The checkpoint whose weights its trials begin with; None where each has its own."""
    with suppress(ValueError, OSError):  # torn, or its owner's alone
        if told := read_json(experiment.warm_start):
            return Path(told["checkpoint"])
    return None


def wanted_by_later(experiment: ExperimentFolder, uuids: Container[str]) -> Iterator[str]:
    """Those of its checkpoints `uuids` that another experiment begins with which has not ended, as far as files tell.

    Only a later one can: it was created when the checkpoint was there. The scheduler is not asked, since this may be a
    node that cannot: an experiment whose jobs ended without reporting it keeps its checkpoint.
    """
    for other in ExperimentStore(experiment.root()).all():
        source = source_of(other) if other.id > experiment.id else None
        if source and source.name in uuids and not _has_ended(other):
            yield source.name


def _has_ended(experiment: ExperimentFolder) -> bool:
    try:
        return SearchJournal(experiment).state().finished
    except (HpcDetError, OSError, ValueError, LookupError, TypeError):  # damaged: nobody knows
        return False
