from __future__ import annotations

from pathlib import Path

from hpc_det.plan.job_plan import JobArray
from hpc_det.schedulers.scheduler import Submission


def submission(script: Path | str, after: str | None = None) -> Submission:
    """Return the submission of a script for one job."""
    return Submission(script=str(script), array=JobArray(first=0, count=1), after=after)
