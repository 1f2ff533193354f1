"""Asking qstat about several jobs.

`qstat -f -F json A B C` prints only the first job that PBS knows. With -E (in every version that has -F json) it prints
all that PBS knows, and leaves out the others without an error. Those are asked about again without -E: PBS then names
each job that has ended, as unknown (exit code 153) or as finished (35).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_det.schedulers.command import CommandError, Run

IDS_AT_ONCE = 200
_ID = r"(\d[^\s;]*)"
_A_JOB = re.compile(r"(?<![\w.-])\d+(\[\d*\])?\.[A-Za-z]")
_OVER = re.compile(f"Unknown Job Id {_ID}|{_ID} Job has finished|has finished {_ID}")


@dataclass(frozen=True)
class Answer:
    """Jobs have the ids that PBS gives them, whichever form was asked for: `12.server`."""

    jobs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The attributes of each job that PBS knows; of an array's elements, too, where -t was asked for."""
    over: frozenset[str] = frozenset()
    """Jobs that PBS names as ended. One that is neither here nor in `jobs` is no news."""
    trouble: str = ""
    """What a command that failed has reported."""

    def __or__(self, other: Answer) -> Answer:
        return Answer({**self.jobs, **other.jobs}, self.over | other.over, other.trouble or self.trouble)

    def why_silent(self, job_id: str) -> str:
        """Of a job that is no news. Reports that name other jobs are left out."""
        own = [line for line in self.trouble.split("; ") if job_id in line or not _A_JOB.search(line)]
        return "; ".join(own) if self.trouble and own else "qstat: an answer without this job"


def ask(job_ids: Sequence[str], run: Run, *flags: str) -> Answer:
    """A job has ended where PBS says so by name; a failed query is an `Answer` without jobs."""
    answer = Answer()
    for start in range(0, len(job_ids), IDS_AT_ONCE):
        answer |= _asked(job_ids[start : start + IDS_AT_ONCE], run, flags)
    return answer


def listed(job_ids: Sequence[str], run: Run, *flags: str) -> Answer:
    """One query for all that PBS knows."""
    return _qstat(run, "-E", *flags, *job_ids)


def over_in(said: str) -> frozenset[str]:
    """The jobs that this message of a command calls unknown or finished: an exit code speaks for one of them only."""
    return frozenset(job_id for found in _OVER.finditer(said) for job_id in found.groups() if job_id)


def _asked(job_ids: Sequence[str], run: Run, flags: Sequence[str]) -> Answer:
    first = listed(job_ids, run, *flags)
    named = set(map(_number, (*first.jobs, *first.over)))
    left_out = [job_id for job_id in job_ids if _number(job_id) not in named]
    is_answer = named or not first.trouble
    return _qstat(run, *flags, *left_out) | first if left_out and is_answer else first


def _number(job_id: str) -> str:
    """`12[3]` of `12[3].server`."""
    return job_id.partition(".")[0]


def _qstat(run: Run, *arguments: str) -> Answer:
    try:
        output, said = run(["qstat", "-f", "-F", "json", *arguments]), ""
    except CommandError as error:
        output, said = error.output, str(error)
    return Answer(dict(_jobs(output)), over_in(said), said)


def _jobs(output: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        yield from json.loads(output).get("Jobs", {}).items()
    except (ValueError, AttributeError):
        return
