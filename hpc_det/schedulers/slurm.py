"""Slurm: flags, commands and what they answer, after sbatch(1), squeue(1), scontrol(1) and slurm.conf(5)."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from hpc_det.launch.container import srun_flags
from hpc_det.plan.job_plan import JobArray, JobPlan
from hpc_det.requeue import Cause
from hpc_det.schedulers.command import CommandError, Run, run_command
from hpc_det.schedulers.scheduler import JobState, JobStatus, Submission, agent_command, common_variables
from hpc_det.store.folders import job_log

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
_ORDER = (JobState.RUNNING, JobState.HELD, JobState.QUEUED, JobState.UNKNOWN, JobState.ENDED)
# squeue(1), JOB REASON CODES, as far as somebody has to act. slurm.conf(5), MaxBatchRequeue: 5 by default.
_REASONS = {
    "JobHeldAdmin": "JobHeldAdmin: held by the site, also after too many requeues; ask it for `scontrol release`",
    "JobHeldUser": "JobHeldUser: let it go with `scontrol release`",
    "launch failed requeued held": "launch failed requeued held: its node is ill; then `scontrol release`",
}
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


class Slurm:
    template = "slurm.sh.j2"
    has_queue = True

    def script_variables(self, plan: JobPlan, array: JobArray, script: Path) -> dict[str, object]:
        return {
            **common_variables(plan, script),
            "directives": [*map(_quoted, directives(plan, array, script)), *_own_line(plan.submit_args)],
            "srun": shlex.join(_srun(plan, array)),
            "agent": agent_command(plan),
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
        # --array: an element a line; together they would be shown as `A_[4-9%2]`, cut off after 64 characters
        flags = ["--noheader", "--array", "--states=all", f"--jobs={','.join(job_ids)}", "--format=%i|%T|%r"]
        try:
            known = _with_arrays(parse_squeue(run(["squeue", *flags])))
        except CommandError as error:
            if "Invalid job id" not in str(error):
                return dict.fromkeys(job_ids, JobStatus(JobState.UNKNOWN, str(error)))
            known = {}
        # A job that Slurm has forgotten ended more than MinJobAge ago.
        return {job_id: known.get(job_id, JobStatus(JobState.ENDED, "forgotten by Slurm")) for job_id in job_ids}

    def cancel(self, job_id: str, run: Run) -> None:
        run(["scancel", job_id])

    def withdraw(self, job_id: str, run: Run) -> None:
        run(["scancel", "--state=PENDING", job_id])

    def release(self, job_id: str, run: Run) -> None:
        """Not before the requeue has settled: a job that starts in the same second fails with a revoked credential."""
        requeued = _time(_shown(job_id, run).get("SubmitTime"))
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

    def avoid(self, job_id: str, hosts: Sequence[str], run: Run) -> None:
        if hosts:
            run(["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={','.join(hosts)}"])

    def ends_at(self, plan: JobPlan, env: Mapping[str, str], run: Run) -> float | None:
        if plan.time_limit_min is None:  # the partition's own limit, if any, comes with the warning signal
            return None
        with suppress(CommandError):  # scontrol may be missing on compute nodes
            return _time(_shown(self.job_id(env), run).get("EndTime"))
        return None

    def stop_cause(self, plan: JobPlan, env: Mapping[str, str], signalled_at: float, run: Run) -> Cause:
        try:
            job = _shown(self.job_id(env), run)
        except CommandError:
            return Cause.PREEMPTED  # scontrol may be missing on compute nodes; both causes are requeued alike
        if _time(job.get("PreemptTime")) is not None:
            return Cause.PREEMPTED
        if job.get("JobState") in ("COMPLETING", "CANCELLED") and job.get("Reason") != "TimeLimit":
            return _cause_of_sudden_end(job, env)
        end = _time(job.get("EndTime"))
        warned_from = float("inf") if end is None else end - plan.signal_lead_s - SIGNAL_EARLY_S
        return Cause.TIME_LIMIT if signalled_at >= warned_from else Cause.PREEMPTED

    def replaced(self, job_id: str, run: Run) -> None:
        """Otherwise Slurm might requeue it, and hold both back for minutes."""
        run(["scontrol", "update", f"JobId={job_id}", "Requeue=0"])

    def requeue(self, job_id: str, run: Run) -> None:
        """A job that exits 0 within its grace time is COMPLETED on Slurm 22.05, so it is put back by its own hand.

        Newer ones, or a preemption without grace, have put it back already; that is no error.
        """
        try:
            run(["scontrol", "requeue", job_id])
        except CommandError as error:
            if "pending" not in str(error):  # "Job is pending execution"
                raise


def _cause_of_sudden_end(job: Mapping[str, str], env: Mapping[str, str]) -> Cause:
    """The job is being ended without a warning: by `scancel`, or by a requeue, which counts one restart more."""
    requeued = int(job.get("Restarts", 0)) > int(env.get("SLURM_RESTART_COUNT", 0))
    return Cause.PREEMPTED if requeued else Cause.CANCELLED


def directives(plan: JobPlan, array: JobArray, script: Path) -> list[str]:
    """The flags that hpc_det decides, in the order in which the script shows them."""
    flags = [
        f"--job-name={plan.name}",
        *_array(array),
        f"--nodes={plan.job_nodes}",
        f"--ntasks={plan.job_nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={plan.cpus_per_rank * plan.job_slots_per_node}",
        *_gpus(plan, plan.job_slots_per_node),
    ]
    optional = {
        "mem": plan.mem_per_node,
        "partition": plan.partition,
        "account": plan.account,
        "qos": plan.qos,
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


def _own_line(sbatch_args: Sequence[str]) -> list[str]:
    """The user's flags, on one line: a flag and its value may be two entries of the list, or one with a blank."""
    words = [word for entry in sbatch_args for word in (entry.split(None, 1) if _TWO_WORDS.match(entry) else [entry])]
    return [" ".join(map(_quoted, words))] if words else []


def _shown(job_id: str, run: Run) -> dict[str, str]:
    return parse_scontrol(run(["scontrol", "show", "job", "--oneliner", job_id]))


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


def parse_squeue(output: str) -> dict[str, JobStatus]:
    """The lines of `--format=%i|%T|%r`."""
    rows = (line.split("|", 2) for line in output.splitlines() if line.count("|") >= 2)
    return {job_id.strip(): _status(job_id.strip(), state.strip(), reason.strip()) for job_id, state, reason in rows}


def _with_arrays(elements: Mapping[str, JobStatus]) -> dict[str, JobStatus]:
    """The elements `A_3` and, under the id `A`, all of them together."""
    arrays: dict[str, list[JobStatus]] = {}
    for job_id, status in elements.items():
        arrays.setdefault(job_id.partition("_")[0], []).append(status)
    return {**elements, **{array: _together(statuses) for array, statuses in arrays.items()}}


def _together(statuses: Sequence[JobStatus]) -> JobStatus:
    first = min(statuses, key=lambda status: _ORDER.index(status.state))
    return replace(first, held=tuple(job_id for status in statuses for job_id in status.held))


def parse_scontrol(output: str) -> dict[str, str]:
    """`scontrol show job --oneliner`: KEY=VALUE, as far as values hold no blanks."""
    return dict(item.split("=", 1) for item in output.split() if "=" in item)


def _status(job_id: str, state: str, reason: str) -> JobStatus:
    found = STATES.get(state, JobState.UNKNOWN)
    # A requeued job waits for cred_expire + 1 = 121 s with this reason (slurmctld, batch_requeue_fini).
    if found is JobState.QUEUED and reason == "BeginTime":
        return JobStatus(JobState.HELD, reason, held=(job_id,))
    return JobStatus(found, _REASONS.get(reason, reason))


def _array(array: JobArray) -> list[str]:
    limit = f"%{array.at_once}" if array.at_once else ""
    return [f"--array=0-{array.count - 1}{limit}"] if array.count > 1 else []


def _srun(plan: JobPlan, array: JobArray) -> list[str]:
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
        flags += ["--exact", "--mem=0", *_gpus(plan, plan.ranks_per_node)]
    box = plan.container
    flags += ["--kill-on-bad-exit=1", "--wait=60", "--export=ALL", *plan.srun_args]
    return [*flags, *(srun_flags(plan, box) if box and not box.starts_entrypoint else [])]


def _gpus(plan: JobPlan, slots: int) -> list[str]:
    if plan.slot_type != "gpu":
        return []
    count = f"{plan.gpu_type}:{slots}" if plan.gpu_type else str(slots)
    return [_GPU_FLAGS[plan.gpu_flag].format(count)]


def _quoted(flag: str) -> str:
    """One word for sbatch, which takes a backslash for an escape in either kind of quotes, unlike a shell."""
    return flag if _PLAIN.fullmatch(flag) else '"' + re.sub(r'(["\\])', r"\\\1", flag) + '"'


def _output(script: Path, array: JobArray) -> str:
    """For --output: `%` begins a pattern there, but a backslash escapes and ends all patterns (sbatch(1))."""
    if "\\" in str(script):
        return str(job_log(script)).replace("\\", "\\\\")
    return str(job_log(Path(str(script).replace("%", "%%")), "-%a" if array.count > 1 else ""))


def _time(text: str | None) -> float | None:
    """Slurm's local time, "2026-11-20T10:42:00"; None for "None", "Unknown" and "N/A"."""
    try:
        return datetime.fromisoformat(text or "").timestamp()
    except ValueError:
        return None
