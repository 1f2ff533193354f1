"""Waiting for a sweep. Whoever waits may go: the sweep needs nobody on the login node."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hpc_det.errors import INTERRUPTED
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.watch import Watch


def wait(experiment: ExperimentFolder, poll_s: float) -> None:
    """Until nothing of it runs or will run."""
    with left_by_ctrl_c(experiment):
        Watch(experiment).wait(poll_s)


@contextmanager
def left_by_ctrl_c(experiment: ExperimentFolder) -> Iterator[None]:
    """Ctrl-C ends whoever waits for the sweep, or is about to, and not the sweep: SystemExit."""
    try:
        yield
    except KeyboardInterrupt:
        for line in (
            f"the jobs of experiment {experiment.id} go on",
            f"wait for them again with: hpc-det sweep wait {experiment.id}",
            f"end them with: hpc-det experiment kill {experiment.id}",
        ):
            print(f"hpc-det: {line}", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
