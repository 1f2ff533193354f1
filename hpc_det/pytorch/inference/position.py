"""The position of a batch inference, in its checkpoints.

inference.json     the position: see `Position`                        rank 0
reducers-R.pth     the values that the reducers have collected         each rank, if there are reducers
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hpc_det.checkpoint.content import check_loadable, load
from hpc_det.errors import UsageError, count
from hpc_det.node.json_files import made
from hpc_det.pytorch.inference.records import Records, Share
from hpc_det.pytorch.trial.reducer import Reducers

INFERENCE = "inference.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Position:
    """How much is done, on all ranks together. It does not depend on the number of ranks."""

    done: int = 0
    """Number of records."""
    batches: int = 0
    """Number of batches."""
    rounds: int = 0
    """Number of rounds, in each of which every rank has one batch; with one number of ranks, the batches of a rank."""
    end: int | None = None
    """Number of the last record to process plus one; None: the end of the data set."""
    length: int | None = None
    """Number of records in the data set; None: unknown."""
    ranks: int = 1
    """Number of ranks that wrote the checkpoint."""
    stage: str | None = None
    """The staged folder with the outputs of the last records; None: they have no outputs."""
    part: str | None = None
    """The name of its part."""
    finished: bool = False
    """Whether `on_finish` was called, and the metrics are reported."""
    format: int = FORMAT

    def after(self, share: Share) -> Position:
        """Return the position after a round."""
        return replace(
            self, done=share.done, batches=self.batches + share.batches, rounds=self.rounds + 1, stage=None, part=None
        )

    def is_end(self) -> bool:
        """Return whether no record is left; False if the length is unknown."""
        end = self.length if self.end is None else self.end
        return end is not None and self.done >= end

    def total(self, records: Records) -> int | None:
        """Return the number of batches of the whole inference; None if it is unknown."""
        if self.length is None:
            return None
        return self.batches + records.batches(self.done, self.length if self.end is None else self.end)

    def write(self, folder: Path) -> None:
        (folder / INFERENCE).write_text(json.dumps(asdict(self)), encoding="utf-8")


def read_position(checkpoint: Path, length: int | None) -> Position:
    """Return the position in a checkpoint. `length`: that of the data set now; None: unknown.

    Raises UsageError for a checkpoint of another kind of run, and for a data set of another length.
    """
    path = checkpoint / INFERENCE
    if not path.exists():
        raise UsageError(
            f"{checkpoint}: is not a checkpoint of a batch inference; give the run a name that no training has "
            f"(torch_batch_process(..., name=...))"
        )
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    position = made(Position, content, path)
    if position.length != length:
        raise UsageError(
            f"torch_batch_process: the data set has {_records(length)}, and it had {_records(position.length)} when "
            f"{checkpoint} was saved; continue with the same data set, or start a new run"
        )
    return position


def write_reducers(folder: Path, reducers: Reducers, rank: int) -> None:
    """Write what the reducers of this rank have collected to the folder of a checkpoint."""
    if reducers.wrapped:
        state = reducers.state()
        check_loadable({_file(rank): state})
        torch.save(state, folder / _file(rank))


def restore_reducers(folder: Path, reducers: Reducers, *, saved: int, rank: int, size: int) -> None:
    """Restore what the reducers had collected on `saved` ranks; rank 0 takes it all if that is not the `size` now."""
    if not reducers.wrapped:
        return
    if saved == size:
        reducers.restore(load(folder / _file(rank)))
    elif rank == 0:
        reducers.restore(*(load(folder / _file(each)) for each in range(saved)))


def _file(rank: int) -> str:
    return f"reducers-{rank}.pth"


def _records(length: int | None) -> str:
    return "an unknown number of records" if length is None else f"{count(length, 'record')}"
