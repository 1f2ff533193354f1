"""What qstat and qsub of PBS answer about jobs, recorded on OpenPBS 23.06. A failed query is no news, never a state.

`qstat -f -F json A B C` prints only the first job that PBS knows. With -E (in every version that has -F json) it prints
all that PBS knows, and leaves out the others without an error. Those are asked about again without -E: PBS then names
each job that has ended, as unknown (exit code 153) or as finished (35). It takes 0.2 s for each of them, so a command
has few. Each server's jobs have commands of their own: with -E an id of a server that cannot be reached may hide all
other jobs.

Ids have two forms: PBS' own, `12.server` and `12[3].server`, where `12[].server` is an array, and that of submitit,
`12` and `12_3`, which it splits at "_".
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
    """What a letter of PBS means: to us, and as the word of Slurm's that submitit knows."""

    ours: JobState
    word: str


# qstat(1B), job states.
STATES = {
    "Q": Meaning(JobState.QUEUED, "PENDING"),
    "H": Meaning(JobState.QUEUED, "PENDING"),  # for another job, or by somebody's qhold, which is not ours to lift
    "W": Meaning(JobState.QUEUED, "PENDING"),
    "T": Meaning(JobState.QUEUED, "PENDING"),  # on its way to another queue
    "M": Meaning(JobState.UNKNOWN, "PENDING"),  # moved to another server, which has it now
    "B": Meaning(JobState.RUNNING, "RUNNING"),  # an array that has begun: its elements say more
    "R": Meaning(JobState.RUNNING, "RUNNING"),
    "S": Meaning(JobState.RUNNING, "PREEMPTED"),  # suspended by the scheduler or by qsig; submitit has no word for it
    "U": Meaning(JobState.RUNNING, "PREEMPTED"),  # suspended by the user of a workstation that is a node
    "E": Meaning(JobState.RUNNING, "COMPLETING"),  # its processes may still write; on the way to a requeue, too
    "X": Meaning(JobState.ENDED, "COMPLETED"),
    "F": Meaning(JobState.ENDED, "COMPLETED"),  # `word_of` says how
}
FROM_A_NEWER_PBS = Meaning(JobState.UNKNOWN, "UNKNOWN")
"""Of a letter that is not in the table: never a crash."""
SUSPENDED = ("S", "U")
_WALLTIME_EXCEEDED, _DELETED = -29, 91
"""An Exit_status, and the substate after qdel."""
# pbs_job_attributes(7B), Hold_Types.
_HOLDS = {
    "u": "its user; let it go with `hpc-det job release {job_id}`, or with `qrls {job_id}`",
    "o": "an operator of the site, who can let it go with `qrls -h o {job_id}`",
    "s": "PBS or a manager of the site, who can let it go with `qrls -h s {job_id}`",
    "p": "PBS for a wrong password; a manager of the site can let it go with `qrls -h p {job_id}`",
}
SCHEDULER = "Scheduler"
"""Who has ended a job that was preempted."""
IDS_AT_ONCE = 200
NAMES_AT_ONCE = 50
"""Without -E."""
_ID = r"(\d[^\s;]*)"
_A_JOB = re.compile(r"(?<![\w.-])\d+(\[\d*\])?\.[A-Za-z]")
_OVER = re.compile(f"Unknown Job Id {_ID}|{_ID} Job has finished|has finished {_ID}")
_PBS_ID = re.compile(r"([0-9]+)(?:\[([0-9]*)\])?(?:\.\S+)?")


def from_pbs(pbs_id: str) -> str:
    """submitit's id: `12[3].server` -> `12_3`, and `12[].server` -> `12`. Raises ValueError for no id of PBS."""
    found = _PBS_ID.fullmatch(pbs_id.strip())
    if not found:
        raise ValueError(f"{pbs_id!r} is no job id of PBS, such as 12.server or 12[3].server")
    return f"{found[1]}_{found[2]}" if found[2] else found[1]


def to_pbs(job_id: str) -> str:
    """PBS' id of submitit's `12_3`, without the server, which PBS' commands add."""
    number, _, index = job_id.partition("_")
    return f"{number}[{index}]" if index else number


def submitted_id(output: str) -> str:
    """The id in what qsub has printed. Raises ValueError where there is none, or more than one."""
    found = re.findall(r"^(\d+(?:\[\d*\])?\.\S+)$", output, re.MULTILINE)
    if len(found) != 1:  # a site's wrapper may talk beside it
        raise ValueError(f"qsub: no job id in its answer {output.strip()!r}")
    return str(found[0])


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
        for some in pieces(of_server, IDS_AT_ONCE):
            answer |= _asked(some, run, flags)
    return answer


def ask_elements(job_ids: Iterable[str], run: Run) -> Answer:
    """The same of jobs and elements by submitit's ids, in the answer, too. Of those that have just ended the history is
    asked: it says how they ended, where the site keeps one, which is not the default of PBS.
    """
    answer = ask(sorted({array_of(to_pbs(job_id)) for job_id in job_ids}), run, "-t")
    past = _listed(sorted(answer.over), run, "-x", "-t") if answer.over else Answer()
    jobs = {from_pbs(pbs_id): job for pbs_id, job in {**past.jobs, **answer.jobs}.items() if "[]" not in pbs_id}
    return Answer(jobs, frozenset(map(from_pbs, answer.over)), answer.trouble)


def _listed(job_ids: Sequence[str], run: Run, *flags: str) -> Answer:
    """One query for all that PBS knows."""
    return _qstat(run, "-E", *flags, *job_ids)


def over_in(said: str) -> frozenset[str]:
    """The jobs that this message of a command calls unknown or finished: an exit code speaks for one of them only."""
    return frozenset(job_id for found in _OVER.finditer(said) for job_id in found.groups() if job_id)


def _asked(job_ids: Sequence[str], run: Run, flags: Sequence[str]) -> Answer:
    first = _listed(job_ids, run, *flags)
    named = set(map(_number, (*first.jobs, *first.over)))
    left_out = [job_id for job_id in job_ids if _number(job_id) not in named]
    if first.trouble and not named:
        return first
    answer = Answer()
    for some in pieces(left_out, NAMES_AT_ONCE):
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


def pieces(job_ids: Sequence[str], longest: int) -> list[Sequence[str]]:
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


def check_is_pbs(run: Run) -> None:
    """Torque, and the commands of the same names that Slurm may bring, drop what they do not know."""
    try:
        said = run(["qstat", "--version"])
    except CommandError as error:
        if error.returncode is None:  # absent, or without an answer
            raise
        said = str(error)
    if "pbs_version" not in said:
        raise CommandError(
            f"qstat --version says {said.strip()!r}: this is neither PBS Pro nor OpenPBS; Torque cannot be used, and "
            "where Slurm brings these commands, choose a profile with scheduler: slurm"
        )


def statuses(job_ids: Sequence[str], run: Run) -> dict[str, JobStatus]:
    """A job is over when qstat says so of its id. That it says nothing of it is no news."""
    answer = ask(job_ids, run)
    return {job_id: _status_in(answer, job_id) for job_id in job_ids}


def element_statuses(job_ids: Sequence[str], run: Run) -> dict[str, JobStatus]:
    """The same by submitit's ids."""
    answer = ask_elements(job_ids, run)
    return {job_id: _status_in(answer, job_id) for job_id in job_ids}


def _status_in(answer: Answer, job_id: str) -> JobStatus:
    """PBS may call the end of an element by its array's id."""
    if job_id in answer.jobs:
        try:
            return status_of(answer.jobs[job_id], job_id)
        except CommandError as error:
            return JobStatus(JobState.UNKNOWN, str(error))
    if answer.over & {job_id, array_of(job_id)}:
        return JobStatus(JobState.ENDED, "finished, or forgotten by PBS")
    return JobStatus(JobState.UNKNOWN, answer.why_silent(job_id))


@reading("qstat")
def status_of(job: Mapping[str, Any], job_id: str) -> JobStatus:
    """Of a job's attributes, as qstat -f tells them."""
    letter = str(job.get("job_state"))
    state = _of_elements(job) if letter == "B" else state_of(job).ours
    if letter == "H":  # PBS keeps the comment of before
        return JobStatus(state, why_held(job, job_id))
    reason = str(job.get("comment") or {"W": "waits for its time"}.get(letter, ""))
    return JobStatus(state, reason, is_suspended=letter in SUSPENDED)


def state_of(job: Mapping[str, Any]) -> Meaning:
    """Of a job's attributes; of an array, whose elements may all wait, that it has begun."""
    return STATES.get(str(job.get("job_state")), FROM_A_NEWER_PBS)


def word_of(answer: Answer, job_id: str) -> str | None:
    """A job's state as submitit names it; "ENDED" where PBS has forgotten how it ended. None: no news."""
    if job := answer.jobs.get(job_id):
        return _word(job)
    return "ENDED" if answer.over & {job_id, array_of(job_id)} else None


def _word(job: Mapping[str, Any]) -> str:
    """State F alone, or X of an array's element, says nothing. What never ran has no exit status, and may have substate
    92, as if it had succeeded.
    """
    state, status = state_of(job), job.get("Exit_status")
    if state.ours is not JobState.ENDED:
        return state.word
    if status == _WALLTIME_EXCEEDED:
        return "TIMEOUT"
    if status is None or job.get("substate") == _DELETED:
        return "CANCELLED"
    return "FAILED" if status else state.word


def holds_of(job: Mapping[str, Any]) -> str:
    """Those of `Hold_Types` that somebody has to lift: PBS itself holds a job that waits for the end of another."""
    waits = re.search(r"\bafter", str(job.get("depend", "")))
    return "".join(hold for hold in str(job.get("Hold_Types", "")) if hold in _HOLDS and not (hold == "s" and waits))


def why_held(job: Mapping[str, Any], job_id: str) -> str:
    """By whom, and the command that releases it."""
    if holds := holds_of(job):
        return "; ".join(f"held by {_HOLDS[hold].format(job_id=job_id)}" for hold in holds)
    waits_for = re.findall(r"\bafter\w*((?::[^:,]+)+)", str(job.get("depend", "")))
    ids = [job.partition("@")[0] for jobs in waits_for for job in jobs.strip(":").split(":")]
    return f"held until the end of {', '.join(ids)}" if ids else str(job.get("comment") or "held")


def _of_elements(array: Mapping[str, Any]) -> JobState:
    """An array runs while any of its elements does."""
    return JobState.RUNNING if elements_in(array)[1] else JobState.QUEUED


def elements_in(array: Mapping[str, Any]) -> tuple[int, int]:
    """How many of an array's elements wait, and how many run: `Queued:1 Running:2 Exiting:0 Expired:3`."""
    counts = {name: int(count) for name, count in re.findall(r"(\w+):(\d+)", str(array.get("array_state_count")))}
    return counts.get("Queued", 0), counts.get("Running", 0) + counts.get("Exiting", 0)


@reading("qstat")
def waiting(job_id: str, run: Run) -> list[str]:
    """The job, or the elements of the array, as far as they have not begun."""
    jobs: dict[str, Any] = json.loads(run(["qstat", "-t", "-f", "-F", "json", job_id])).get("Jobs", {})
    states = {job: status_of(attributes, job).state for job, attributes in jobs.items()}
    return [job for job, state in states.items() if state is JobState.QUEUED and "[]" not in job]


@reading("qstat")
def shown(job_id: str, run: Run) -> dict[str, Any]:
    """A job's attributes."""
    return dict(json.loads(run(["qstat", "-f", "-F", "json", job_id]))["Jobs"][job_id])


def shown_or_nothing(job_id: str, run: Run) -> dict[str, Any]:
    """The same, but empty where qstat has no answer: it may be missing on compute nodes."""
    try:
        return shown(job_id, run)
    except CommandError:
        return {}


def ended_by(job: Mapping[str, Any]) -> str | None:
    """Who asked for the job's end, by name; PBS writes it down as soon as it tells the job. None: nobody did."""
    found = re.search(r"terminated by ([^@\s]+)@", str(job.get("comment", "")))
    return found and found[1]


@reading("qstat")
def end_of(job: Mapping[str, Any]) -> float | None:
    """When PBS ends it, in seconds since 1970. None: it has no limit, or has not started."""
    started, limit = job.get("stime"), job.get("Resource_List", {}).get("walltime")
    if not started or limit is None:
        return None
    hours, minutes, seconds = (["0", "0", *str(limit).split(":")])[-3:]
    allowed = int(hours) * 3600 + int(minutes) * 60 + int(seconds)
    return moment(started) + allowed


def moment(text: str) -> float:
    """PBS' local time, "Fri Nov 20 08:44:42 2026", in seconds since the epoch. Raises ValueError."""
    return datetime.strptime(text, "%a %b %d %H:%M:%S %Y").timestamp()
