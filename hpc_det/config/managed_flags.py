"""The sbatch flags that hpc_det sets itself: refused in `slurm.sbatch_args`, each with the setting to use instead.

Taken from Determined's list of refused options (nodes, ntasks, gpus, chdir, error, output, partition, requeue, gres
naming gpu), and those by which a preempted or timed-out job learns what is coming.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import pairwise

_SHAPE = "set resources.slots_per_trial; nodes and ranks follow from it"
_LOGS = "logs lie in the trial's folder: see `hpc-det experiment logs`"
_GPUS = "set resources.slots_per_trial, and gpu_flag and gpu_type in the cluster profile"
_REQUEUE = "hpc_det requeues by itself; bound the restarts with max_restarts"

MANAGED = {
    "array": "one experiment is one job; create one for each point",
    "clusters": "log in to the cluster that shall run it",
    "wrap": "set entrypoint",
    "wait": "use `hpc-det experiment wait`",
    "cpus-per-task": "set cpus_per_slot in the cluster profile",
    "gpus-per-task": _GPUS,
    "gpus-per-socket": _GPUS,
    "ntasks-per-gpu": _SHAPE,
    "nodes": _SHAPE,
    "ntasks": _SHAPE,
    "ntasks-per-node": _SHAPE,
    "gpus": _GPUS,
    "gpus-per-node": _GPUS,
    "tres-per-node": _GPUS,
    "tres-per-task": _GPUS,
    "het-group": "all nodes of a gang are alike; choose a pool whose nodes are",
    "gres": _GPUS,
    "chdir": "the job runs in the experiment's copy of the context directory",
    "error": _LOGS,
    "output": _LOGS,
    "open-mode": _LOGS,
    "partition": "set resources.resource_pool",
    "requeue": _REQUEUE,
    "no-requeue": _REQUEUE,
    "signal": "set signal_lead_s in the cluster profile",
    "time": "set resources.time_limit",
}
_SHORT = {
    "a": "array",
    "M": "clusters",
    "W": "wait",
    "c": "cpus-per-task",
    "N": "nodes",
    "n": "ntasks",
    "G": "gpus",
    "D": "chdir",
    "e": "error",
    "o": "output",
    "p": "partition",
    "t": "time",
}
# sbatch's short flags without a value may stand before another in one word: -HN2 is -H -N 2.
_SHORT_FLAG = re.compile(rf"-[HhkOQsV]*([{''.join(_SHORT)}])")
_NAMES_GPU = re.compile(r"(?:^|,)(?:gres[:/])?gpu\b")


class RefusedFlagsError(ValueError):
    """Flags that may not be given; `refused` has for each what is wrong and the remedy."""

    def __init__(self, refused: list[tuple[str, str]]) -> None:
        super().__init__("; ".join(what for what, _remedy in refused))
        self.refused = refused


def refuse_managed_flags(arguments: Sequence[str]) -> None:
    """Raise RefusedFlagsError if a flag of `MANAGED` is given, in any form that sbatch understands."""
    refused = [(f"hpc_det sets --{flag} itself, got {word!r}", MANAGED[flag]) for flag, word in _managed(arguments)]
    if refused:
        raise RefusedFlagsError(refused)


def _managed(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    words = [word for argument in arguments for word in _words(argument)]
    for word, following in pairwise([*words, ""]):
        flag = _flag(word)
        value = word.partition("=")[2] or following
        if flag and (flag != "gres" or _NAMES_GPU.search(value)):
            yield flag, word


def _words(argument: str) -> list[str]:
    try:
        return shlex.split(argument)
    except ValueError:  # an unbalanced quote is the user's text: look at its words all the same
        return argument.split()


def _flag(word: str) -> str | None:
    if word.startswith("--"):
        given = word[2:].partition("=")[0]
        # getopt takes any unambiguous beginning of a long flag, and no flag of sbatch is a beginning of a managed one.
        return next((flag for flag in (given, *MANAGED) if given and flag in MANAGED and flag.startswith(given)), None)
    short = _SHORT_FLAG.match(word)
    return _SHORT[short[1]] if short else None
