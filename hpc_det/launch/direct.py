"""A launcher that starts the ranks of its node itself, with torchrun's environment variables.

    python3 -m hpc_det.launch.direct [--] (--trial module:Class | SCRIPT ARGS...)

It imports torch once and forks the ranks (hpc_det.launch.forked_ranks); commands without torch are executed. Each rank
writes to its own log. When a rank exits with another code than 0, the launcher kills the others at once and exits with
that code.

Trial classes, and scripts inside `hpc_det.core.init`, are connected to the agent and receive stop requests from it.
Another script receives one SIGTERM, after which it should save and exit; it is started again when the job resumes,
because its exit does not show whether it had finished. Then the launcher kills the ranks that still run before the
scheduler's deadline, if that is known, and in any case LEAVE_TOGETHER_S after the first rank has exited.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from hpc_det.errors import UsageError
from hpc_det.launch import forked_ranks
from hpc_det.launch.launchers.arguments import Launch, start
from hpc_det.launch.log_tail import how_it_ended, last_line, size_of
from hpc_det.node.files import make_folders, open_log
from hpc_det.node.forking import Forked
from hpc_det.node.json_files import read_json, write_json
from hpc_det.node.lines import connect_local
from hpc_det.node.oom import OomWatch
from hpc_det.node.process import SignalPipe, ends_with_parent, exit_code, ignore_stop_signals
from hpc_det.store.attempt import Attempt, failure_now, note_failure, read_stop

LEAVE_TOGETHER_S = 60.0
"""Seconds that the other ranks have to exit after a stop, from the exit of the first rank on.

Without a limit, a rank could wait for ever in a collective for a peer that SIGTERM killed before it had installed its
handler.
"""
RESERVE_S = 5.0
"""The ranks are killed this many seconds before the deadline, so that the job has time to record the result.

At most half of the time between the stop request and the deadline is kept.
"""
POLL_S = 1.0
"""Seconds between two checks of the deadline after a stop."""


def rank_environment(attempt: Attempt, local_rank: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank (torch.distributed.run, "Environment Variables")."""
    rank = attempt.node_rank * attempt.ranks_per_node + local_rank
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": attempt.world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": attempt.ranks_per_node,
        "GROUP_RANK": attempt.node_rank,
        "GROUP_WORLD_SIZE": attempt.nodes,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": attempt.world_size,
        "MASTER_PORT": attempt.master_port,
        "TORCHELASTIC_RUN_ID": attempt.number,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
    }
    # There is no torchrun agent, so rank 0 hosts the store.
    words = {"MASTER_ADDR": attempt.master_addr, "ROLE_NAME": "default", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    return {**words, **{name: str(number) for name, number in numbers.items()}}


class Ranks:
    """The ranks of this node."""

    def __init__(self, launch: Launch, attempt: Attempt, *, are_forked: bool) -> None:
        """`are_forked`: whether this process has imported the modules of the ranks, which are forked from it."""
        self._launch = launch
        self._attempt = attempt
        self._are_forked = are_forked
        self._processes: dict[int, subprocess.Popen[bytes] | Forked] = {}
        """The processes of the ranks that are still running, keyed by rank."""
        self._codes: dict[int, int] = {}
        """The return codes of the ranks that have exited, keyed by rank."""
        self._logs_began: dict[int, int] = {}
        """Bytes in each rank's log when the rank was started, keyed by rank."""
        self._oom = OomWatch()
        self._code = 0
        self._is_stopping = False
        """True once a rank has received the stop request as a SIGTERM."""
        self._ends_at = math.inf
        """Seconds since the epoch at which the remaining ranks are killed."""
        self._selector = selectors.DefaultSelector()
        self._signals = SignalPipe([signal.SIGCHLD])
        self._selector.register(self._signals.fd, selectors.EVENT_READ, self._on_child)
        self._agent = connect_local(attempt.socket)
        self._selector.register(self._agent.connection, selectors.EVENT_READ, self._on_agent)

    def run(self) -> int:
        """Run the ranks until all have exited. Return 0 if they exited with 0 or were asked to stop; otherwise the exit
        code of the first that failed.
        """
        for local_rank in range(self._attempt.ranks_per_node):
            self._start(local_rank)
        while self._processes:
            for key, _ in self._selector.select(POLL_S if self._is_stopping else None):
                key.data()
            if self._is_stopping and time.time() > self._deadline():
                self._send(signal.SIGKILL)
        if self._is_stopping and 0 in self._codes:  # only on the node of rank 0, because the outcome has one writer
            self._write_outcome(has_saved=self._codes[0] == 0)
        return self._code

    def _start(self, local_rank: int) -> None:
        environment = rank_environment(self._attempt, local_rank)
        rank = int(environment["RANK"])
        path = self._log(rank)
        make_folders(path.parent)
        self._logs_began[rank] = size_of(path)
        log = open_log(path)
        # Unbuffered, so that the last lines of a rank are in its log when it is killed.
        variables = {"PYTHONUNBUFFERED": "1", **os.environ, **self._attempt.store_of_ranks(), **environment}
        if self._are_forked:
            self._processes[rank] = forked_ranks.start(self._launch.command, variables, log, self._leave_to_rank)
        else:
            self._processes[rank] = self._popen(variables, log)
        os.close(log)

    def _leave_to_rank(self) -> None:
        """Close the files of the launcher in a forked rank, and prepare its signals."""
        self._signals.close()
        self._selector.close()
        self._agent.connection.close()
        self._prepare()

    @property
    def _prepare(self) -> Callable[[], None]:
        return _prepare_trial_rank if self._launch.joins_by_itself else _prepare_script_rank

    def _popen(self, environment: dict[str, str], log: int) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                self._launch.rank_command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=self._prepare,
            )
        except OSError as error:
            raise UsageError(f"entrypoint: {error.filename}: {error.strerror}") from None

    def _log(self, rank: int) -> Path:
        return self._attempt.trial.rank_log(self._attempt.number, rank)

    def _on_child(self) -> None:
        self._signals.received()
        ended = {rank: process for rank, process in self._processes.items() if process.poll() is not None}
        # Negative codes first: a rank that a signal has ended is the cause, and its peers fail because of it.
        for rank, process in sorted(ended.items(), key=lambda item: item[1].returncode or 0):
            del self._processes[rank]
            self._codes[rank] = code = process.returncode or 0
            if code and not self._code and not self._is_stopping:
                self._fail(rank, process)
        if ended and self._is_stopping:
            self._ends_at = min(self._ends_at, time.time() + LEAVE_TOGETHER_S)

    def _fail(self, rank: int, process: subprocess.Popen[bytes] | Forked) -> None:
        """Kill the other ranks and note the first failed one."""
        self._send(signal.SIGKILL)
        code = self._codes[rank]
        self._code = exit_code(code)
        log, began = self._log(rank), self._logs_began[rank]
        killer = self._oom.killer() if code == -signal.SIGKILL else ""
        message = f"process {process.pid}: {how_it_ended(code, log, began, killer)}"
        failure = failure_now(rank, message, lost=code < 0, printed=last_line(log, began), code=code)
        note_failure(self._attempt.trial, self._attempt.number, failure)

    def _on_agent(self) -> None:
        messages = self._agent.receive_some()
        if messages is None:  # the agent has died, and no other process would end the ranks
            self._selector.unregister(self._agent.connection)
            self._code = 1
            self._send(signal.SIGKILL)
        elif not self._launch.joins_by_itself:
            for message in messages:
                if "stop" in message.head:
                    self._ask_to_stop(joined=message.head.get("joined", ()))

    def _ask_to_stop(self, joined: Collection[int]) -> None:
        """Send SIGTERM to the ranks that receive no stop request from the agent. `joined`: those that do."""
        # SIGTERM has other meanings for some libraries: Lightning's handler starts a collective on each rank.
        others = self._processes.keys() - joined
        self._is_stopping = bool(others)
        for rank in others:
            self._processes[rank].send_signal(signal.SIGTERM)

    def _deadline(self) -> float:
        """Return when the ranks are killed after a stop, in seconds since the epoch."""
        request = read_stop(self._attempt.trial.stop, self._attempt.number)
        if request and request.deadline:
            reserve_s = min(RESERVE_S, max(request.deadline - request.time, 0) / 2)
            return min(self._ends_at, request.deadline - reserve_s)
        return self._ends_at

    def _send(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            process.send_signal(number)

    def _write_outcome(self, *, has_saved: bool) -> None:
        """Write the outcome of a stopped script that has written none, because exit code 0 alone would mean that it has
        finished.

        `has_saved`: whether the stopped script exited with 0, which is taken to mean that it has saved.
        """
        trial, number = self._attempt.trial, self._attempt.number
        former = read_json(trial.outcome) or {}
        if former.get("attempt") != number:
            # The batches of a script are unknown, so its saves count as its progress (`AttemptFacts.newest_saved`).
            saves = int(former.get("saves", 0)) + has_saved
            write_json(trial.outcome, {"attempt": number, "kind": "stopped", "steps": saves, "saves": saves})


def _prepare_trial_rank() -> None:
    """Prepare the process of a rank that runs a trial class; for Popen's `preexec_fn`."""
    # The stop signals stay ignored, as the agent has set them, until the rank installs handlers.
    ends_with_parent()


def _prepare_script_rank() -> None:
    """Prepare the process of a script's rank: SIGTERM gets its default action, which the script may replace."""
    ends_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def run(launch: Launch, attempt: Attempt) -> int:
    """Start the ranks and return the launcher's exit code. Raises UsageError if the command cannot be executed."""
    are_forked = forked_ranks.imported(forked_ranks.modules_of(launch.command, Path.cwd(), os.environ))
    return Ranks(launch, attempt, are_forked=are_forked).run()


def forked(given: Mapping[str, Any]) -> int:
    """Be the launcher in a process that was forked from the agent or its fork server; return the exit code.

    `given`: the launcher's "arguments", "environment" and "folder", the "log" to which it prints, or null for its
    present output, and "shares_modules", true if this process has imported the modules of the ranks.
    """
    ignore_stop_signals()  # the agent handles them
    os.environ.clear()
    os.environ.update(given["environment"])
    os.chdir(given["folder"])
    if given["log"]:
        log = open_log(Path(given["log"]))
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)

    def begin(launch: Launch, attempt: Attempt) -> int:
        return Ranks(launch, attempt, are_forked=given["shares_modules"]).run()

    return start("direct", given["arguments"], begin, about=__doc__)


def main(argv: list[str]) -> int:
    return start("direct", argv, run, about=__doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
