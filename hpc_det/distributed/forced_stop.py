"""Stops that all ranks know beforehand, so that nothing needs to be agreed on."""

from __future__ import annotations

import math

from hpc_det.distributed.preempt import StopAgreement


class ForcedStop(StopAgreement):
    """Other stops are agreed on as usual."""

    _forced_at = math.inf

    def force(self) -> None:
        """Every rank calls this between the same two ticks: the next one stops."""
        self._forced_at = self._tick + 1

    @property
    def is_forced(self) -> bool:
        return self._tick >= self._forced_at

    @property
    def stopped(self) -> bool:
        return self.is_forced or super().stopped

    def should_stop(self) -> bool:
        return super().should_stop() or self.is_forced
