"""`determined.experimental`: only its client has a counterpart."""

from __future__ import annotations

from hpc_det.compat.experimental_client import Checkpoint, Determined, Experiment, Trial

__all__ = ["Checkpoint", "Determined", "Experiment", "Trial"]
