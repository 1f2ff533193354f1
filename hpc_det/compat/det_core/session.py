"""What the parts of one `determined.core.Context` share: the run, rank 0's part in it, and how the script will end."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_det.compat.det_core.distributed import DistributedContext
from hpc_det.core.chief import Chief
from hpc_det.core.run import Run


@dataclass
class Session:
    """The state of one context. `run` is None before the context is entered."""

    distributed: DistributedContext
    active: Run | None = None
    chief: Chief | None = None
    """On rank 0: its reports, search and checkpoints. None on other ranks."""
    acknowledged: bool = False
    """Whether the script exits because it was asked to stop, so that the trial must be continued later."""
    uses_operations: bool = False
    """Whether the script takes lengths from `searcher.operations`, so that its validations do not go to the search."""
    is_invalid: bool = False
    """Whether the script has reported that its hyperparameters are invalid."""

    @property
    def run(self) -> Run:
        """The run. Raises RuntimeError outside of the block of `core.init`."""
        if self.active is None:
            raise RuntimeError("use the context inside of `with det.core.init() as core_context`")
        return self.active

    @property
    def is_managed(self) -> bool:
        """Whether the process belongs to an experiment."""
        return self.run.job is not None
