"""What PBS says of jobs, in submitit's ids and states.

Of an ended job it says how it ended where the site keeps a history, which is not the default of PBS.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from submitit.core.logger import get_logger

from hpc_det.schedulers.pbs import answers as pbs_qstat
from hpc_det.schedulers.pbs.answers import Answer, listed
from hpc_det.schedulers.scheduler import run_command
from hpc_det.submit.submitit_pbs.ids import array_of, from_pbs, to_pbs

_WALLTIME_EXCEEDED = -29
_STATES = {
    "Q": "PENDING",
    "H": "PENDING",
    "W": "PENDING",
    "T": "PENDING",  # on its way to another queue
    "M": "PENDING",  # moved to another server, which has it now
    "B": "RUNNING",
    "R": "RUNNING",
    "E": "COMPLETING",
    "S": "PREEMPTED",  # suspended: submitit has no word for a job that stands still and goes on
    "U": "PREEMPTED",
}


def ask(job_ids: Iterable[str]) -> Answer:
    """Of jobs in submitit's ids; arrays are asked about whole. Of those that have just ended the history is asked."""
    answer = pbs_qstat.ask(sorted({array_of(job_id) or to_pbs(job_id) for job_id in job_ids}), run_command, "-t")
    if not answer.jobs and not answer.over:
        get_logger().warning(f"qstat gave no answer, the state of jobs may be old: {answer.trouble}")
    past = listed(sorted(answer.over), run_command, "-x", "-t") if answer.over else Answer()
    jobs = {from_pbs(pbs_id): job for pbs_id, job in {**past.jobs, **answer.jobs}.items() if "[]" not in pbs_id}
    return Answer(jobs, frozenset(map(from_pbs, answer.over)), answer.trouble)


def state_in(answer: Answer, job_id: str) -> str | None:
    """As submitit names it; "ENDED" where PBS has forgotten how. None: no news."""
    if job := answer.jobs.get(job_id):
        return _state(job)
    return "ENDED" if answer.over & {job_id, job_id.partition("_")[0]} else None


def _state(job: Mapping[str, Any]) -> str:
    """State F alone, or X of an array's element, says nothing; substate 91 is qdel. What never ran has no exit status,
    and may have substate 92, as if it had succeeded."""
    letter, status = job.get("job_state"), job.get("Exit_status")
    if letter not in ("F", "X"):
        return _STATES.get(str(letter), "UNKNOWN")
    if status == _WALLTIME_EXCEEDED:
        return "TIMEOUT"
    if status is None or job.get("substate") == 91:
        return "CANCELLED"
    return "FAILED" if status else "COMPLETED"
