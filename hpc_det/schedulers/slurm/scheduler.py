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
SIGNAL_EARLY_S = 60.0
"""`--signal` may come up to 60 s earlier than asked (sbatch(1))."""
_GPU_FLAGS = {
    "gpus-per-node": "--gpus-per-node={}",
    "gres": "--gres=gpu:{}",
    "tres-per-node": "--tres-per-node=gres/gpu:{}",
}
_TWO_WORDS = re.compile(r"(-\w|--[\w-]+)\s+\S")
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")
# srun, src/api/step_launch.c: other reasons than these, such as a user whom the node does not know, are no lost node.
_UNREACHED = re.compile(
    r"Task launch for \S+ failed on node (\S+): .*(?:[Cc]ommunication|[Cc]onnection|timed out|No route|unreachable)"
)
# srun, src/api/step_launch.c: Slurm calls the node down, as where its slurmd does not answer. srun ends with exit code
# 0 then, although the step did not, and its processes may live on.
_FAILED_NODES = re.compile(r"(?m)^srun: error: Node failure on (\S+)")


class Slurm:
    template = "slurm.sh.j2"
    has_queue = True

    def script_variables(self, plan: JobPlan, array: JobArray, script: Path) -> dict[str, object]:
        return {
            "directives": [*map(quoted, directives(plan, array, script)), *own_line(plan.submit_args)],
            "srun": shlex.join(srun_command(plan, array)),
        }

    def submit_command(self, submission: Submission, run: Run = run_command) -> list[str]:
        """Flags of the command line come before those of the script (sbatch(1))."""
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
        if len(found) != 1:  # a site's wrapper or plugin may talk beside it
            raise ValueError(f"sbatch: no job id in its answer {output.strip()!r}")
        return str(found[0]) if element is None else f"{found[0]}_{element}"

    def status(self, job_ids: Sequence[str], run: Run) -> dict[str, JobStatus]:
        return statuses(job_ids, run)

    def cancel(self, job_id: str, run: Run) -> None:
        run(["scancel", job_id])

    def withdraw(self, job_id: str, run: Run) -> None:
        run(["scancel", "--state=PENDING", job_id])

    def release(self, job_id: str, run: Run) -> None:
        """Not before the requeue has settled: a job that starts in the same second fails with a revoked credential."""
        requeued = local_time(shown(job_id, run).get("SubmitTime"))
        if requeued is not None:
            time.sleep(max(0.0, min(requeued + REQUEUE_SETTLES_S - time.time(), REQUEUE_SETTLES_S)))
        run(["scontrol", "update", f"JobId={job_id}", "StartTime=now"])

    def job_id(self, env: Mapping[str, str]) -> str:
        """`A_a` for an array's element: its own number would requeue the whole array where it equals the parent's."""
        if "SLURM_ARRAY_JOB_ID" in env:
            return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
        return env["SLURM_JOB_ID"]

    def array_index(self, env: Mapping[str, str]) -> int:
        return int(env.get("SLURM_ARRAY_TASK_ID", 0))

    def share(self, plan: JobPlan, place: int) -> dict[str, str]:
        """Nothing: srun finds a free part of the allocation by itself."""
        return {}

    def node_rank(self, env: Mapping[str, str]) -> int:
        return int(env["SLURM_NODEID"])

    def hosts(self, env: Mapping[str, str]) -> list[str]:
        """The step's, where an allocation is shared."""
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
        if plan.time_limit_min is None:  # the partition's own limit, if any, comes with the warning signal
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
        """Otherwise Slurm might requeue it, and hold both back for minutes."""
        run(["scontrol", "update", f"JobId={job_id}", "Requeue=0"])

    def requeue(self, job_id: str, env: Mapping[str, str], run: Run) -> None:
        """A job that exits 0 within its grace time is COMPLETED on Slurm 22.05, so it is put back by its own hand.

        Newer ones, a preemption without grace, or the loss of its node have put it back already; that is no error. It
        may run again by now, which a second requeue would end.
        """
        try:
            if was_requeued(shown(job_id, run), env):
                return
        except NoAnswer:
            raise
        except CommandError:  # a site may forbid that
            pass
        try:
            run(["scontrol", "requeue", job_id])
        except CommandError as error:
            if "pending" not in str(error):  # "Job is pending execution"
                raise


def _cause_of_stop(job: Mapping[str, str], plan: JobPlan, env: Mapping[str, str], signalled_at: float) -> Cause:
    if local_time(job.get("PreemptTime")) is not None:
        return Cause.PREEMPTED
    if "NODE_FAIL" in job.get("JobState", "") or job.get("Reason") == "NodeDown":  # while it is COMPLETING
        return Cause.NODE_LOST
    if job.get("JobState") in ("COMPLETING", "CANCELLED") and job.get("Reason") != "TimeLimit":
        return _cause_of_sudden_end(job, env)
    end = local_time(job.get("EndTime"))
    warned_from = float("inf") if end is None else end - plan.signal_lead_s - SIGNAL_EARLY_S
    return Cause.TIME_LIMIT if signalled_at >= warned_from else Cause.PREEMPTED


def _cause_of_sudden_end(job: Mapping[str, str], env: Mapping[str, str]) -> Cause:
    """The job is being ended without a warning: by `scancel`, or by a requeue, which counts one restart more."""
    return Cause.PREEMPTED if was_requeued(job, env) else Cause.CANCELLED


@reading("scontrol")
def was_requeued(job: Mapping[str, str], env: Mapping[str, str]) -> bool:
    """Since this start of it, which `env` belongs to."""
    return int(job.get("Restarts", 0)) > int(env.get("SLURM_RESTART_COUNT", 0))


def directives(plan: JobPlan, array: JobArray, script: Path) -> list[str]:
    """The flags that hpc_det decides, in the order in which the script shows them."""
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
        # sbatch refuses a negative one of ordinary users
        "nice": None if plan.priority is None else max(nice_of(plan.priority), 0),
        "time": plan.time_limit_min,
    }
    flags += [f"--{name}={value}" for name, value in optional.items() if value is not None]
    return [
        *flags,
        f"--signal=USR2@{plan.signal_lead_s}",
        # Until another job waits to go on for it, only Slurm can bring it back: its node may fail at once.
        "--no-requeue" if plan.resume == "chain" else "--requeue",
        "--open-mode=append",
        f"--output={_output(script, array)}",
        f"--chdir={plan.folder}",
    ]


def own_line(sbatch_args: Sequence[str]) -> list[str]:
    """The user's flags, on one line: a flag and its value may be two entries of the list, or one with a blank."""
    words = [word for entry in sbatch_args for word in (entry.split(None, 1) if _TWO_WORDS.match(entry) else [entry])]
    return [" ".join(map(quoted, words))] if words else []


def _array(array: JobArray) -> list[str]:
    limit = f"%{array.at_once}" if array.at_once else ""
    return [f"--array=0-{array.count - 1}{limit}"] if array.count > 1 else []


def srun_command(plan: JobPlan, array: JobArray) -> list[str]:
    """One task a node. srun takes no --cpus-per-task from the job since 22.05; a dead agent must end the others."""
    cpus = plan.cpus_per_rank * plan.ranks_per_node
    flags = [
        "srun",
        f"--nodes={plan.nodes}",
        f"--ntasks={plan.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={cpus}",
    ]
    if array.is_shared:  # a part of the allocation that no other gang has; the memory is everybody's
        flags += ["--exact", "--mem=0", *gpu_flags(plan, plan.ranks_per_node)]
    box = plan.container
    flags += ["--kill-on-bad-exit=1", "--wait=60", "--export=ALL", *plan.srun_args]
    return [*flags, *(srun_flags(plan, box) if box and not box.starts_entrypoint else [])]


def gpu_flags(asks: JobPlan | Cluster, slots: int) -> list[str]:
    """How so many GPUs of a node are asked for, if slots are GPUs."""
    if asks.slot_type != "gpu":
        return []
    count = f"{asks.gpu_type}:{slots}" if asks.gpu_type else str(slots)
    return [_GPU_FLAGS[asks.gpu_flag].format(count)]


def quoted(flag: str) -> str:
    """One word for sbatch, which takes a backslash for an escape in either kind of quotes, unlike a shell."""
    return flag if _PLAIN.fullmatch(flag) else '"' + re.sub(r'(["\\])', r"\\\1", flag) + '"'


def _output(script: Path, array: JobArray) -> str:
    """For --output: `%` begins a pattern there, but a backslash escapes and ends all patterns (sbatch(1))."""
    if "\\" in str(script):
        return str(job_log(script)).replace("\\", "\\\\")
    return str(job_log(Path(str(script).replace("%", "%%")), "-%a" if array.count > 1 else ""))
