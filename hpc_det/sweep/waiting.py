"""Waiting for a sweep. Whoever waits may go: the sweep needs nobody on the login node."""

from __future__ import annotations

import sys

from hpc_det.errors import INTERRUPTED
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.watch import Watch


def wait(experiment: ExperimentFolder, poll_s: float) -> None:
    """Until nothing of it runs or will run. Ctrl-C ends the waiting, not the sweep: SystemExit."""
    try:
        Watch(experiment).wait(poll_s)
    except KeyboardInterrupt:
        for line in (
            f"the jobs of experiment {experiment.id} go on",
            f"wait for them again with: hpc-det sweep wait {experiment.id}",
            f"end them with: hpc-det experiment kill {experiment.id}",
        ):
            print(f"hpc-det: {line}", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
