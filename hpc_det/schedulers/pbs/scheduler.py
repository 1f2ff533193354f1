"""PBS Pro and OpenPBS as a scheduler, and the flags of qsub for a job.

After qsub(1B), qstat(1B), pbs_resources(7B) and recordings of OpenPBS 23.06.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hpc_det.errors import UsageError
from hpc_det.plan.job_plan import JobArray, JobPlan
from hpc_det.plan.pbs_chunk import pbs_resources
from hpc_det.plan.priority import pbs_priority_of
from hpc_det.requeue import Cause
from hpc_det.schedulers.pbs import answers
from hpc_det.schedulers.pbs.hosts import TooFewHosts, down_hosts, hosts_of, named_hosts
from hpc_det.schedulers.scheduler import CommandError, JobState, JobStatus, Run, Submission, reading, run_command
from hpc_det.store.folders import job_log

BEING_REQUEUED = 60
"""The substate of a job that PBS ends in order to requeue it."""
ELEMENT_LEAVES_S = 30.0
"""Seconds after which an element of an array that has submitted its successor has surely ended.

It has nothing left to do, and PBS takes a few seconds to notice its end.
"""
CLOCKS_DIFFER_S = 2.0
"""Tolerance in seconds between the clocks of PBS' hosts. PBS kills a job at its limit or later, never before."""
INDEX = "HPC_DET_INDEX"
"""The variable with the array index of an element that was submitted alone."""
LONGEST_NAME = 230
"""Maximum number of characters of a job's name."""
_TWO_WORDS = re.compile(r"(-\w)\s+(\S.*)")
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./^-]+")


class Pbs:
    """PBS Pro or OpenPBS."""

    template = "pbs.sh.j2"
    has_queue = True

    def script_variables(self, plan: JobPlan, array: JobArray, script: Path) -> dict[str, object]:
        on_nodes = [plan.python, "-m", "hpc_det.launch.on_nodes", plan.start_agents_with, str(script.parent)]
        return {
            "qsub": shlex.join(["qsub", *array_flags(array)]),
            "directives": [*directives(plan, script), *own_line(plan.submit_args)],
            "folder": shlex.quote(plan.folder),
            "element_log": element_log(script) if array.count > 1 else [],
            "start_agents": shlex.join(on_nodes),
        }

    def submit_command(self, submission: Submission, run: Run = run_command) -> list[str]:
        """Return the qsub command line.

        Raises CommandError if qstat is not that of PBS, and TooFewHosts if exclusions leave too few hosts.
        """
        answers.check_is_pbs(run)
        # Flags of the command line override those of the script (qsub(1B)).
        is_array = submission.array.count > 1 and submission.index is None
        flags = array_flags(submission.array) if is_array else []
        if submission.array.count > 1 and submission.index is not None:
            flags += ["-v", f"{INDEX}={submission.index}"]
        flags += _after(submission.after) if submission.after else []
        # All elements of an array have the same `select`, so hosts can be neither named nor excluded for them.
        if submission.exclude and not is_array:
            flags += ["-l", f"select={named_hosts(wanted(submission.script), submission.exclude, run)}"]
        return ["qsub", *flags, submission.script]

    def parse_submit(self, output: str, element: int | None = None) -> str:
        return answers.submitted_id(output)

    def status(self, job_ids: Sequence[str], run: Run) -> dict[str, JobStatus]:
        """Return the status of each job, from qstat without -x."""
        # -x needs a job history, which a site may not keep, and adds nothing about jobs that have not ended.
        return answers.statuses(job_ids, run)

    def cancel(self, job_id: str, run: Run) -> None:
        try:
            run(["qdel", job_id])
        except CommandError as error:
            if job_id not in answers.over_in(str(error)):
                raise

    def withdraw(self, job_id: str, run: Run) -> None:
        """Delete the job, or the waiting elements of the array, from the queue; running ones continue."""
        with _unless_over():
            # qdel of the array would also end its running elements, so the waiting ones are named.
            jobs = answers.waiting(job_id, run)
            for some in answers.pieces(jobs, answers.IDS_AT_ONCE):
                with _unless_over():
                    run(["qdel", *some])

    def release(self, job_id: str, run: Run) -> None:
        """Do nothing: PBS does not hold a job that it has requeued."""

    def job_id(self, env: Mapping[str, str]) -> str:
        """Return the id of the job: `12.server`, or `12[3].server` for an element of the array `12[].server`."""
        return env["PBS_JOBID"]

    def array_index(self, env: Mapping[str, str]) -> int:
        return int(env.get("PBS_ARRAY_INDEX") or env.get(INDEX) or 0)

    def share(self, plan: JobPlan, place: int) -> dict[str, str]:
        """Return the variables that select the hosts and GPUs of the gang at this place, as indices into those of the
        job.
        """
        # PBS does not divide the hosts and GPUs of a job among its gangs.
        per_host = max(plan.job_slots_per_node // plan.ranks_per_node, 1)
        first = place * plan.nodes if plan.nodes > 1 else place // per_host
        slot = 0 if plan.nodes > 1 else place % per_host * plan.ranks_per_node
        slots = {"HPC_DET_SLOTS": _listed(slot, plan.ranks_per_node)} if plan.slot_type == "gpu" else {}
        return {"HPC_DET_HOSTS": _listed(first, plan.nodes), **slots}

    def node_rank(self, env: Mapping[str, str]) -> int:
        return int(env["HPC_DET_NODE_RANK"])

    def hosts(self, env: Mapping[str, str]) -> list[str]:
        return hosts_of(env)

    def down_hosts(self, hosts: Sequence[str], run: Run) -> list[str]:
        return down_hosts(hosts, run)

    def unreached_hosts(self, printed: str) -> list[str]:
        return []

    def was_away(self, printed: str) -> bool:
        return False

    def avoid(self, job_id: str, hosts: Sequence[str], run: Run) -> None:
        """Rewrite the job's `select` to name hosts other than these.

        Raises CommandError if the job has not left its nodes yet, since PBS changes `select` of waiting jobs only, and
        TooFewHosts if too few hosts remain; names that were written before are removed even then.
        """
        if not hosts:
            return
        job = answers.shown(job_id, run)
        with reading("qstat"):
            before = str(job["Resource_List"]["select"])
            select = _without_hosts(before)
        too_few = None
        try:
            select = named_hosts((select, job.get("queue")), hosts, run)
        except TooFewHosts as error:
            too_few = error
        if select != before:
            run(["qalter", "-l", f"select={select}", job_id])
        if too_few:
            raise too_few

    def ends_at(self, plan: JobPlan, env: Mapping[str, str], run: Run) -> float | None:
        """Return when the job reaches its walltime, including the default of PBS, in seconds since the epoch."""
        # PBS sends no warning signal before the end, so the default walltime of the queue matters too.
        return _end(answers.shown_or_nothing(self.job_id(env), run), plan, env)

    def stop_cause(self, plan: JobPlan, env: Mapping[str, str], signalled_at: float, run: Run) -> Cause:
        """Return why the job received TERM, from the job's comment, its walltime and its substate."""
        job = answers.shown_or_nothing(self.job_id(env), run)
        # TERM is the same for all causes. The comment names who ended the job; for a preemption, that is the scheduler.
        if by := answers.ended_by(job):
            return Cause.PREEMPTED if by == answers.SCHEDULER else Cause.CANCELLED
        end = _end(job, plan, env)
        is_late = end is not None and signalled_at >= end - CLOCKS_DIFFER_S
        return Cause.TIME_LIMIT if is_late and job.get("substate") != BEING_REQUEUED else Cause.PREEMPTED

    def replaced(self, job_id: str, run: Run) -> None:
        """Do nothing: if PBS requeues the job after all, its successor only waits longer."""

    def requeue(self, job_id: str, env: Mapping[str, str], run: Run) -> None:
        """Return without an error if PBS requeues the job already. Raises CommandError otherwise: only operators can
        requeue.
        """
        job = answers.shown(job_id, run)
        if job.get("substate") == BEING_REQUEUED or answers.state_of(job).ours is JobState.QUEUED:
            return
        raise CommandError(
            "PBS does not allow users to requeue a job; set `resume` in the cluster profile to successor, resubmit or "
            "chain"
        )


@contextmanager
def _unless_over() -> Iterator[None]:
    """Suppress CommandError if the command failed only because jobs have ended."""
    try:
        yield
    except CommandError as error:
        if not answers.over_in(str(error)):
            raise


def _end(job: Mapping[str, Any], plan: JobPlan, env: Mapping[str, str]) -> float | None:
    """Return when the job reaches its walltime, by PBS' data, or by the local clock if there are none."""
    with suppress(CommandError):
        if job:
            return answers.end_of(job)
    return _end_by_our_clock(plan, env)


def _end_by_our_clock(plan: JobPlan, env: Mapping[str, str]) -> float | None:
    """Return the start of the job plus the plan's time limit; None if either is unknown."""
    if plan.time_limit_min is None:
        return None
    try:
        # PBS writes this file directly before the job starts.
        return os.stat(env["PBS_NODEFILE"]).st_mtime + 60 * plan.time_limit_min
    except (KeyError, OSError):
        return None


def _after(job_id: str) -> list[str]:
    """Return the flags that make a job wait for the end of `job_id`."""
    # PBS has no dependency on an element of an array, so the next job starts at a time when the element has surely
    # ended.
    if re.search(r"\[\d+\]", job_id):
        return ["-a", time.strftime("%Y%m%d%H%M.%S", time.localtime(time.time() + ELEMENT_LEAVES_S))]
    return ["-W", f"depend=afterany:{job_id}"]


def _without_hosts(select: str) -> str:
    """Return the `select` as it was before hosts were named: a count and one kind of chunk."""
    chunks = re.sub(r":host=[^:+]+", "", select).split("+")
    count = sum(int(chunk.partition(":")[0]) for chunk in chunks)
    return f"{count}:{chunks[0].partition(':')[2]}"


def _listed(first: int, count: int) -> str:
    """Return `count` consecutive integers from `first`, separated by commas."""
    return ",".join(map(str, range(first, first + count)))


def directives(plan: JobPlan, script: Path) -> list[str]:
    """Return the flags that hpc_det sets, in the order of the script. Raises UsageError for texts that qsub cannot
    take.
    """
    _check_texts(plan, script)
    optional = {
        "-q": plan.partition,
        "-A": plan.account,
        "-p": None if plan.priority is None else str(pbs_priority_of(plan.priority)),
        "-l": None if plan.time_limit_min is None else f"walltime={_walltime(plan.time_limit_min)}",
    }
    return [
        f"-N {job_name(plan.name)}",
        f"-l select={plan.job_nodes}:{_chunk(plan)}",
        # Each chunk on a host of its own; PBS could otherwise put several on one (pbs_resources(7B)).
        *([] if any("place=" in word for word in plan.submit_args) else ["-l place=scatter"]),
        *[f"{flag} {_quoted(value)}" for flag, value in optional.items() if value is not None],
        *([f"-l {plan.qos_resource}={plan.qos}"] if plan.qos and plan.qos_resource else []),
        "-r y",  # PBS may requeue the job after a preemption or the loss of a node
        "-S /bin/bash",
        "-k oed",  # the output is written to the log while the job runs, and not copied there at its end (qsub(1B))
        "-j oe",
        f"-o {_quoted(str(job_log(script)))}",
    ]


def _check_texts(plan: JobPlan, script: Path) -> None:
    """Raise UsageError with all values that cannot be written in a directive of qsub."""
    folder = str(script.parent)
    texts = {
        "resources.resource_pool": plan.partition,
        "account": plan.account,
        "HPC_DET_ROOT": folder,
    }
    problems = [
        f"{name}: {text!r} contains both kinds of quotes, and qsub has no escapes; use only one kind"
        for name, text in texts.items()
        if text is not None and {"'", '"'} <= set(text)
    ]
    if ":" in folder:
        problems.append(
            f"HPC_DET_ROOT: {folder!r} contains ':', which ends a host name for qsub -o; choose another folder"
        )
    if problems:
        raise UsageError(problems)


def _chunk(plan: JobPlan) -> str:
    """Return the chunk of `select`: the resources of one node."""
    # mpiprocs: 1 line per node in $PBS_NODEFILE. PBS sets OMP_NUM_THREADS to ompthreads, or to ncpus without it.
    gpus, slots = plan.slot_type == "gpu", plan.job_slots_per_node
    wanted = {
        "ncpus": plan.cpus_per_rank * slots,
        "ngpus": slots if gpus else None,
        "gpu_type": plan.gpu_type if gpus else None,
        "mpiprocs": 1,
        "ompthreads": plan.cpus_per_rank,
        "mem": plan.mem_per_node and _size(plan.mem_per_node),
    }
    chosen = pbs_resources(plan.constraint) if plan.constraint else []
    return ":".join([*(f"{name}={value}" for name, value in wanted.items() if value is not None), *chosen])


def _size(text: str) -> str:
    """Return a size in PBS' notation, such as `16gb`, for one in Slurm's, such as `16G`; without a unit it is in MB."""
    return f"{text.rstrip('KMGT')}{(text[-1] if text[-1] in 'KMGT' else 'M').lower()}b"


def _walltime(minutes: int) -> str:
    """Return the minutes as HH:MM:00."""
    return f"{minutes // 60:02}:{minutes % 60:02}:00"


def job_name(name: str) -> str:
    """Return `name` with "_" for each character that `qsub -N` refuses, cut to the maximum length."""
    return re.sub(r"^[.+-]|[^A-Za-z0-9_.+-]", "_", name)[:LONGEST_NAME]


def array_flags(array: JobArray) -> list[str]:
    """Return the flags that submit a job array; empty for a single job."""
    limit = f"%{array.at_once}" if array.at_once else ""
    return ["-J", f"0-{array.count - 1}{limit}"] if array.count > 1 else []


def element_log(script: Path) -> list[str]:
    """Return a script line that redirects the output of an array's element to its own log."""
    # qsub's pattern for the index has no meaning in an element that was submitted alone.
    before, after = str(job_log(script, "-@")).rsplit("@", 1)
    return [f'exec >>{shlex.quote(before)}"${{{INDEX}:-$PBS_ARRAY_INDEX}}"{after} 2>&1']


def own_line(arguments: Sequence[str]) -> list[str]:
    """Return the user's flags as one line; empty without flags.

    A flag and its value may be two entries of the list, or one entry with a blank.
    """
    found = [(entry, _TWO_WORDS.fullmatch(entry)) for entry in arguments]
    words = [word for entry, two in found for word in (two.groups() if two else [entry])]
    return [" ".join(map(_quoted, words))] if words else []


def _quoted(word: str) -> str:
    """Return the word, quoted for qsub if necessary."""
    # qsub accepts either kind of quotes but has no escapes; `_check_texts` refuses texts with both.
    if _PLAIN.fullmatch(word):
        return word
    return f"'{word}'" if '"' in word else f'"{word}"'


def wanted(script: str) -> tuple[str, str | None]:
    """Return the `select` and the queue, or None, of a job script that hpc_det wrote."""
    text = Path(script).read_text(encoding="utf-8")
    select, queue = (
        re.search(pattern, text, re.MULTILINE) for pattern in (r"^#PBS -l select=(\S+)$", r"^#PBS -q (.+)$")
    )
    assert select
    return select[1], queue and queue[1]
