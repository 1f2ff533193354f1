"""A rank that is a script of the user's, under a parent that tells the agent what becomes of it.

    RANK=R ... python3 -m hpc_det.launch.launchers.watched COMMAND...

srun and deepspeed start it. A script that fails is named with its rank and exit code, and ends the gang at once. When
the agent is gone, the script is ended.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Sequence

from hpc_det.launch.launchers.arguments import for_python, is_trial
from hpc_det.node.agent_socket import report_exit, say_hello
from hpc_det.node.lines import Line, connect_local
from hpc_det.node.process import SignalPipe, adopt_orphans, end_descendants, exit_code
from hpc_det.store.attempt import Attempt, failure_now, note_failure


def as_rank(command: Sequence[str]) -> list[str]:
    """The command line of one rank: of a trial class, or of a script under watch."""
    if is_trial(command):
        return [sys.executable, *command]
    return [sys.executable, "-m", "hpc_det.launch.launchers.watched", *for_python(command)]


def watch(command: Sequence[str], attempt: Attempt, rank: int) -> int:
    """Its exit code, or 1 when the agent is gone."""
    line, signals = connect_local(attempt.socket), SignalPipe([signal.SIGCHLD])
    script = subprocess.Popen(command)
    say_hello(line, rank, script.pid)
    with selectors.DefaultSelector() as selector:
        for source in (line.connection.fileno(), signals.fd):
            selector.register(source, selectors.EVENT_READ)
        while script.poll() is None:
            ready = {key.fd for key, _ in selector.select()}
            signals.received()
            if line.connection.fileno() in ready and line.receive_some() is None:
                end_descendants()
                return 1
    return _tell(attempt, rank, script.returncode, line)


def _tell(attempt: Attempt, rank: int, returncode: int, line: Line) -> int:
    code = exit_code(returncode)
    if code:
        ended = f"ended by signal {signal.Signals(-returncode).name}" if returncode < 0 else f"exit code {code}"
        note_failure(attempt.trial, attempt.number, failure_now(rank, ended))
    report_exit(line, code)
    return code


def main(argv: list[str]) -> int:
    adopt_orphans()
    try:
        return watch(argv, Attempt.from_env(os.environ), int(os.environ["RANK"]))
    except OSError as error:
        print(f"entrypoint: {error.filename}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
