"""det.core.PreemptContext: asks whether the script must save and exit (upstream: determined/core/_preempt.py)."""

from __future__ import annotations

import enum

from hpc_det.compat.det_core.session import Session
from hpc_det.core.run import Run

_KIND = "determined: should_preempt"
_LONGEST_S = 24 * 3600.0
"""Seconds for which ranks wait for rank 0, which may validate alone."""


class PreemptMode(enum.Enum):
    """Which ranks call `should_preempt`."""

    WorkersAskChief = "WORKERS_ASK_CHIEF"
    """All ranks, in step; they get the same answer."""
    ChiefOnly = "CHIEF_ONLY"
    """Rank 0 alone."""
    WorkersAskMaster = "WORKERS_ASK_MASTER"
    """Any rank; ranks get the answer True at different times."""


class PreemptContext:
    """Stops of the training: by the scheduler, by the user, or by the search."""

    def __init__(self, session: Session, preempt_mode: PreemptMode = PreemptMode.WorkersAskChief) -> None:
        self._session = session
        self._mode = PreemptMode(preempt_mode)
        self._calls = 0

    def should_preempt(self, auto_ack: bool = True) -> bool:
        """Return whether the script must save and exit.

        After the first True, exit code 0 means that the trial is to be continued later, unless `auto_ack` is False.
        Raises RuntimeError outside of the block of `core.init`, and in mode ChiefOnly on other ranks than 0.
        """
        run = self._session.run
        if self._mode is PreemptMode.ChiefOnly and not run.distributed.is_chief:
            raise RuntimeError(f"should_preempt: preempt_mode is ChiefOnly, and this is rank {run.distributed.rank}")
        in_step = self._mode is PreemptMode.WorkersAskChief
        must_stop = self._in_step(run) if in_step else self._alone(run)
        if must_stop and auto_ack:
            self.acknowledge_preemption_signal()
        return must_stop

    def acknowledge_preemption_signal(self) -> None:
        """Record that the script exits before its work is done, so that the trial is continued later."""
        self._session.acknowledged = True

    def _in_step(self, run: Run) -> bool:
        """Return the answer that every rank gets at this call."""
        self._calls += 1
        messages = run.distributed.messages
        if self._session.chief:
            is_proposed = self._session.chief.is_stopped_by_search or run.stop.noticed
            if messages.size > 1:
                messages.to_all(_KIND, [self._calls, is_proposed])
        else:
            # Without this wait, a rank would be ahead of rank 0, which validates before it asks, and the stop of a
            # search would come one call late.
            _, is_proposed = messages.from_rank_0(
                _KIND, "called should_preempt", limit_s=_LONGEST_S, is_it=lambda value: value[0] >= self._calls
            )
        if is_proposed:
            run.stop.wait_for_proposal()
        return run.stop.should_stop()

    def _alone(self, run: Run) -> bool:
        if self._session.chief and self._session.chief.is_stopped_by_search:
            run.stop.wait_for_proposal()
        return run.stop.noticed
