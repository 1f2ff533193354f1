"""The flags of sbatch and qsub that hpc_det sets itself: refused in `slurm.sbatch_args` and `pbs.pbsbatch_args`, each
with the setting to use instead.

Those of sbatch are taken from Determined's list of refused options (nodes, ntasks, gpus, chdir, error, output,
partition, requeue, gres naming gpu), and those by which a preempted or timed-out job learns what is coming.
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

_OURS = "the job script is hpc_det's own; its surroundings are modules and setup in the cluster profile"
_VARIABLES = "set environment.environment_variables"
# qsub(1B): a letter is a flag, and of -l and -W what stands before "=".
MANAGED_BY_QSUB = {
    "A": "set account in the cluster profile",
    "C": _OURS,
    "I": "run the trial on the login node with `hpc-det experiment create --local`",
    "J": MANAGED["array"],
    "N": "set name",
    "R": _LOGS,
    "S": _OURS,
    "V": _VARIABLES,
    "W block": MANAGED["wait"],
    "e": _LOGS,
    "j": _LOGS,
    "k": _LOGS,
    "l gpus": _SHAPE,
    "l mem": "set mem_per_node in the cluster profile",
    "l mpiprocs": _SHAPE,
    "l ncpus": MANAGED["cpus-per-task"],
    "l ngpus": _SHAPE,
    "l nodes": _SHAPE,
    "l ompthreads": MANAGED["cpus-per-task"],
    "l select": _SHAPE,
    "l walltime": MANAGED["time"],
    "o": _LOGS,
    "q": MANAGED["partition"],
    "r": _REQUEUE,
    "v": _VARIABLES,
    "z": "the id is how hpc_det knows the job",
}
_WITHOUT_VALUE = "fhIVXz"


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


def refuse_managed_qsub_flags(arguments: Sequence[str]) -> None:
    """Raise RefusedFlagsError if a flag of `MANAGED_BY_QSUB` is given, or a word that no `#PBS` line can hold."""
    refused = [
        (f"hpc_det sets -{flag} itself, got {word!r}", MANAGED_BY_QSUB[flag])
        for flag, word in _flags_of_qsub([word for argument in arguments for word in _words(argument)])
        if flag in MANAGED_BY_QSUB
    ]
    refused += [
        (f"{argument!r} holds both kinds of quotes, and qsub knows no escapes", "leave one kind out")
        for argument in arguments
        if '"' in argument and "'" in argument
    ]
    if refused:
        raise RefusedFlagsError(refused)


def _flags_of_qsub(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Flags and the words that they stand in. Letters without a value may stand before another in one word."""
    following = iter(words)
    for word in following:
        letters = word[1:] if re.match(r"-[A-Za-z]", word) else ""
        for place, letter in enumerate(letters, start=1):
            if letter in _WITHOUT_VALUE:
                yield letter, word
                continue
            value = letters[place:] or next(following, "")
            names = [item.partition("=")[0].strip() for item in value.split(",")] if letter in "lW" else []
            yield letter, word
            yield from ((f"{letter} {name}", f"-{letter} {value}") for name in names)
            break
