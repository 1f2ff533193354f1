"""Queries about jobs with qstat, and parsers of the answers of qstat and qsub, after recordings of OpenPBS 23.06.

`qstat -f -F json A B C` prints only the first job that PBS knows. With -E (in every version that has -F json) it prints
all jobs that PBS knows and omits the others without an error. The omitted ones are queried again without -E: PBS then
reports each job that has ended, as unknown (exit code 153) or as finished (exit code 35). This takes 0.2 s per job, so
each command names only a few. The jobs of each server are queried separately: with -E, an id of an unreachable server
may hide all other jobs.

A failed query never changes the state of a job.

Ids have two forms: that of PBS, `12.server` and `12[3].server`, where `12[].server` is an array; and that of submitit,
`12` and `12_3`, which submitit splits at "_".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from hpc_det.schedulers.scheduler import CommandError, JobState, JobStatus, Run, array_of, reading


class Meaning(NamedTuple):
    """The meaning of a letter for a job's state: the JobState, and the corresponding Slurm state, which submitit
    understands.
    """

    ours: JobState
    word: str


# qstat(1B), job states.
STATES = {
    "Q": Meaning(JobState.QUEUED, "PENDING"),
    "H": Meaning(JobState.QUEUED, "PENDING"),  # waits for another job, or was held by a person, who has to release it
    "W": Meaning(JobState.QUEUED, "PENDING"),
    "T": Meaning(JobState.QUEUED, "PENDING"),  # on its way to another queue
    "M": Meaning(JobState.UNKNOWN, "PENDING"),  # moved to another server, which knows its state
    "B": Meaning(JobState.RUNNING, "RUNNING"),  # an array that has begun; see its elements
    "R": Meaning(JobState.RUNNING, "RUNNING"),
    "S": Meaning(JobState.RUNNING, "PREEMPTED"),  # suspended by the scheduler or qsig; submitit has no such state
    "U": Meaning(JobState.RUNNING, "PREEMPTED"),  # suspended by the user of a workstation that is a node
    "E": Meaning(JobState.RUNNING, "COMPLETING"),  # its processes may still write; also before a requeue
    "X": Meaning(JobState.ENDED, "COMPLETED"),
    "F": Meaning(JobState.ENDED, "COMPLETED"),  # `word_of` returns how it ended
}
FROM_A_NEWER_PBS = Meaning(JobState.UNKNOWN, "UNKNOWN")
"""The meaning of a letter that is not in the table, which a newer PBS may print."""
SUSPENDED = ("S", "U")
"""The letters of suspended jobs."""
_WALLTIME_EXCEEDED, _DELETED = -29, 91
"""_WALLTIME_EXCEEDED is an Exit_status; _DELETED is the substate after qdel."""
# pbs_job_attributes(7B), Hold_Types.
_HOLDS = {
    "u": "its user; release it with `hpc-det job release {job_id}`, or with `qrls {job_id}`",
    "o": "an operator of the site, who can release it with `qrls -h o {job_id}`",
    "s": "PBS or a manager of the site, who can release it with `qrls -h s {job_id}`",
    "p": "PBS for a wrong password; a manager of the site can release it with `qrls -h p {job_id}`",
}
SCHEDULER = "Scheduler"
"""The user name that PBS records as the one who ended a preempted job."""
IDS_AT_ONCE = 200
"""Maximum number of ids in one command."""
NAMES_AT_ONCE = 50
"""Maximum number of ids in one query without -E."""
_ID = r"(\d[^\s;]*)"
_A_JOB = re.compile(r"(?<![\w.-])\d+(\[\d*\])?\.[A-Za-z]")
"""Matches the id of a job in an error message."""
_OVER = re.compile(f"Unknown Job Id {_ID}|{_ID} Job has finished|has finished {_ID}")
_PBS_ID = re.compile(r"([0-9]+)(?:\[([0-9]*)\])?(?:\.\S+)?")


def from_pbs(pbs_id: str) -> str:
    """Return submitit's form of a PBS id: `12_3` for `12[3].server`, and `12` for `12[].server`.

    Raises ValueError if `pbs_id` is not a job id of PBS.
    """
    found = _PBS_ID.fullmatch(pbs_id.strip())
    if not found:
        raise ValueError(f"{pbs_id!r} is not a job id of PBS, such as 12.server or 12[3].server")
    return f"{found[1]}_{found[2]}" if found[2] else found[1]


def to_pbs(job_id: str) -> str:
    """Return the PBS id for submitit's form, `12[3]` for `12_3`, without the server, which the commands of PBS add."""
    number, _, index = job_id.partition("_")
    return f"{number}[{index}]" if index else number


def submitted_id(output: str) -> str:
    """Return the job id in the output of qsub. Raises ValueError if there is not exactly one."""
    found = re.findall(r"^(\d+(?:\[\d*\])?\.\S+)$", output, re.MULTILINE)
    if len(found) != 1:  # a site's wrapper may print other lines
        raise ValueError(f"qsub: expected one job id in its output, got {output.strip()!r}")
    return str(found[0])


@dataclass(frozen=True)
class Answer:
    """The combined answers of qstat. Jobs have the ids that PBS prints, `12.server`, whichever form the query used."""

    jobs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The attributes of each job that PBS knows; with -t, also of each element of an array."""
    over: frozenset[str] = frozenset()
    """Ids that PBS reports as ended. The state of a job that is neither here nor in `jobs` is unknown."""
    trouble: str = ""
    """The error output of commands that failed; "" if none failed."""

    def __or__(self, other: Answer) -> Answer:
        troubles = filter(None, dict.fromkeys((self.trouble, other.trouble)))
        return Answer({**self.jobs, **other.jobs}, self.over | other.over, "; ".join(troubles))

    def why_silent(self, job_id: str) -> str:
        """Return why the state of `job_id` is unknown: the error output without the lines that name only other jobs."""
        own = [line for line in self.trouble.split("; ") if job_id in line or not _A_JOB.search(line)]
        return "; ".join(own) if self.trouble and own else "qstat: its answer does not contain this job"


def ask(job_ids: Sequence[str], run: Run, *flags: str) -> Answer:
    """Query these jobs. A failed query yields an `Answer` with `trouble` and without its jobs.

    A job is in `over` only if PBS reports its id as ended.
    """
    answer = Answer()
    for of_server in _by_server(job_ids):
        for some in pieces(of_server, IDS_AT_ONCE):
            answer |= _asked(some, run, flags)
    return answer


def ask_elements(job_ids: Iterable[str], run: Run) -> Answer:
    """Query these jobs and elements of arrays. Ids are in submitit's form, both in `job_ids` and in the answer.

    Ended ones keep their attributes if the site keeps a job history, which is not the default of PBS.
    """
    answer = ask(sorted({array_of(to_pbs(job_id)) for job_id in job_ids}), run, "-t")
    past = _listed(sorted(answer.over), run, "-x", "-t") if answer.over else Answer()
    jobs = {from_pbs(pbs_id): job for pbs_id, job in {**past.jobs, **answer.jobs}.items() if "[]" not in pbs_id}
    return Answer(jobs, frozenset(map(from_pbs, answer.over)), answer.trouble)


def _listed(job_ids: Sequence[str], run: Run, *flags: str) -> Answer:
    """Query the jobs with one command; the answer omits those that PBS does not know."""
    return _qstat(run, "-E", *flags, *job_ids)


def over_in(said: str) -> frozenset[str]:
    """Return the ids that the error output of a command reports as unknown or finished."""
    # The exit code is not used: it applies to only one of the jobs.
    return frozenset(job_id for found in _OVER.finditer(said) for job_id in found.groups() if job_id)


def _asked(job_ids: Sequence[str], run: Run, flags: Sequence[str]) -> Answer:
    """Query jobs of one server, first all together, then those without an answer by name."""
    first = _listed(job_ids, run, *flags)
    named = set(map(_number, (*first.jobs, *first.over)))
    left_out = [job_id for job_id in job_ids if _number(job_id) not in named]
    if first.trouble and not named:
        return first
    answer = Answer()
    for some in pieces(left_out, NAMES_AT_ONCE):
        piece = _qstat(run, *flags, *some)
        answer |= piece
        if piece.trouble and not (piece.jobs or piece.over):  # the next query would take as long to fail
            break
    return answer | first


def _by_server(job_ids: Sequence[str]) -> list[list[str]]:
    """Return the ids grouped by the server in them."""
    servers: dict[str, list[str]] = {}
    for job_id in job_ids:
        servers.setdefault(job_id.partition(".")[2], []).append(job_id)
    return list(servers.values())


def pieces(job_ids: Sequence[str], longest: int) -> list[Sequence[str]]:
    """Return the ids in slices of at most `longest`."""
    return [job_ids[start : start + longest] for start in range(0, len(job_ids), longest)]


def _number(job_id: str) -> str:
    """Return the id without the server: `12[3]` for `12[3].server`."""
    return job_id.partition(".")[0]


def _qstat(run: Run, *arguments: str) -> Answer:
    try:
        output, said = run(["qstat", "-f", "-F", "json", *arguments]), ""
    except CommandError as error:
        output, said = error.output, str(error)
    return Answer(dict(_jobs(output)), over_in(said), said)


def _jobs(output: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each job's id and attributes from the JSON output of qstat; nothing if it cannot be parsed."""
    with suppress(CommandError), reading("qstat"):
        jobs = json.loads(output).get("Jobs", {}).items()
        yield from [(job_id, job) for job_id, job in jobs if isinstance(job, dict)]


def check_is_pbs(run: Run) -> None:
    """Raise CommandError if the qstat on PATH is not that of PBS Pro or OpenPBS."""
    try:
        # Torque's commands, and the wrappers of the same names that Slurm may bring, ignore flags that they do not
        # know.
        said = run(["qstat", "--version"])
    except CommandError as error:
        if error.returncode is None:  # qstat was not found, or did not answer
            raise
        said = str(error)
    if "pbs_version" not in said:
        raise CommandError(
            f"qstat --version printed {said.strip()!r}: this is neither PBS Pro nor OpenPBS; Torque is not supported, "
            "and if Slurm provides these commands, choose a profile with scheduler: slurm"
        )


def statuses(job_ids: Sequence[str], run: Run) -> dict[str, JobStatus]:
    """Return the status of each job: ENDED only if qstat reports its id as ended, UNKNOWN if it reports nothing about
    it.
    """
    answer = ask(job_ids, run)
    return {job_id: _status_in(answer, job_id) for job_id in job_ids}


def element_statuses(job_ids: Sequence[str], run: Run) -> dict[str, JobStatus]:
    """Return the status of each job or element, as `statuses` does, for ids in submitit's form."""
    answer = ask_elements(job_ids, run)
    return {job_id: _status_in(answer, job_id) for job_id in job_ids}


def _status_in(answer: Answer, job_id: str) -> JobStatus:
    """Return the status of a job from the combined answers of qstat."""
    if job_id in answer.jobs:
        try:
            return status_of(answer.jobs[job_id], job_id)
        except CommandError as error:
            return JobStatus(JobState.UNKNOWN, str(error))
    # PBS may report the end of an element with the id of its array.
    if answer.over & {job_id, array_of(job_id)}:
        return JobStatus(JobState.ENDED, "finished, or forgotten by PBS")
    return JobStatus(JobState.UNKNOWN, answer.why_silent(job_id))


@reading("qstat")
def status_of(job: Mapping[str, Any], job_id: str) -> JobStatus:
    """Return the status of a job from its attributes, as `qstat -f` prints them."""
    letter = str(job.get("job_state"))
    state = _of_elements(job) if letter == "B" else state_of(job).ours
    if letter == "H":  # the comment may be older than the hold: PBS does not replace it
        return JobStatus(state, why_held(job, job_id))
    reason = str(job.get("comment") or {"W": "waits for its start time"}.get(letter, ""))
    return JobStatus(state, reason, is_suspended=letter in SUSPENDED)


def state_of(job: Mapping[str, Any]) -> Meaning:
    """Return the meaning of the state in a job's attributes. An array that has begun is RUNNING even if all elements
    wait.
    """
    return STATES.get(str(job.get("job_state")), FROM_A_NEWER_PBS)


def word_of(answer: Answer, job_id: str) -> str | None:
    """Return the state of a job as submitit names it, "ENDED" if PBS no longer has its result, or None if it is
    unknown.
    """
    if job := answer.jobs.get(job_id):
        return _word(job)
    return "ENDED" if answer.over & {job_id, array_of(job_id)} else None


def _word(job: Mapping[str, Any]) -> str:
    """Return submitit's name for the state of a job that PBS knows."""
    state, status = state_of(job), job.get("Exit_status")
    if state.ours is not JobState.ENDED:
        return state.word
    # State F, and X of an element, do not show the result. A job that never ran has no Exit_status and may have
    # substate 92, as if it had succeeded.
    if status == _WALLTIME_EXCEEDED:
        return "TIMEOUT"
    if status is None or job.get("substate") == _DELETED:
        return "CANCELLED"
    return "FAILED" if status else state.word


def holds_of(job: Mapping[str, Any]) -> str:
    """Return the letters of `Hold_Types` that a person has to release."""
    # PBS itself sets hold "s" on a job that depends on another, and releases it at the end of that job.
    waits = re.search(r"\bafter", str(job.get("depend", "")))
    return "".join(hold for hold in str(job.get("Hold_Types", "")) if hold in _HOLDS and not (hold == "s" and waits))


def why_held(job: Mapping[str, Any], job_id: str) -> str:
    """Return who or what holds the job, and the command that releases it."""
    if holds := holds_of(job):
        return "; ".join(f"held by {_HOLDS[hold].format(job_id=job_id)}" for hold in holds)
    ids = waits_for(job)
    return f"held until the end of {', '.join(ids)}" if ids else str(job.get("comment") or "held")


def waits_for(job: Mapping[str, Any]) -> list[str]:
    """Return the ids of the jobs whose start or end the job waits for (`-W depend=after...`)."""
    found = re.findall(r"\bafter\w*((?::[^:,]+)+)", str(job.get("depend", "")))
    return [named.partition("@")[0] for jobs in found for named in jobs.strip(":").split(":")]


def _of_elements(array: Mapping[str, Any]) -> JobState:
    """Return RUNNING if any element of the array runs, else QUEUED."""
    return JobState.RUNNING if elements_in(array)[1] else JobState.QUEUED


def elements_in(array: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of waiting and running elements of an array.

    They are parsed from an attribute such as `Queued:1 Running:2 Exiting:0 Expired:3`.
    """
    counts = {name: int(count) for name, count in re.findall(r"(\w+):(\d+)", str(array.get("array_state_count")))}
    return counts.get("Queued", 0), counts.get("Running", 0) + counts.get("Exiting", 0)


@reading("qstat")
def waiting(job_id: str, run: Run) -> list[str]:
    """Return the job, or the elements of the array, if they wait in the queue. Raises CommandError."""
    jobs: dict[str, Any] = json.loads(run(["qstat", "-t", "-f", "-F", "json", job_id])).get("Jobs", {})
    states = {job: status_of(attributes, job).state for job, attributes in jobs.items()}
    return [job for job, state in states.items() if state is JobState.QUEUED and "[]" not in job]


@reading("qstat")
def shown(job_id: str, run: Run) -> dict[str, Any]:
    """Return the attributes of a job. Raises CommandError."""
    return dict(json.loads(run(["qstat", "-f", "-F", "json", job_id]))["Jobs"][job_id])


def shown_or_nothing(job_id: str, run: Run) -> dict[str, Any]:
    """Return the attributes of a job; empty if qstat fails, since compute nodes may not have it."""
    try:
        return shown(job_id, run)
    except CommandError:
        return {}


def ended_by(job: Mapping[str, Any]) -> str | None:
    """Return the name of the user or scheduler that ended the job; None if PBS records none."""
    # PBS writes this comment as soon as it signals the job.
    found = re.search(r"terminated by ([^@\s]+)@", str(job.get("comment", "")))
    return found and found[1]


@reading("qstat")
def end_of(job: Mapping[str, Any]) -> float | None:
    """Return when the job reaches its walltime, in seconds since the epoch; None without a walltime or before its
    start.
    """
    started, limit = job.get("stime"), job.get("Resource_List", {}).get("walltime")
    if not started or limit is None:
        return None
    hours, minutes, seconds = (["0", "0", *str(limit).split(":")])[-3:]
    allowed = int(hours) * 3600 + int(minutes) * 60 + int(seconds)
    return moment(started) + allowed


def moment(text: str) -> float:
    """Return PBS' local time, such as "Fri Nov 20 08:44:42 2026", in seconds since the epoch. Raises ValueError."""
    return datetime.strptime(text, "%a %b %d %H:%M:%S %Y").timestamp()
