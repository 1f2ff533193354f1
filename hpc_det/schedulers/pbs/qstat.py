"""Asking qstat about several jobs.

`qstat -f -F json A B C` prints only the first job that PBS knows. With -E (in every version that has -F json) it prints
all that PBS knows, and leaves out the others without an error. Those are asked about again without -E: PBS then names
each job that has ended, as unknown (exit code 153) or as finished (35). It takes 0.2 s for each of them, so a command
has few.

Each server's jobs have commands of their own: with -E an id of a server that cannot be reached may hide all other jobs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hpc_det.schedulers.scheduler import CommandError, Run, reading

IDS_AT_ONCE = 200
NAMES_AT_ONCE = 50
"""Without -E."""
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
        troubles = filter(None, dict.fromkeys((self.trouble, other.trouble)))
        return Answer({**self.jobs, **other.jobs}, self.over | other.over, "; ".join(troubles))

    def why_silent(self, job_id: str) -> str:
        """Of a job that is no news. Reports that name other jobs are left out."""
        own = [line for line in self.trouble.split("; ") if job_id in line or not _A_JOB.search(line)]
        return "; ".join(own) if self.trouble and own else "qstat: an answer without this job"


def ask(job_ids: Sequence[str], run: Run, *flags: str) -> Answer:
    """A job has ended where PBS says so by name; a failed query is an `Answer` without jobs."""
    answer = Answer()
    for of_server in _by_server(job_ids):
        for some in _pieces(of_server, IDS_AT_ONCE):
            answer |= _asked(some, run, flags)
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
    if first.trouble and not named:
        return first
    answer = Answer()
    for some in _pieces(left_out, NAMES_AT_ONCE):
        piece = _qstat(run, *flags, *some)
        answer |= piece
        if piece.trouble and not (piece.jobs or piece.over):  # the next one would take as long to fail
            break
    return answer | first


def _by_server(job_ids: Sequence[str]) -> list[list[str]]:
    servers: dict[str, list[str]] = {}
    for job_id in job_ids:
        servers.setdefault(job_id.partition(".")[2], []).append(job_id)
    return list(servers.values())


def _pieces(job_ids: Sequence[str], longest: int) -> list[Sequence[str]]:
    return [job_ids[start : start + longest] for start in range(0, len(job_ids), longest)]


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
    with suppress(CommandError), reading("qstat"):
        jobs = json.loads(output).get("Jobs", {}).items()
        yield from [(job_id, job) for job_id, job in jobs if isinstance(job, dict)]
