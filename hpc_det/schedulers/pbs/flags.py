"""A job of PBS as qsub is told of it, after qsub(1B) and pbs_resources(7B)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from hpc_det.errors import UsageError
from hpc_det.plan.job_plan import JobArray, JobPlan
from hpc_det.plan.priority import pbs_priority_of
from hpc_det.store.folders import job_log

INDEX = "HPC_DET_INDEX"
"""The place in its array of an element that was submitted alone."""
LONGEST_NAME = 230
_TWO_WORDS = re.compile(r"(-\w)\s+(\S.*)")
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./^-]+")


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
