"""The result of an experiment that has ended: its best validation, or why it failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_det.errors import HpcDetError
from hpc_det.view.state import ExperimentState

if TYPE_CHECKING:
    from hpc_det.client.checkpoint import Checkpoint
    from hpc_det.client.trial import Trial


@dataclass(frozen=True, kw_only=True)
class Result:
    """The best validation of a completed experiment, by the searcher's metric."""

    metric: str
    """Name of the searcher's metric."""
    value: float | None
    """Best value of the metric; None if no validation reported a number."""
    trial: Trial | None
    """Trial that reported the value."""
    checkpoint: Checkpoint | None
    """Best checkpoint that was kept; None if there is none with a validation."""


class ExperimentFailed(HpcDetError):
    """An experiment has ended without being completed: it failed, or was cancelled."""

    def __init__(self, experiment: str, state: ExperimentState, cause: str, log_tail: Sequence[str]) -> None:
        self.experiment = experiment
        """ID of the experiment, with its state root if it belongs to another user."""
        self.state = state
        """ERROR or CANCELED."""
        self.cause = cause
        """Why it ended, with the first failure if there was one."""
        self.log_tail = list(log_tail)
        """Last lines of its logs, each after its source."""
        indented = [f"  {line}" for line in self.log_tail]
        heading = ["last lines of its logs:"] if indented else []
        super().__init__(
            [
                f"experiment {experiment}: {state.value}: {cause}; see more with "
                f"`hpc-det experiment logs {experiment}`",
                *heading,
                *indented,
            ]
        )
