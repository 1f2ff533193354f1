"""The operations of a search: how long a trial trains before it reports the searcher's metric."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpc_det.core.progress import Progress, TrainUnit


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A length to which the trial trains, counted from its beginning."""

    length: int
    unit: str
    """batches, records or epochs, as in `searcher.max_length`."""
    until: TrainUnit = field(repr=False)
    """The length for `batches(loader, until=...)`; records are converted to batches."""
    progress: Progress = field(repr=False, compare=False)

    @property
    def is_reached(self) -> bool:
        """Whether the trial has trained to this length. Epochs are those that `batches` has completed."""
        return self.until.reached(self.progress)
