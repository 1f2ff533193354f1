"""The flags of sbatch and qsub that hpc_det sets itself, each with the setting to use instead.

They are refused in `slurm.sbatch_args` and `pbs.pbsbatch_args`: the options that Determined refuses, and the flags for
the signal and the time limit, by which a job is warned of its end.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence

_SHAPE = "set resources.slots_per_trial; nodes and ranks are derived from it"
_LOGS = "logs are written to the trial's folder; see `hpc-det experiment logs`"
_GPUS = "set resources.slots_per_trial, and gpu_flag and gpu_type in the cluster profile"
_REQUEUE = "hpc_det requeues jobs automatically; limit the restarts with max_restarts"

MANAGED = {
    "array": "hpc_det makes the arrays; use a searcher or `hpc-det run -m` for several trials",
    "clusters": "log in to that cluster and submit there",
    "wrap": "set entrypoint",
    "wait": "use `hpc-det experiment wait`",
    "cpus-per-task": "set resources.cpus_per_slot",
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
    "het-group": "all nodes of a gang must be alike; choose a pool with one kind of node",
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
_IN_RESOURCES = ("account", "qos", "constraint", "mem", "mem-per-cpu", "mem-per-gpu")
"""Flags of sbatch that keys of `resources` set too; they are refused beside the key."""
_SHORT_IN_RESOURCES = {"A": "account", "q": "qos", "C": "constraint"}
_WITHOUT_VALUE_OF_SBATCH = "HhIkOQsuVvW"
"""The short flags of sbatch that take no value; they may precede another flag in one word: -HN2 is -H -N 2."""
_TEXTS_OF_SBATCH = ("gres", "account", "comment", "constraint", "job-name", "mail-user", "reservation", "wckey")
"""The long flags of sbatch whose value may be the next word even if it looks like a flag."""
_NAMES_GPU = re.compile(r"(?:^|,)(?:gres[:/])?gpu\b")

_OURS = "hpc_det writes the job script; set modules and setup in the cluster profile"
_VARIABLES = "set environment.environment_variables"
# From qsub(1B). A key is the letter of a flag; for -l and -W it also has the name before "=".
MANAGED_BY_QSUB = {
    "C": _OURS,
    "G": "run the trial on the login node with `hpc-det experiment create --local`",
    "I": "run the trial on the login node with `hpc-det experiment create --local`",
    "X": "run the trial on the login node with `hpc-det experiment create --local`",
    "J": MANAGED["array"],
    "N": "set name",
    "R": _LOGS,
    "S": _OURS,
    "V": _VARIABLES,
    "W block": MANAGED["wait"],
    "c": "hpc_det saves its own checkpoints; set min_checkpoint_period",
    "e": _LOGS,
    "h": "create the experiment with --paused, and submit it with `hpc-det experiment activate`",
    "j": _LOGS,
    "k": _LOGS,
    "l gpus": _SHAPE,
    "l mem": "set resources.memory_per_slot",
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
    "u": "jobs run as the user who submits them",
    "v": _VARIABLES,
    "z": "hpc_det needs the job id that qsub prints",
    "-": "leave it out: qsub submits no job with --version, and other programs than the job script with --",
}
_WITHOUT_VALUE = "fGhIVXz"
"""The flags of qsub that take no value."""


class RefusedFlagsError(ValueError):
    """Flags that users may not give. `refused` contains a (problem, remedy) for each."""

    def __init__(self, refused: list[tuple[str, str]]) -> None:
        super().__init__("; ".join(what for what, _remedy in refused))
        self.refused = refused


def refuse_managed_flags(arguments: Sequence[str]) -> None:
    """Raise RefusedFlagsError if a flag of `MANAGED` is given, in any form that sbatch accepts."""
    refused = [(f"hpc_det sets --{flag} itself, got {word!r}", MANAGED[flag]) for flag, word in _managed(arguments)]
    if refused:
        raise RefusedFlagsError(refused)


def _managed(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (long flag, word) for each managed flag of sbatch. --gres is managed only if it names gpu."""
    for flag, word, value in _flags(arguments, MANAGED, _SHORT):
        if flag != "gres" or _NAMES_GPU.search(value):
            yield flag, word


def given_flags(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Return (long flag, word) for each flag of sbatch that requests the same as a key of `resources`."""
    return [(flag, word) for flag, word, _value in _flags(arguments, _IN_RESOURCES, _SHORT_IN_RESOURCES)]


def _flags(
    arguments: Sequence[str], known: Collection[str], short: Mapping[str, str]
) -> Iterator[tuple[str, str, str]]:
    """Yield (long flag, word, value) for each of the known flags of sbatch."""
    words = iter([word for argument in arguments for word in _words(argument)])
    for word in words:
        flag, value = _flag(word, known, short)
        if value is None:  # the next word is the value, also if it begins with a dash: -J -name
            value = next(words, "")
        if flag:
            yield flag, word, value


def _words(argument: str) -> list[str]:
    try:
        return shlex.split(argument)
    except ValueError:  # unbalanced quotes: a managed flag in such an argument must be found, too
        return argument.split()


def _flag(word: str, known: Collection[str], short: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Return the known flag in a word, or None, and the value in the word; None if that is the next word."""
    if word.startswith("--"):
        given, equals, value = word[2:].partition("=")
        # getopt accepts any unambiguous prefix of a long flag. No other flag of sbatch is a prefix of a known one.
        flag = next((flag for flag in (given, *known) if given and flag in known and flag.startswith(given)), None)
        return flag, None if not equals and (flag or given) in _TEXTS_OF_SBATCH else value
    letters = word[1:] if re.match(r"-[A-Za-z]", word) else ""
    for place, letter in enumerate(letters, start=1):
        if letter in short and letter in _WITHOUT_VALUE_OF_SBATCH:
            return short[letter], ""
        if letter not in _WITHOUT_VALUE_OF_SBATCH:
            return short.get(letter), letters[place:] or None
    return None, ""


def refuse_managed_qsub_flags(arguments: Sequence[str]) -> None:
    """Raise RefusedFlagsError for flags of `MANAGED_BY_QSUB`, and for words that cannot be quoted in a `#PBS` line."""
    refused = [
        (f"hpc_det does not accept -{flag} of qsub, got {word!r}", MANAGED_BY_QSUB[flag])
        for flag, word in given_qsub_flags(arguments)
        if flag in MANAGED_BY_QSUB
    ]
    refused += [
        (f"{argument!r} contains single and double quotes, and qsub has no escapes", "leave one kind out")
        for argument in arguments
        if '"' in argument and "'" in argument
    ]
    if refused:
        raise RefusedFlagsError(refused)


def given_qsub_flags(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Return (flag, word) for each flag of qsub, as `_flags_of_qsub` does."""
    return list(_flags_of_qsub([word for argument in arguments for word in _words(argument)]))


def _flags_of_qsub(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (flag, word) for each flag of qsub; for -l and -W also ("l NAME", word) for each resource or attribute.

    Flags without a value may precede another flag in one word.
    """
    following = iter(words)
    for word in following:
        if word.startswith("--"):
            yield "-", word
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
