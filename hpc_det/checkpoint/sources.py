"""The checkpoints that experiments begin with: all their trials do, by `searcher.source_...`, whenever they begin."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import suppress
from pathlib import Path

from hpc_det.errors import HpcDetError
from hpc_det.node.json_files import read_json
from hpc_det.search.journal import SearchJournal
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder


def source_of(experiment: ExperimentFolder) -> Path | None:
    """The checkpoint whose weights its trials begin with; None where each has its own."""
    with suppress(ValueError, OSError):  # torn, or its owner's alone
        if told := read_json(experiment.warm_start):
            return Path(told["checkpoint"])
    return None


def wanted_by_later(experiment: ExperimentFolder, uuids: Container[str]) -> Iterator[str]:
    """Those of its checkpoints `uuids` that another experiment begins with which has not ended, as far as files tell.

    Only a later one can: it was created when the checkpoint was there. The scheduler is not asked, since this may be a
    node that cannot: an experiment whose jobs are gone without a word wants its checkpoint still.
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
