"""PBS Pro and OpenPBS: commands and what they answer, after qsub(1B), qstat(1B) and recordings of OpenPBS 23.06."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from hpc_det.plan.job_plan import JobArray, JobPlan
from hpc_det.requeue import Cause
from hpc_det.schedulers.command import CommandError, Run, run_command
from hpc_det.schedulers.pbs_flags import INDEX, array_flags, directives, element_log, own_line, wanted
from hpc_det.schedulers.pbs_hosts import named_hosts
from hpc_det.schedulers.scheduler import JobState, JobStatus, Submission, agent_command, common_variables

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
BEING_REQUEUED = 60
"""The substate of a job that is ended, to be queued again."""
CLOCKS_DIFFER_S = 2.0
"""PBS kills at the limit or later, never before; the clocks of its hosts may differ a little."""


class Pbs:
    template = "pbs.sh.j2"
    has_queue = True

    def script_variables(self, plan: JobPlan, array: JobArray, script: Path) -> dict[str, object]:
        on_nodes = [plan.python, "-m", "hpc_det.launch.on_nodes", plan.start_agents_with, str(script.parent)]
        return {
            **common_variables(plan, array),
            "qsub": shlex.join(["qsub", *array_flags(array)]),
            "directives": [*directives(plan, script), *own_line(plan.submit_args)],
            "folder": shlex.quote(plan.folder),
            "element_log": element_log(script) if array.count > 1 else [],
            "start_agents": shlex.join(on_nodes),
            "agent": agent_command(plan),
        }

    def submit_command(self, submission: Submission, run: Run = run_command) -> list[str]:
        """Flags of the command line come before those of the script (qsub(1B)).

        All elements of an array have the same `select`, so none of its nodes can be named, or excluded.
        """
        _check_is_pbs(run)
        is_array = submission.array.count > 1 and submission.index is None
        flags = array_flags(submission.array) if is_array else []
        if submission.array.count > 1 and submission.index is not None:
            flags += ["-v", f"{INDEX}={submission.index}"]
        if submission.after:
            flags += ["-W", f"depend=afterany:{submission.after}"]
        if submission.exclude and not is_array:
            flags += ["-l", f"select={named_hosts(wanted(submission.script), submission.exclude, run)}"]
        return ["qsub", *flags, submission.script]

    def parse_submit(self, output: str) -> str:
        found = re.findall(r"^(\d+(?:\[\d*\])?\.\S+)$", output, re.MULTILINE)
        if len(found) != 1:
            raise ValueError(f"qsub: no job id in its answer {output.strip()!r}")
        return str(found[0])

    def status(self, job_ids: Sequence[str], run: Run) -> dict[str, JobStatus]:
        """Without -x: that needs a history, which a site may not keep, and says no more of the living."""
        found: dict[str, JobStatus] = {}
        for start in range(0, len(job_ids), IDS_AT_ONCE):
            found |= _asked(job_ids[start : start + IDS_AT_ONCE], run)
        return found

    def cancel(self, job_id: str, run: Run) -> None:
        try:
            run(["qdel", job_id])
        except CommandError as error:
            if not _is_over(job_id, str(error)):
                raise

    def release(self, job_id: str, run: Run) -> None:
        """A requeued job is held back by nobody but its user."""

    def job_id(self, env: Mapping[str, str]) -> str:
        """`12.server`, `12[3].server` for an array's element; `12[].server` is the array."""
        return env["PBS_JOBID"]

    def array_index(self, env: Mapping[str, str]) -> int:
        return int(env.get("PBS_ARRAY_INDEX") or env.get(INDEX) or 0)

    def share(self, plan: JobPlan, place: int) -> dict[str, str]:
        """Hosts and GPUs, by their places in the allocation: nothing in PBS divides them among the gangs of a job."""
        per_host = max(plan.job_slots_per_node // plan.ranks_per_node, 1)
        first = place * plan.nodes if plan.nodes > 1 else place // per_host
        slot = 0 if plan.nodes > 1 else place % per_host * plan.ranks_per_node
        slots = {"HPC_DET_SLOTS": _listed(slot, plan.ranks_per_node)} if plan.slot_type == "gpu" else {}
        return {"HPC_DET_HOSTS": _listed(first, plan.nodes), **slots}

    def node_rank(self, env: Mapping[str, str]) -> int:
        return int(env["HPC_DET_NODE_RANK"])

    def ends_at(self, plan: JobPlan, env: Mapping[str, str], run: Run) -> float | None:
        """PBS warns of no end, so its default limit counts too, where the plan has none."""
        with suppress(CommandError):  # qstat may be missing on compute nodes
            return _end(_shown(self.job_id(env), run))
        return _end_by_our_clock(plan, env)

    def stop_cause(self, plan: JobPlan, env: Mapping[str, str], signalled_at: float, run: Run) -> Cause:
        """TERM comes for all alike. A deletion names who asked for it, the scheduler when it preempts."""
        try:
            job = _shown(self.job_id(env), run)
        except CommandError:
            job = {}
        if by := re.search(r"terminated by ([^@\s]+)@", str(job.get("comment", ""))):
            return Cause.PREEMPTED if by[1] == "Scheduler" else Cause.CANCELLED
        end = _end(job) if job else _end_by_our_clock(plan, env)
        is_late = end is not None and signalled_at >= end - CLOCKS_DIFFER_S
        return Cause.TIME_LIMIT if is_late and job.get("substate") != BEING_REQUEUED else Cause.PREEMPTED

    def requeue(self, job_id: str, run: Run) -> None:
        """Where PBS preempts by requeue it does so whatever the job does; nobody but operators can do it otherwise."""
        job = _shown(job_id, run)
        if job.get("substate") == BEING_REQUEUED or STATES.get(str(job.get("job_state"))) is JobState.QUEUED:
            return
        raise CommandError(
            "PBS lets no user requeue a job; set `resume` in the cluster profile to successor, resubmit or chain"
        )


def _check_is_pbs(run: Run) -> None:
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


def _asked(job_ids: Sequence[str], run: Run) -> dict[str, JobStatus]:
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
            yield job_id, _status(job)


def _status(job: Mapping[str, Any]) -> JobStatus:
    letter = str(job.get("job_state"))
    state = _of_elements(job) if letter == "B" else STATES.get(letter, JobState.UNKNOWN)
    return JobStatus(state, str(job.get("comment") or {"H": "held", "W": "waits for its time"}.get(letter, "")))


def _of_elements(array: Mapping[str, Any]) -> JobState:
    """`Queued:1 Running:2 Exiting:0 Expired:3`: an array runs while any of its elements does."""
    counts = {name: int(count) for name, count in re.findall(r"(\w+):(\d+)", str(array.get("array_state_count")))}
    return JobState.RUNNING if counts.get("Running") or counts.get("Exiting") else JobState.QUEUED


def _unlisted(job_id: str, said: str) -> JobStatus:
    if _is_over(job_id, said):
        return JobStatus(JobState.ENDED, "finished, or forgotten by PBS")
    return JobStatus(JobState.UNKNOWN, said or "qstat: an answer without this job")


def _is_over(job_id: str, said: str) -> bool:
    """Exit codes 153 and 35 speak for one of the jobs that were asked for; the words name each."""
    return (
        f"Unknown Job Id {job_id}" in said or f"{job_id} Job has finished" in said or f"has finished {job_id}" in said
    )


def _shown(job_id: str, run: Run) -> dict[str, Any]:
    try:
        job: dict[str, Any] = json.loads(run(["qstat", "-f", "-F", "json", job_id]))["Jobs"][job_id]
    except (ValueError, KeyError):
        raise CommandError(f"qstat: no news of job {job_id} in its answer") from None
    return job


def _end(job: Mapping[str, Any]) -> float | None:
    started, limit = job.get("stime"), job.get("Resource_List", {}).get("walltime")
    if not started or limit is None:
        return None
    hours, minutes, seconds = (["0", "0", *str(limit).split(":")])[-3:]
    allowed = int(hours) * 3600 + int(minutes) * 60 + int(seconds)
    return datetime.strptime(started, "%a %b %d %H:%M:%S %Y").timestamp() + allowed


def _end_by_our_clock(plan: JobPlan, env: Mapping[str, str]) -> float | None:
    """PBS writes the list of nodes right before the job starts."""
    if plan.time_limit_min is None:
        return None
    try:
        return os.stat(env["PBS_NODEFILE"]).st_mtime + 60 * plan.time_limit_min
    except (KeyError, OSError):
        return None


def _listed(first: int, count: int) -> str:
    return ",".join(map(str, range(first, first + count)))
