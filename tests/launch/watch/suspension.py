"""A simulated suspension: the machine's clock advances while a process does not run, as in a suspended job."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

AN_HOUR_S = 3600.0


class Suspension:
    """Replaces the clock of hpc_det.node.suspension in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._lasted_s = 0.0
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + self._lasted_s)
        monkeypatch.setattr("hpc_det.node.suspension.time", clock)

    def lasts(self, seconds: float = AN_HOUR_S) -> None:
        self._lasted_s += seconds
