"""What PBS says of jobs, in one question for all of them.

A failed query is no news: a server that is down answers a JSON without jobs (exit code 255). A job has ended where PBS
says so by name, as unknown (153: no history is kept, the default of PBS, or it has expired) or as finished (35).
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from submitit.core.logger import get_logger

from hpc_det.submit.submitit_pbs.ids import array_of, from_pbs, to_pbs

TIMEOUT_S = 60
_ANSWERS = (0, 35, 153)
_ENDED = re.compile(r"qstat: (?:Unknown Job Id ([0-9]\S*)|([0-9]\S*) Job has finished)")
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


@dataclass(frozen=True)
class Answer:
    """Of jobs in submitit's ids."""

    jobs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The attributes."""
    ended: frozenset[str] = frozenset()
    """These have ended; the attributes of some may be known."""

    def state(self, job_id: str) -> str | None:
        """As submitit names it; "ENDED" where PBS has forgotten how. None: no news."""
        if job := self.jobs.get(job_id):
            return _state(job)
        return "ENDED" if {job_id, job_id.partition("_")[0]} & self.ended else None


def ask(job_ids: Iterable[str]) -> Answer:
    """A second question is only put for jobs that have just ended: with -x and without a history, none is answered."""
    asked = sorted({array_of(job_id) or to_pbs(job_id) for job_id in job_ids})
    answer = _qstat(asked)
    if not answer.ended:
        return answer
    past = _qstat(sorted(pbs_id for pbs_id in asked if from_pbs(pbs_id) in answer.ended), "-x")
    return Answer({**past.jobs, **answer.jobs}, answer.ended)


def _qstat(pbs_ids: list[str], *flags: str) -> Answer:
    command = ["qstat", *flags, "-t", "-f", "-F", "json", *pbs_ids]
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=TIMEOUT_S)
        jobs = json.loads(done.stdout).get("Jobs", {})
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        get_logger().warning(f"qstat gave no answer, the state of jobs may be old: {error}")
        return Answer()
    if done.returncode not in _ANSWERS:
        get_logger().warning(
            f"qstat failed with {done.returncode}, the state of jobs may be old: {done.stderr.strip()}"
        )
        return Answer()
    ended = {from_pbs(unknown or finished) for unknown, finished in _ENDED.findall(done.stderr)}
    return Answer({from_pbs(pbs_id): job for pbs_id, job in jobs.items() if "[]" not in pbs_id}, frozenset(ended))


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
