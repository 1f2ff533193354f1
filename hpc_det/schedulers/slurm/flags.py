"""A job of Slurm as sbatch and srun are told of it, after sbatch(1) and srun(1)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_det.plan.container_command import srun_flags
from hpc_det.plan.job_plan import JobArray, JobPlan
from hpc_det.plan.priority import nice_of
from hpc_det.store.folders import job_log

if TYPE_CHECKING:
    from hpc_det.config.cluster import Cluster

_GPU_FLAGS = {
    "gpus-per-node": "--gpus-per-node={}",
    "gres": "--gres=gpu:{}",
    "tres-per-node": "--tres-per-node=gres/gpu:{}",
}
_TWO_WORDS = re.compile(r"(-\w|--[\w-]+)\s+\S")
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


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
