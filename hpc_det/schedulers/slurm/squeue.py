"""Asking squeue about several jobs, after squeue(1).

squeue leaves out jobs that Slurm has forgotten, without an error, and refuses a question about a single one. A site's
wrapper or cache may cut off its answer, so an answer that leaves out jobs proves nothing: the question is asked once
more, in the opposite order. Where both answers hold the same jobs, nothing was cut off. Where both hold none, the
newest one is asked about alone: squeue's refusal comes with an exit code, which nothing cuts off.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from hpc_det.schedulers.scheduler import ENV, CommandError, JobState, JobStatus, Run, array_of, reading, whole_lines
from hpc_det.schedulers.slurm.answers import parse_squeue, with_arrays

_OF_USERS = ("ACCOUNT", "ARRAY", "LICENSES", "NAMES", "PARTITION", "QOS", "STATES", "USERS")
SQUEUE = (
    ENV,
    *(f"--unset=SQUEUE_{name}" for name in _OF_USERS),  # what users set to see less
    "SLURM_BITSTR_LEN=0",  # the indices of an array are not cut off
    "SLURM_TIME_FORMAT=standard",
    "squeue",
)
_COLUMNS = "%i|%T|%r"
_HEADER = "JOBID|STATE|REASON"
_FORGOTTEN = JobStatus(JobState.ENDED, "forgotten by Slurm")
"""It ended more than MinJobAge ago."""


@dataclass(frozen=True)
class Answer:
    jobs: Mapping[str, JobStatus] = field(default_factory=dict)
    """Jobs and elements of arrays, from the lines that are whole."""
    has_header: bool = False
    is_refused: bool = False
    """Slurm knows no job of this id: it was the only one in the question."""
    trouble: str = ""
    """What a command that failed has reported."""


def statuses(job_ids: Sequence[str], run: Run) -> dict[str, JobStatus]:
    """A failed question is UNKNOWN for each job, and so is an answer that may be a part of the whole one."""
    if not job_ids:
        return {}
    arrays = list(dict.fromkeys(map(array_of, job_ids)))
    first = _ask(arrays, run, "i")
    if first.trouble:
        return dict.fromkeys(job_ids, JobStatus(JobState.UNKNOWN, first.trouble))
    if first.is_refused or all(_is_certain(job_id, first) for job_id in job_ids):
        second = first
    else:
        second = _ask(arrays, run, "-i")
    known = with_arrays({**first.jobs, **second.jobs})
    whole = _whole(arrays, first, second, run)
    unknown = JobStatus(JobState.UNKNOWN, second.trouble or "squeue: its answer may be cut off")
    return {
        job_id: known.get(job_id, _FORGOTTEN)
        if array_of(job_id) in whole or _is_certain(job_id, first) or _is_certain(job_id, second)
        else unknown
        for job_id in job_ids
    }


def _is_certain(job_id: str, answer: Answer) -> bool:
    """Lines that may be missing would change nothing."""
    together = with_arrays(answer.jobs).get(job_id)
    return job_id in answer.jobs or (together is not None and together.state is JobState.RUNNING)


def _whole(arrays: Sequence[str], first: Answer, second: Answer, run: Run) -> Collection[str]:
    """The jobs and arrays of which the two answers, in opposite orders, tell everything."""
    if second.is_refused:
        return arrays
    if second.trouble:
        return ()
    if first.jobs.keys() != second.jobs.keys():
        return ()
    if first.jobs:
        return arrays
    newest = max(arrays, key=lambda array: int(array) if array.isdecimal() else 0)
    has_headers = first.has_header and second.has_header
    return arrays if has_headers and _ask([newest], run, "i").is_refused else ()


def _ask(arrays: Sequence[str], run: Run, order: str) -> Answer:
    flags = ["--states=all", f"--sort={order}", f"--format={_COLUMNS}", f"--jobs={','.join(arrays)}"]
    try:
        return _read(run([*SQUEUE, *flags]), arrays)
    except CommandError as error:
        if "Invalid job id" not in str(error):
            return Answer(trouble=str(error))
        return Answer(is_refused=len(arrays) == 1, has_header=True)


@reading("squeue")
def _read(output: str, arrays: Sequence[str]) -> Answer:
    lines = whole_lines(output)
    jobs = parse_squeue("\n".join(line for line in lines if line != _HEADER))
    asked = {job_id: status for job_id, status in jobs.items() if array_of(job_id) in arrays}
    return Answer(asked, has_header=_HEADER in lines)
