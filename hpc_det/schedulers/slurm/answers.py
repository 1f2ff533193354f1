"""Queries about jobs with squeue and scontrol, and parsers of their answers, after squeue(1) and scontrol(1).

squeue omits jobs that Slurm has forgotten, without an error, but fails if the only job in a query is unknown. A wrapper
or cache of the site may cut off an answer, so an answer that omits jobs proves nothing: the query is repeated in the
opposite order. If both answers contain the same jobs, nothing was cut off. If both contain none, the newest job is
queried alone: that failure of squeue comes with an exit code, which cannot be cut off.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from hpc_det.schedulers.scheduler import (
    ENV,
    CommandError,
    JobState,
    JobStatus,
    NoAnswer,
    Run,
    array_of,
    reading,
    whole_lines,
)

# squeue(1), JOB STATE CODES. A state that is not here, from a newer Slurm, counts as UNKNOWN.
STATES = {
    "PENDING": JobState.QUEUED,
    "CONFIGURING": JobState.QUEUED,
    "REQUEUED": JobState.QUEUED,
    "REQUEUE_FED": JobState.QUEUED,
    "REQUEUE_HOLD": JobState.QUEUED,
    "SPECIAL_EXIT": JobState.QUEUED,
    "RESV_DEL_HOLD": JobState.QUEUED,
    "RUNNING": JobState.RUNNING,
    "SUSPENDED": JobState.RUNNING,
    "STOPPED": JobState.RUNNING,
    "SIGNALING": JobState.RUNNING,
    "STAGE_OUT": JobState.RUNNING,
    "RESIZING": JobState.RUNNING,
    "COMPLETING": JobState.RUNNING,  # its processes may still write; also before a requeue
    "COMPLETED": JobState.ENDED,
    "CANCELLED": JobState.ENDED,
    "FAILED": JobState.ENDED,
    "TIMEOUT": JobState.ENDED,
    "NODE_FAIL": JobState.ENDED,
    "OUT_OF_MEMORY": JobState.ENDED,
    "BOOT_FAIL": JobState.ENDED,
    "DEADLINE": JobState.ENDED,
    "REVOKED": JobState.ENDED,
    "PREEMPTED": JobState.ENDED,
}
SUSPENDED = ("SUSPENDED", "STOPPED")
"""The states of jobs whose processes are stopped."""
LARGEST_ARRAY = 4_000_001
"""The largest MaxArraySize that Slurm allows (slurm.conf(5))."""
_ORDER = (JobState.RUNNING, JobState.HELD, JobState.QUEUED, JobState.UNKNOWN, JobState.ENDED)
"""The states by precedence: the first that an element has is that of the array."""
# squeue(1), JOB REASON CODES: those that a person has to act on. slurm.conf(5), MaxBatchRequeue: 5 requeues by default.
REASONS = {
    "JobHeldAdmin": "JobHeldAdmin: held by the site or after too many requeues; ask the site for `scontrol release`",
    "JobHeldUser": "JobHeldUser: release it with `hpc-det job release`",
    "launch failed requeued held": "launch failed requeued held: its node is faulty; then `hpc-det job release`",
}
_OF_USERS = ("ACCOUNT", "ARRAY", "LICENSES", "NAMES", "PARTITION", "QOS", "STATES", "USERS")
SQUEUE = (
    ENV,
    *(f"--unset=SQUEUE_{name}" for name in _OF_USERS),  # set by users to filter squeue's output
    "SLURM_BITSTR_LEN=0",  # without it, long lists of array indices are cut off
    "SLURM_TIME_FORMAT=standard",
    "squeue",
)
_COLUMNS = "%i|%T|%r"
_HEADER = "JOBID|STATE|REASON"
_FORGOTTEN = JobStatus(JobState.ENDED, "forgotten by Slurm")
"""The status of a job that ended more than MinJobAge ago."""


@dataclass(frozen=True)
class Answer:
    """The parsed answer of squeue."""

    jobs: Mapping[str, JobStatus] = field(default_factory=dict)
    """The status of jobs and elements of arrays, from the complete lines."""
    has_header: bool = False
    """Whether the answer contains the header line, or is a refusal."""
    is_refused: bool = False
    """Whether squeue failed because Slurm does not know the only job in the query."""
    trouble: str = ""
    """The error output of a command that failed; "" if none failed."""


def statuses(job_ids: Sequence[str], run: Run) -> dict[str, JobStatus]:
    """Return the status of each job; UNKNOWN if the query fails or its answer may be incomplete."""
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
    unknown = JobStatus(JobState.UNKNOWN, second.trouble or "squeue: its answer may be incomplete")
    return {
        job_id: known.get(job_id, _FORGOTTEN)
        if array_of(job_id) in whole or _is_certain(job_id, first) or _is_certain(job_id, second)
        else unknown
        for job_id in job_ids
    }


def _is_certain(job_id: str, answer: Answer) -> bool:
    """Return whether the status of `job_id` would be the same if lines of the answer were missing."""
    together = with_arrays(answer.jobs).get(job_id)
    return job_id in answer.jobs or (together is not None and together.state is JobState.RUNNING)


def _whole(arrays: Sequence[str], first: Answer, second: Answer, run: Run) -> Collection[str]:
    """Return the jobs and arrays about which the two answers, in opposite orders, are complete."""
    if second.is_refused:
        return arrays
    if second.trouble:
        return ()
    if first.jobs.keys() != second.jobs.keys():
        return ()
    if first.jobs:
        return arrays
    # The newest job is the one that Slurm forgets last.
    newest = max(arrays, key=lambda array: int(array) if array.isdecimal() else 0)
    has_headers = first.has_header and second.has_header
    return arrays if has_headers and _ask([newest], run, "i").is_refused else ()


def _ask(arrays: Sequence[str], run: Run, order: str) -> Answer:
    """Query these jobs and arrays with squeue, sorted by `order`."""
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


def parse_squeue(output: str) -> dict[str, JobStatus]:
    """Return the status of each job and element in lines of `--format=%i|%T|%r`."""
    rows = (line.split("|", 2) for line in output.splitlines() if line.count("|") >= 2)
    return {
        job_id: _status(job_id, state.strip(), reason.strip())
        for shown_id, state, reason in rows
        for job_id in _elements(shown_id.strip())
    }


def _elements(shown_id: str) -> list[str]:
    """Return the ids of the elements in `20_[4-6:2,9%2]`, which wait together; another id is returned as it is."""
    array, bracket, _ = shown_id.partition("_[")
    return [f"{array}_{index}" for index in indices(shown_id)] if bracket else [shown_id]


def indices(array_id: str) -> list[int]:
    """Return the indices in an id: 4, 6 and 9 for `20_[4-6:2,9%2]`. Raises ValueError for an index too large for any
    array.
    """
    ranges = re.findall(r"(\d+)(?:-(\d+)(?::(\d+))?)?", array_id.partition("_[")[2].partition("%")[0])
    found = [range(int(first), int(last or first) + 1, int(step or 1)) for first, last, step in ranges]
    if any(some.stop > LARGEST_ARRAY for some in found):
        raise ValueError(f"array index {max(some.stop for some in found) - 1} is larger than Slurm allows")
    return [index for some in found for index in some]


def with_arrays(elements: Mapping[str, JobStatus]) -> dict[str, JobStatus]:
    """Return the statuses of the elements `A_3` and, under the id `A`, the status of all elements together."""
    arrays: dict[str, list[JobStatus]] = {}
    for job_id, status in elements.items():
        arrays.setdefault(job_id.partition("_")[0], []).append(status)
    return {**elements, **{array: _together(statuses) for array, statuses in arrays.items()}}


def _together(statuses: Sequence[JobStatus]) -> JobStatus:
    # The most active element decides: an array runs if any element does.
    first = min(statuses, key=lambda status: (_ORDER.index(status.state), status.is_suspended))
    return replace(first, held=tuple(job_id for status in statuses for job_id in status.held))


def _status(job_id: str, state: str, reason: str) -> JobStatus:
    found = STATES.get(state, JobState.UNKNOWN)
    # Slurm holds a requeued job for cred_expire + 1 = 121 s with this reason (slurmctld, batch_requeue_fini).
    if found is JobState.QUEUED and reason == "BeginTime":
        return JobStatus(JobState.HELD, reason, held=(job_id,))
    return JobStatus(found, REASONS.get(reason, reason), is_suspended=state in SUSPENDED)


def shown(job_id: str, run: Run) -> dict[str, str]:
    """Return what `scontrol show job` prints about the job. Raises NoAnswer if it is cut off, and CommandError."""
    answer = run(["scontrol", "show", "job", "--oneliner", job_id])
    if answer and not whole_lines(answer):  # a site's wrapper may print nothing at all
        # From a cut-off answer a preempted job would be taken for a cancelled one.
        raise NoAnswer(f"scontrol: its answer about job {job_id} is incomplete; try again later")
    return parse_scontrol(answer)


def parse_scontrol(output: str) -> dict[str, str]:
    """Return the KEY=VALUE pairs of a line of `scontrol show --oneliner`; a value ends at its first blank."""
    return dict(item.split("=", 1) for item in output.split() if "=" in item)


def local_time(text: str | None) -> float | None:
    """Return Slurm's local time, "2026-11-20T10:42:00", in seconds since the epoch; None for "None", "Unknown" and
    "N/A".
    """
    try:
        return datetime.fromisoformat(text or "").timestamp()
    except ValueError:
        return None


def host_names(node_list: str) -> list[str]:
    """Return the host names in Slurm's short form, such as "gpu[1-3,07],login" (scontrol(1), show hostnames)."""
    names = re.findall(r"(?:[^,\[]|\[[^\]]*\])+", node_list)
    return [host for name in names for host in _spelt_out(name)]


def _spelt_out(name: str) -> list[str]:
    before, bracket, rest = name.partition("[")
    if not bracket:
        return [name]
    numbers, _, after = rest.partition("]")
    return [f"{before}{number}{end}" for number in _numbers(numbers) for end in _spelt_out(after)]


def _numbers(ranges: str) -> list[str]:
    """Return the numbers in "08-10,15" with their leading zeros: 08, 09, 10, 15."""
    found = []
    for item in ranges.split(","):
        first, _, last = item.partition("-")
        found += [f"{number:0{len(first)}}" for number in range(int(first), int(last or first) + 1)]
    return found
