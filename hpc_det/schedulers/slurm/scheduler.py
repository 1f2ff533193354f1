"""Slurm as a scheduler, and the flags of sbatch and srun for a job.

After sbatch(1), srun(1), squeue(1), scontrol(1) and slurm.conf(5).
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_det.plan.container import srun_flags
from hpc_det.plan.job_plan import JobArray, JobPlan
from hpc_det.plan.priority import nice_of
from hpc_det.requeue import Cause
from hpc_det.schedulers.scheduler import (
    CommandError,
    JobStatus,
    NoAnswer,
    Run,
    Submission,
    reading,
    run_command,
    says_no_answer,
    whole_lines,
)
from hpc_det.schedulers.slurm.answers import host_names, local_time, shown, statuses
from hpc_det.store.folders import job_log

if TYPE_CHECKING:
    from hpc_det.config.cluster import Cluster


REQUEUE_SETTLES_S = 3.0
"""Seconds after a requeue before the job may be released."""
SIGNAL_EARLY_S = 60.0
"""Seconds by which Slurm may send the signal of `--signal` earlier than requested (sbatch(1))."""
_GPU_FLAGS = {
    "gpus-per-node": "--gpus-per-node={}",
    "gres": "--gres=gpu:{}",
    "tres-per-node": "--tres-per-node=gres/gpu:{}",
}
_TWO_WORDS = re.compile(r"(-\w|--[\w-]+)\s+\S")
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")
# srun, src/api/step_launch.c. A launch that fails for another reason, such as a user unknown on the node, does not mean
# that the node is lost.
_UNREACHED = re.compile(
    r"Task launch for \S+ failed on node (\S+): .*(?:[Cc]ommunication|[Cc]onnection|timed out|No route|unreachable)"
)
# srun, src/api/step_launch.c: Slurm considers the node down, for example because its slurmd does not answer. srun then
# exits with code 0 although the step has not ended, and its processes may still run.
_FAILED_NODES = re.compile(r"(?m)^srun: error: Node failure on (\S+)")


class Slurm:
    """Slurm."""

    template = "slurm.sh.j2"
    has_queue = True

    def script_variables(self, plan: JobPlan, array: JobArray, script: Path) -> dict[str, object]:
        return {
            "directives": [*map(quoted, directives(plan, array, script)), *own_line(plan.submit_args)],
            "srun": shlex.join(srun_command(plan, array)),
        }

    def submit_command(self, submission: Submission, run: Run = run_command) -> list[str]:
        """Return the sbatch command line. Flags of the command line override those of the script (sbatch(1))."""
        flags = {
            "dependency": submission.after and f"afterany:{submission.after}",
            "array": submission.index if submission.array.count > 1 else None,
            "exclude": ",".join(submission.exclude),
        }
        given = [f"--{name}={value}" for name, value in flags.items() if value not in (None, "")]
        return ["sbatch", "--parsable", *given, submission.script]

    def parse_submit(self, output: str, element: int | None = None) -> str:
        # "ID" or "ID;CLUSTER" (sbatch(1), --parsable)
        found = re.findall(r"^(\d+)(?:;\S+)?$", output, re.MULTILINE)
        if len(found) != 1:  # a site's wrapper or plugin may print other lines
            raise ValueError(f"sbatch: expected one job id in its output, got {output.strip()!r}")
        return str(found[0]) if element is None else f"{found[0]}_{element}"

    def status(self, job_ids: Sequence[str], run: Run) -> dict[str, JobStatus]:
        return statuses(job_ids, run)

    def cancel(self, job_id: str, run: Run) -> None:
        run(["scancel", job_id])

    def withdraw(self, job_id: str, run: Run) -> None:
        run(["scancel", "--state=PENDING", job_id])

    def release(self, job_id: str, run: Run) -> None:
        """Let a requeued job start now, but not before REQUEUE_SETTLES_S have passed since the requeue."""
        # A job that starts in the second of its requeue fails with a revoked credential.
        requeued = local_time(shown(job_id, run).get("SubmitTime"))
        if requeued is not None:
            time.sleep(max(0.0, min(requeued + REQUEUE_SETTLES_S - time.time(), REQUEUE_SETTLES_S)))
        run(["scontrol", "update", f"JobId={job_id}", "StartTime=now"])

    def job_id(self, env: Mapping[str, str]) -> str:
        """Return the id of the job; `A_a` for an element of array A."""
        # Not SLURM_JOB_ID: one element's equals the id of the array, and a requeue of that would requeue the whole
        # array.
        if "SLURM_ARRAY_JOB_ID" in env:
            return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
        return env["SLURM_JOB_ID"]

    def array_index(self, env: Mapping[str, str]) -> int:
        return int(env.get("SLURM_ARRAY_TASK_ID", 0))

    def share(self, plan: JobPlan, place: int) -> dict[str, str]:
        """Return no variables: srun itself selects a free part of the allocation."""
        return {}

    def node_rank(self, env: Mapping[str, str]) -> int:
        return int(env["SLURM_NODEID"])

    def hosts(self, env: Mapping[str, str]) -> list[str]:
        """Return the hosts of the job step if there is one, since gangs may share the allocation, else those of the
        job.
        """
        return host_names(env.get("SLURM_STEP_NODELIST") or env["SLURM_JOB_NODELIST"])

    def down_hosts(self, hosts: Sequence[str], run: Run) -> list[str]:
        flags = ["--noheader", "--Node", "--states=down", "--format=%N", f"--nodes={','.join(hosts)}"]
        down = set(map(str.strip, whole_lines(run(["sinfo", *flags]))))
        return [host for host in hosts if host in down]

    def unreached_hosts(self, printed: str) -> list[str]:
        failed = [host for nodes in _FAILED_NODES.findall(printed) for host in host_names(nodes)]
        return list(dict.fromkeys([*_UNREACHED.findall(printed), *failed]))

    def was_away(self, printed: str) -> bool:
        complaints = re.findall(r"^srun: error: (?:Unable to|Failed to) (.*)", printed, re.MULTILINE)
        return any(map(says_no_answer, complaints))

    def avoid(self, job_id: str, hosts: Sequence[str], run: Run) -> None:
        if hosts:
            run(["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={','.join(hosts)}"])

    def ends_at(self, plan: JobPlan, env: Mapping[str, str], run: Run) -> float | None:
        if plan.time_limit_min is None:  # Slurm warns of the partition's own limit by signal
            return None
        with suppress(CommandError):  # scontrol may be missing on compute nodes
            return local_time(shown(self.job_id(env), run).get("EndTime"))
        return None

    def stop_cause(self, plan: JobPlan, env: Mapping[str, str], signalled_at: float, run: Run) -> Cause:
        try:
            return _cause_of_stop(shown(self.job_id(env), run), plan, env, signalled_at)
        except CommandError:
            return Cause.PREEMPTED  # scontrol may be missing on compute nodes; both causes are requeued alike

    def replaced(self, job_id: str, run: Run) -> None:
        """Forbid Slurm to requeue the job."""
        # If Slurm requeued it too, it would hold both jobs for minutes.
        run(["scontrol", "update", f"JobId={job_id}", "Requeue=0"])

    def requeue(self, job_id: str, env: Mapping[str, str], run: Run) -> None:
        """Requeue the job unless Slurm has requeued it already. Raises CommandError; NoAnswer may be retried."""
        try:
            # Newer versions of Slurm, a preemption without a grace time, or the loss of a node have requeued the job
            # already. It may even run again, and a second requeue would end that run.
            if was_requeued(shown(job_id, run), env):
                return
        except NoAnswer:
            raise
        except CommandError:  # a site may forbid `scontrol show job`
            pass
        try:
            # On Slurm 22.05, a preempted job that exits 0 within its grace time becomes COMPLETED, so it must requeue
            # itself.
            run(["scontrol", "requeue", job_id])
        except CommandError as error:
            if "pending" not in str(error):  # "Job is pending execution": it is already requeued
                raise


def _cause_of_stop(job: Mapping[str, str], plan: JobPlan, env: Mapping[str, str], signalled_at: float) -> Cause:
    """Return the cause from the job's attributes in scontrol."""
    if local_time(job.get("PreemptTime")) is not None:
        return Cause.PREEMPTED
    if "NODE_FAIL" in job.get("JobState", "") or job.get("Reason") == "NodeDown":  # while it is COMPLETING
        return Cause.NODE_LOST
    if job.get("JobState") in ("COMPLETING", "CANCELLED") and job.get("Reason") != "TimeLimit":
        return _cause_of_sudden_end(job, env)
    end = local_time(job.get("EndTime"))
    # The signal of --signal at this time or later is the warning before the time limit.
    warned_from = float("inf") if end is None else end - plan.signal_lead_s - SIGNAL_EARLY_S
    return Cause.TIME_LIMIT if signalled_at >= warned_from else Cause.PREEMPTED


def _cause_of_sudden_end(job: Mapping[str, str], env: Mapping[str, str]) -> Cause:
    """Return the cause for a job that ends without a warning signal: a requeue, or `scancel`."""
    return Cause.PREEMPTED if was_requeued(job, env) else Cause.CANCELLED


@reading("scontrol")
def was_requeued(job: Mapping[str, str], env: Mapping[str, str]) -> bool:
    """Return whether Slurm has requeued the job since the start that `env` belongs to. Raises CommandError."""
    return int(job.get("Restarts", 0)) > int(env.get("SLURM_RESTART_COUNT", 0))


def directives(plan: JobPlan, array: JobArray, script: Path) -> list[str]:
    """Return the flags that hpc_det sets, in the order of the script."""
    flags = [
        f"--job-name={plan.name}",
        *_array(array),
        f"--nodes={plan.job_nodes}",
        f"--ntasks={plan.job_nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={plan.cpus_per_rank * plan.job_slots_per_node}",
        *gpu_flags(plan, plan.job_slots_per_node),
    ]
    optional = {
        "mem": plan.mem_per_node,
        "partition": plan.partition,
        "account": plan.account,
        "qos": plan.qos,
        "constraint": plan.constraint,
        # sbatch refuses a negative nice value from ordinary users
        "nice": None if plan.priority is None else max(nice_of(plan.priority), 0),
        "time": plan.time_limit_min,
    }
    flags += [f"--{name}={value}" for name, value in optional.items() if value is not None]
    return [
        *flags,
        f"--signal=USR2@{plan.signal_lead_s}",  # to the agents; to the batch shell only with `B:` (sbatch(1))
        # With the other policies, only Slurm can restart a job whose node fails before its successor is queued.
        "--no-requeue" if plan.resume == "chain" else "--requeue",
        "--open-mode=append",
        f"--output={_output(script, array)}",
        f"--chdir={plan.folder}",
    ]


def own_line(sbatch_args: Sequence[str]) -> list[str]:
    """Return the user's flags as one line; empty without flags.

    A flag and its value may be two entries of the list, or one entry with a blank.
    """
    words = [word for entry in sbatch_args for word in (entry.split(None, 1) if _TWO_WORDS.match(entry) else [entry])]
    return [" ".join(map(quoted, words))] if words else []


def _array(array: JobArray) -> list[str]:
    limit = f"%{array.at_once}" if array.at_once else ""
    return [f"--array=0-{array.count - 1}{limit}"] if array.count > 1 else []


def srun_command(plan: JobPlan, array: JobArray) -> list[str]:
    """Return the srun command that starts one agent per node."""
    # Since 22.05, srun does not inherit --cpus-per-task from the job.
    cpus = plan.cpus_per_rank * plan.ranks_per_node
    flags = [
        "srun",
        f"--nodes={plan.nodes}",
        f"--ntasks={plan.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={cpus}",
    ]
    if array.is_shared:  # CPUs and GPUs that no other gang uses; all gangs share the memory
        flags += ["--exact", "--mem=0", *gpu_flags(plan, plan.ranks_per_node)]
    # If one agent fails, srun ends the others at once (--kill-on-bad-exit); if one exits with 0, after 60 s (--wait).
    box = plan.container
    flags += ["--kill-on-bad-exit=1", "--wait=60", "--export=ALL", *plan.srun_args]
    return [*flags, *(srun_flags(plan, box) if box and not box.starts_entrypoint else [])]


def gpu_flags(asks: JobPlan | Cluster, slots: int) -> list[str]:
    """Return the flag that requests this number of slots of a node as GPUs; empty for CPU slots."""
    if asks.slot_type != "gpu":
        return []
    count = f"{asks.gpu_type}:{slots}" if asks.gpu_type else str(slots)
    return [_GPU_FLAGS[asks.gpu_flag].format(count)]


def quoted(flag: str) -> str:
    """Return the flag, quoted for sbatch if necessary."""
    # Unlike a shell, sbatch treats a backslash as an escape in both kinds of quotes.
    return flag if _PLAIN.fullmatch(flag) else '"' + re.sub(r'(["\\])', r"\\\1", flag) + '"'


def _output(script: Path, array: JobArray) -> str:
    """Return the value of --output."""
    # A `%` begins a pattern in --output; but a backslash is an escape there, and disables all patterns (sbatch(1)).
    if "\\" in str(script):
        return str(job_log(script)).replace("\\", "\\\\")
    return str(job_log(Path(str(script).replace("%", "%%")), "-%a" if array.count > 1 else ""))
