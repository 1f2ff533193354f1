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
from hpc_det.plan.priority import pbs_priority_of
from hpc_det.requeue import Cause
from hpc_det.schedulers.pbs import answers
from hpc_det.schedulers.pbs.hosts import TooFewHosts, down_hosts, hosts_of, named_hosts
from hpc_det.schedulers.scheduler import CommandError, JobState, JobStatus, Run, Submission, reading, run_command
from hpc_det.store.folders import job_log

BEING_REQUEUED = 60
"""The substate of a job that is ended, to be queued again."""
ELEMENT_LEAVES_S = 30.0
"""An element that asks for the next one has nothing left to do; PBS takes a few seconds to see its end."""
CLOCKS_DIFFER_S = 2.0
"""PBS kills at the limit or later, never before; the clocks of its hosts may differ a little."""
INDEX = "HPC_DET_INDEX"
"""The place in its array of an element that was submitted alone."""
LONGEST_NAME = 230
_TWO_WORDS = re.compile(r"(-\w)\s+(\S.*)")
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./^-]+")


class Pbs:
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
        """Flags of the command line come before those of the script (qsub(1B)).

        All elements of an array have the same `select`, so none of its nodes can be named, or excluded.
        """
        answers.check_is_pbs(run)
        is_array = submission.array.count > 1 and submission.index is None
        flags = array_flags(submission.array) if is_array else []
        if submission.array.count > 1 and submission.index is not None:
            flags += ["-v", f"{INDEX}={submission.index}"]
        flags += _after(submission.after) if submission.after else []
        if submission.exclude and not is_array:
            flags += ["-l", f"select={named_hosts(wanted(submission.script), submission.exclude, run)}"]
        return ["qsub", *flags, submission.script]

    def parse_submit(self, output: str, element: int | None = None) -> str:
        return answers.submitted_id(output)

    def status(self, job_ids: Sequence[str], run: Run) -> dict[str, JobStatus]:
        """Without -x: that needs a history, which a site may not keep, and says no more of the living."""
        return answers.statuses(job_ids, run)

    def cancel(self, job_id: str, run: Run) -> None:
        try:
            run(["qdel", job_id])
        except CommandError as error:
            if job_id not in answers.over_in(str(error)):
                raise

    def withdraw(self, job_id: str, run: Run) -> None:
        """qdel would end what runs, so the elements of an array that wait are named one by one."""
        with _unless_over():
            jobs = answers.waiting(job_id, run)
            for some in answers.pieces(jobs, answers.IDS_AT_ONCE):
                with _unless_over():
                    run(["qdel", *some])

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

    def hosts(self, env: Mapping[str, str]) -> list[str]:
        return hosts_of(env)

    def down_hosts(self, hosts: Sequence[str], run: Run) -> list[str]:
        return down_hosts(hosts, run)

    def unreached_hosts(self, printed: str) -> list[str]:
        return []

    def was_away(self, printed: str) -> bool:
        return False

    def avoid(self, job_id: str, hosts: Sequence[str], run: Run) -> None:
        """Raises CommandError for a job that has not left its nodes yet: PBS changes the nodes of waiting ones only.
        Also where too few nodes are left: the job then waits for those no longer that were named for it before.
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
        """PBS warns of no end, so its default limit counts too, where the plan has none."""
        return _end(answers.shown_or_nothing(self.job_id(env), run), plan, env)

    def stop_cause(self, plan: JobPlan, env: Mapping[str, str], signalled_at: float, run: Run) -> Cause:
        """TERM comes for all alike. A deletion names who asked for it, the scheduler when it preempts."""
        job = answers.shown_or_nothing(self.job_id(env), run)
        if by := answers.ended_by(job):
            return Cause.PREEMPTED if by == answers.SCHEDULER else Cause.CANCELLED
        end = _end(job, plan, env)
        is_late = end is not None and signalled_at >= end - CLOCKS_DIFFER_S
        return Cause.TIME_LIMIT if is_late and job.get("substate") != BEING_REQUEUED else Cause.PREEMPTED

    def replaced(self, job_id: str, run: Run) -> None:
        """What waits for its end waits longer then, and does no harm."""

    def requeue(self, job_id: str, env: Mapping[str, str], run: Run) -> None:
        """Where PBS preempts by requeue it does so whatever the job does; nobody but operators can do it otherwise."""
        job = answers.shown(job_id, run)
        if job.get("substate") == BEING_REQUEUED or answers.state_of(job).ours is JobState.QUEUED:
            return
        raise CommandError(
            "PBS lets no user requeue a job; set `resume` in the cluster profile to successor, resubmit or chain"
        )


@contextmanager
def _unless_over() -> Iterator[None]:
    """Raises CommandError where a command fails for another reason than that jobs have ended."""
    try:
        yield
    except CommandError as error:
        if not answers.over_in(str(error)):
            raise


def _end(job: Mapping[str, Any], plan: JobPlan, env: Mapping[str, str]) -> float | None:
    """By our clock where PBS does not say."""
    with suppress(CommandError):
        if job:
            return answers.end_of(job)
    return _end_by_our_clock(plan, env)


def _end_by_our_clock(plan: JobPlan, env: Mapping[str, str]) -> float | None:
    """PBS writes the list of nodes right before the job starts."""
    if plan.time_limit_min is None:
        return None
    try:
        return os.stat(env["PBS_NODEFILE"]).st_mtime + 60 * plan.time_limit_min
    except (KeyError, OSError):
        return None


def _after(job_id: str) -> list[str]:
    """PBS knows no dependency on an element of an array, so what follows one waits until that has surely left."""
    if re.search(r"\[\d+\]", job_id):
        return ["-a", time.strftime("%Y%m%d%H%M.%S", time.localtime(time.time() + ELEMENT_LEAVES_S))]
    return ["-W", f"depend=afterany:{job_id}"]


def _without_hosts(select: str) -> str:
    """As it was before hosts were named: one kind of chunk, so many times."""
    chunks = re.sub(r":host=[^:+]+", "", select).split("+")
    count = sum(int(chunk.partition(":")[0]) for chunk in chunks)
    return f"{count}:{chunks[0].partition(':')[2]}"


def _listed(first: int, count: int) -> str:
    return ",".join(map(str, range(first, first + count)))


def directives(plan: JobPlan, script: Path) -> list[str]:
    """The flags that hpc_det decides, in the order in which the script shows them. Raises UsageError."""
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
        *([] if any("place=" in word for word in plan.submit_args) else ["-l place=scatter"]),
        *[f"{flag} {_quoted(value)}" for flag, value in optional.items() if value is not None],
        "-r y",
        "-S /bin/bash",
        "-k oed",
        "-j oe",
        f"-o {_quoted(str(job_log(script)))}",
    ]


def _check_texts(plan: JobPlan, script: Path) -> None:
    """Raises UsageError with all that no line of qsub can hold."""
    folder = str(script.parent)
    texts = {"resources.resource_pool": plan.partition, "account": plan.account, "HPC_DET_ROOT": folder}
    problems = [
        f"{name}: {text!r} holds both kinds of quotes, and qsub knows no escapes; leave one kind out"
        for name, text in texts.items()
        if text is not None and {"'", '"'} <= set(text)
    ]
    if ":" in folder:
        problems.append(f"HPC_DET_ROOT: {folder!r} holds ':', which ends a host's name for qsub -o")
    if problems:
        raise UsageError(problems)


def _chunk(plan: JobPlan) -> str:
    """What a node gives. One line of $PBS_NODEFILE; PBS sets OMP_NUM_THREADS to ompthreads, else to ncpus."""
    gpus, slots = plan.slot_type == "gpu", plan.job_slots_per_node
    wanted = {
        "ncpus": plan.cpus_per_rank * slots,
        "ngpus": slots if gpus else None,
        "gpu_type": plan.gpu_type if gpus else None,
        "mpiprocs": 1,
        "ompthreads": plan.cpus_per_rank,
        "mem": plan.mem_per_node and _size(plan.mem_per_node),
    }
    return ":".join(f"{name}={value}" for name, value in wanted.items() if value is not None)


def _size(text: str) -> str:
    """Slurm's way to write a size, M where nothing is said, in that of PBS."""
    return f"{text.rstrip('KMGT')}{(text[-1] if text[-1] in 'KMGT' else 'M').lower()}b"


def _walltime(minutes: int) -> str:
    return f"{minutes // 60:02}:{minutes % 60:02}:00"


def job_name(name: str) -> str:
    """`name` with "_" for each character that `qsub -N` refuses, and cut to the length that it takes."""
    return re.sub(r"^[.+-]|[^A-Za-z0-9_.+-]", "_", name)[:LONGEST_NAME]


def array_flags(array: JobArray) -> list[str]:
    limit = f"%{array.at_once}" if array.at_once else ""
    return ["-J", f"0-{array.count - 1}{limit}"] if array.count > 1 else []


def element_log(script: Path) -> list[str]:
    """qsub's pattern for the index means nothing in an element that is submitted alone."""
    before, after = str(job_log(script, "-@")).rsplit("@", 1)
    return [f'exec >>{shlex.quote(before)}"${{{INDEX}:-$PBS_ARRAY_INDEX}}"{after} 2>&1']


def own_line(arguments: Sequence[str]) -> list[str]:
    """The user's flags, on one line: a flag and its value may be two entries of the list, or one with a blank."""
    found = [(entry, _TWO_WORDS.fullmatch(entry)) for entry in arguments]
    words = [word for entry, two in found for word in (two.groups() if two else [entry])]
    return [" ".join(map(_quoted, words))] if words else []


def _quoted(word: str) -> str:
    """One word for qsub, which takes either kind of quotes and knows no escapes."""
    if _PLAIN.fullmatch(word):
        return word
    return f"'{word}'" if '"' in word else f'"{word}"'


def wanted(script: str) -> tuple[str, str | None]:
    """The `select` and the queue of a script of ours."""
    text = Path(script).read_text(encoding="utf-8")
    select, queue = (
        re.search(pattern, text, re.MULTILINE) for pattern in (r"^#PBS -l select=(\S+)$", r"^#PBS -q (.+)$")
    )
    assert select
    return select[1], queue and queue[1]
