"""horovodrun for a gang on one node.

    python3 -m hpc_det.launch.horovod [[HVD_OVERRIDES...] --] [--autohorovod] (--trial module:Class | SCRIPT ARGS...)

Overrides come after the flags set here and so take precedence. Each line of output begins with the rank that printed
it. With --autohorovod a gang of one rank runs without horovodrun, as in Determined
(harness/determined/launch/horovod.py). Horovod itself is installed by the user.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import NoReturn

from hpc_det.errors import UsageError, count
from hpc_det.launch.direct import run
from hpc_det.launch.launchers.arguments import Launch, start
from hpc_det.store.attempt import Attempt

AUTO = "--autohorovod"
RANK = "HOROVOD_RANK,OMPI_COMM_WORLD_RANK,PMI_RANK"
"""The variables with a rank's number; `wrap_rank` takes the first one that is set."""
START_TIMEOUT_S = 1200
"""Seconds that horovodrun waits for all ranks to start; Determined's value."""


def horovodrun_command(launch: Launch, attempt: Attempt, interface: str | None) -> list[str]:
    """Return the command with horovodrun(1)'s flags, for a gang on this node alone."""
    return [
        "horovodrun",
        *("-np", str(attempt.world_size)),
        *("-H", f"localhost:{attempt.ranks_per_node}"),
        *("--start-timeout", str(START_TIMEOUT_S)),
        *(["--network-interface", interface] if interface else []),
        *launch.overrides,
        *(sys.executable, "-m", "hpc_det.launch.wrap_rank", RANK, "--"),
        *launch.rank_command,
    ]


def without_auto(argv: Sequence[str]) -> tuple[list[str], bool]:
    """Return the arguments without --autohorovod, and whether it was given."""
    words = [*argv]
    begin = words.index("--") + 1 if "--" in words else 0
    # After the script's name the flag would be the script's own.
    is_auto = words[begin : begin + 1] == [AUTO]
    return words[:begin] + words[begin + is_auto :], is_auto


def _check(attempt: Attempt) -> None:
    """Raise UsageError if this gang cannot run under horovodrun."""
    other = "hpc_det.launch.torch_distributed"
    if shutil.which("horovodrun") is None:
        raise UsageError(f"hpc_det.launch.horovod: no horovodrun on the PATH; install horovod, or use {other}")
    if attempt.nodes > 1:
        raise UsageError(
            f"hpc_det.launch.horovod: the gang has {count(attempt.nodes, 'node')}, and this launcher supports one; "
            f"use {other}"
        )


def main(argv: list[str], *, is_auto: bool = False, about: str | None = __doc__) -> int:
    words, is_asked_for = without_auto(argv)

    def begin(launch: Launch, attempt: Attempt) -> int:
        if (is_auto or is_asked_for) and attempt.world_size == 1:
            return run(launch, attempt)
        _become_horovodrun(launch, attempt)

    return start("autohorovod" if is_auto else "horovod", words, begin, about=about)


def _become_horovodrun(launch: Launch, attempt: Attempt) -> NoReturn:
    _check(attempt)
    os.environ["USE_HOROVOD"] = "1"
    # With these set, horovodrun's mpirun would ask Slurm for hosts and start all ranks there.
    for name in ("SLURM_JOBID", "SLURM_JOB_ID"):
        os.environ.pop(name, None)
    command = horovodrun_command(launch, attempt, os.environ.get("GLOO_SOCKET_IFNAME"))
    os.execvp(command[0], command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
