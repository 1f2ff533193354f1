"""What the commands of PBS answer, recorded on OpenPBS 23.06. A failed query is no news, never a state."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from hpc_det.plan.job_plan import JobPlan
from hpc_det.schedulers.command import CommandError, Run
from hpc_det.schedulers.scheduler import JobState, JobStatus

SUSPENDED = ("S", "U")
"""By the scheduler or by `qsig`, and by the user who works at a workstation that is a node."""
# qstat(1B), job states. A letter that is not here is news from a newer PBS: UNKNOWN, never a crash.
STATES = {
    "Q": JobState.QUEUED,
    "H": JobState.QUEUED,  # for another job, or by its user's own qhold, which is not ours to lift
    "W": JobState.QUEUED,
    "T": JobState.QUEUED,
    "R": JobState.RUNNING,
    "S": JobState.RUNNING,
    "U": JobState.RUNNING,
    "E": JobState.RUNNING,  # its processes may still write; a requeued job passes through here too
    "X": JobState.ENDED,
    "F": JobState.ENDED,
}
IDS_AT_ONCE = 50
SCHEDULER = "Scheduler"
"""Who has ended a job that was preempted."""


def check_is_pbs(run: Run) -> None:
    """Torque, and the commands of the same names that Slurm may bring, drop what they do not know."""
    try:
        said = run(["qstat", "--version"])
    except CommandError as error:
        if "refused" not in str(error):  # absent, or without an answer
            raise
        said = str(error)
    if "pbs_version" not in said:
        raise CommandError(
            f"qstat --version says {said.strip()!r}: this is neither PBS Pro nor OpenPBS; Torque cannot be used, and "
            "where Slurm brings these commands, choose a profile with scheduler: slurm"
        )


def asked(job_ids: Sequence[str], run: Run) -> dict[str, JobStatus]:
    """A job is over when qstat says so of its id. That it says nothing of it is no news."""
    try:
        output, said = run(["qstat", "-f", "-F", "json", *job_ids]), ""
    except CommandError as error:
        output, said = error.output, str(error)
    known = dict(_jobs(output))
    return {job_id: known.get(job_id) or _unlisted(job_id, said) for job_id in job_ids}


def _jobs(output: str) -> Iterator[tuple[str, JobStatus]]:
    with suppress(ValueError):
        for job_id, job in json.loads(output).get("Jobs", {}).items():
            yield job_id, status_of(job)


def status_of(job: Mapping[str, Any]) -> JobStatus:
    """Of a job's attributes, as qstat -f tells them."""
    letter = str(job.get("job_state"))
    state = _of_elements(job) if letter == "B" else STATES.get(letter, JobState.UNKNOWN)
    reason = str(job.get("comment") or {"H": "held", "W": "waits for its time"}.get(letter, ""))
    return JobStatus(state, reason, is_suspended=letter in SUSPENDED)


def _of_elements(array: Mapping[str, Any]) -> JobState:
    """`Queued:1 Running:2 Exiting:0 Expired:3`: an array runs while any of its elements does."""
    counts = {name: int(count) for name, count in re.findall(r"(\w+):(\d+)", str(array.get("array_state_count")))}
    return JobState.RUNNING if counts.get("Running") or counts.get("Exiting") else JobState.QUEUED


def waiting(job_id: str, run: Run) -> list[str]:
    """The job, or the elements of the array, as far as they have not begun."""
    jobs = dict(_jobs(run(["qstat", "-t", "-f", "-F", "json", job_id])))
    return [job for job, status in jobs.items() if status.state is JobState.QUEUED and "[]" not in job]


def _unlisted(job_id: str, said: str) -> JobStatus:
    if is_over(job_id, said):
        return JobStatus(JobState.ENDED, "finished, or forgotten by PBS")
    return JobStatus(JobState.UNKNOWN, said or "qstat: an answer without this job")


def is_over(job_id: str, said: str) -> bool:
    """Exit codes 153 and 35 speak for one of the jobs that were asked for; the words name each."""
    return (
        f"Unknown Job Id {job_id}" in said or f"{job_id} Job has finished" in said or f"has finished {job_id}" in said
    )


def shown(job_id: str, run: Run) -> dict[str, Any]:
    try:
        job: dict[str, Any] = json.loads(run(["qstat", "-f", "-F", "json", job_id]))["Jobs"][job_id]
    except (ValueError, KeyError):
        raise CommandError(f"qstat: no news of job {job_id} in its answer") from None
    return job


def ended_by(job: Mapping[str, Any]) -> str | None:
    """Who asked for the job's end, by name; PBS writes it down as soon as it tells the job. None: nobody did."""
    found = re.search(r"terminated by ([^@\s]+)@", str(job.get("comment", "")))
    return found and found[1]


def end_of(job: Mapping[str, Any]) -> float | None:
    started, limit = job.get("stime"), job.get("Resource_List", {}).get("walltime")
    if not started or limit is None:
        return None
    hours, minutes, seconds = (["0", "0", *str(limit).split(":")])[-3:]
    allowed = int(hours) * 3600 + int(minutes) * 60 + int(seconds)
    return datetime.strptime(started, "%a %b %d %H:%M:%S %Y").timestamp() + allowed


def end_by_our_clock(plan: JobPlan, env: Mapping[str, str]) -> float | None:
    """PBS writes the list of nodes right before the job starts."""
    if plan.time_limit_min is None:
        return None
    try:
        return os.stat(env["PBS_NODEFILE"]).st_mtime + 60 * plan.time_limit_min
    except (KeyError, OSError):
        return None
