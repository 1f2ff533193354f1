"""`ray.tune.error`."""

from __future__ import annotations

from hpc_det.errors import HpcDetError


class TuneError(HpcDetError):
    """Trials of a search have failed, or a scheduler was created with arguments that exclude each other."""
