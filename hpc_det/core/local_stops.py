"""Stop requests of commands, such as `hpc-det experiment pause`, to a run outside a job."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress

from hpc_det.node.json_files import DamagedFile
from hpc_det.store.attempt import read_stop
from hpc_det.store.folders import TrialFolder
from hpc_det.store.local_run import BEAT_S, Heartbeat

POLL_S = 1.0
"""Seconds between two looks for a request, as in a node agent."""


class StopRequests:
    """A thread of rank 0 that turns a stop request into a signal to this process, and sends the heartbeat."""

    def __init__(self, trial: TrialFolder, attempt: int, heartbeat: Heartbeat) -> None:
        self._trial = trial
        self._attempt = attempt
        self._heartbeat = heartbeat
        self._signalled = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stop-requests", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; later requests are ignored."""
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        beaten = time.monotonic()
        while not self._end.wait(POLL_S):
            with suppress(OSError, DamagedFile):
                self._look()
            if time.monotonic() - beaten >= BEAT_S:
                self._heartbeat.beat()
                beaten = time.monotonic()

    def _look(self) -> None:
        stop = read_stop(self._trial.stop, self._attempt)
        if stop and stop.reason == "kill":
            os.kill(os.getpid(), signal.SIGKILL)  # nothing is saved, as when a job is killed
        elif stop and not self._signalled:
            self._signalled = True
            os.kill(os.getpid(), signal.SIGTERM)  # all ranks save and stop at the same batch
