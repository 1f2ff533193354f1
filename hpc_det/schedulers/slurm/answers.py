"""What squeue and scontrol answer about jobs, after squeue(1) and scontrol(1).

squeue leaves out jobs that Slurm has forgotten, without an error, and refuses a question about a single one. A site's
wrapper or cache may cut off its answer, so an answer that leaves out jobs proves nothing: the question is asked once
more, in the opposite order. Where both answers hold the same jobs, nothing was cut off. Where both hold none, the
newest one is asked about alone: squeue's refusal comes with an exit code, which nothing cuts off.
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

# squeue(1), JOB STATE CODES. A state that is not here is news from a newer Slurm: UNKNOWN, never a crash.
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
    "COMPLETING": JobState.RUNNING,  # its processes may still write; a requeued job passes through here too
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
LARGEST_ARRAY = 4_000_001
"""slurm.conf(5), MaxArraySize."""
_ORDER = (JobState.RUNNING, JobState.HELD, JobState.QUEUED, JobState.UNKNOWN, JobState.ENDED)
# squeue(1), JOB REASON CODES, as far as somebody has to act. slurm.conf(5), MaxBatchRequeue: 5 by default.
REASONS = {
    "JobHeldAdmin": "JobHeldAdmin: held by the site, also after too many requeues; ask it for `scontrol release`",
    "JobHeldUser": "JobHeldUser: let it go with `hpc-det job release`",
    "launch failed requeued held": "launch failed requeued held: its node is ill; then `hpc-det job release`",
}
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


def parse_squeue(output: str) -> dict[str, JobStatus]:
    """The lines of `--format=%i|%T|%r`."""
    rows = (line.split("|", 2) for line in output.splitlines() if line.count("|") >= 2)
    return {
        job_id: _status(job_id, state.strip(), reason.strip())
        for shown_id, state, reason in rows
        for job_id in _elements(shown_id.strip())
    }


def _elements(shown_id: str) -> list[str]:
    """The elements of `20_[4-6:2,9%2]`, which wait together; another id stands for itself."""
    array, bracket, _ = shown_id.partition("_[")
    return [f"{array}_{index}" for index in indices(shown_id)] if bracket else [shown_id]


def indices(array_id: str) -> list[int]:
    """4, 6 and 9 of `20_[4-6:2,9%2]`. Raises ValueError for more than an array can have."""
    ranges = re.findall(r"(\d+)(?:-(\d+)(?::(\d+))?)?", array_id.partition("_[")[2].partition("%")[0])
    found = [range(int(first), int(last or first) + 1, int(step or 1)) for first, last, step in ranges]
    if any(some.stop > LARGEST_ARRAY for some in found):
        raise ValueError(f"no array has an element {max(some.stop for some in found) - 1}")
    return [index for some in found for index in some]


def with_arrays(elements: Mapping[str, JobStatus]) -> dict[str, JobStatus]:
    """The elements `A_3` and, under the id `A`, all of them together."""
    arrays: dict[str, list[JobStatus]] = {}
    for job_id, status in elements.items():
        arrays.setdefault(job_id.partition("_")[0], []).append(status)
    return {**elements, **{array: _together(statuses) for array, statuses in arrays.items()}}


def _together(statuses: Sequence[JobStatus]) -> JobStatus:
    first = min(statuses, key=lambda status: (_ORDER.index(status.state), status.is_suspended))
    return replace(first, held=tuple(job_id for status in statuses for job_id in status.held))


def _status(job_id: str, state: str, reason: str) -> JobStatus:
    found = STATES.get(state, JobState.UNKNOWN)
    # A requeued job waits for cred_expire + 1 = 121 s with this reason (slurmctld, batch_requeue_fini).
    if found is JobState.QUEUED and reason == "BeginTime":
        return JobStatus(JobState.HELD, reason, held=(job_id,))
    return JobStatus(found, REASONS.get(reason, reason), is_suspended=state in SUSPENDED)


def shown(job_id: str, run: Run) -> dict[str, str]:
    """Raises NoAnswer where the answer is cut off: a preempted job would look like a cancelled one."""
    answer = run(["scontrol", "show", "job", "--oneliner", job_id])
    if answer and not whole_lines(answer):  # a site's wrapper may show nothing at all
        raise NoAnswer(f"scontrol: its answer about job {job_id} is cut off; try again later")
    return parse_scontrol(answer)


def parse_scontrol(output: str) -> dict[str, str]:
    """A line of `scontrol show --oneliner`: KEY=VALUE, as far as values hold no blanks."""
    return dict(item.split("=", 1) for item in output.split() if "=" in item)


def local_time(text: str | None) -> float | None:
    """Slurm's local time, "2026-11-20T10:42:00"; None for "None", "Unknown" and "N/A"."""
    try:
        return datetime.fromisoformat(text or "").timestamp()
    except ValueError:
        return None


def host_names(node_list: str) -> list[str]:
    """Slurm's short form, "gpu[1-3,07],login", in full (scontrol(1), show hostnames)."""
    names = re.findall(r"(?:[^,\[]|\[[^\]]*\])+", node_list)
    return [host for name in names for host in _spelt_out(name)]


def _spelt_out(name: str) -> list[str]:
    before, bracket, rest = name.partition("[")
    if not bracket:
        return [name]
    numbers, _, after = rest.partition("]")
    return [f"{before}{number}{end}" for number in _numbers(numbers) for end in _spelt_out(after)]


def _numbers(ranges: str) -> list[str]:
    """ "08-10,15" is 08, 09, 10, 15."""
    found = []
    for item in ranges.split(","):
        first, _, last = item.partition("-")
        found += [f"{number:0{len(first)}}" for number in range(int(first), int(last or first) + 1)]
    return found
