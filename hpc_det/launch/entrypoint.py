"""The start of the entrypoint on a node, and its environment.

The launcher `direct` is forked from a fork server, which has imported torch and stays between the attempts, so that the
ranks of a next attempt need not import it; and if its ranks do not share torch, from the agent itself. A gang of one
rank has `direct` in place of torchrun. All other entrypoints are executed.
"""

from __future__ import annotations

import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from hpc_det.config.rank_variables import DETERMINED, NO_FORKS, PRELOAD, compat_packages, with_compat
from hpc_det.errors import HpcDetError, UsageError
from hpc_det.launch import direct
from hpc_det.launch.forked_ranks import LATER, modules_of
from hpc_det.launch.launchers.arguments import RANK, asks_for_help, parse
from hpc_det.node.fork_server import ForkServerProcess
from hpc_det.node.forking import Forked, close_files_of_parent
from hpc_det.node.import_bundle import VARIABLE as BUNDLE
from hpc_det.node.network import limit_look_ups, variables
from hpc_det.node.process import ignore_stop_signals, spare
from hpc_det.plan.container import of_the_job
from hpc_det.plan.job_plan import JobPlan
from hpc_det.store.attempt import Attempt

_DIRECT = "hpc_det.launch.direct"
_TORCHRUN = "hpc_det.launch.torch_distributed"
_NO_SHELL = re.compile(r"[\w@%+=:,./ -]+", re.ASCII)
"""A command line that means the same words to a shell and to `str.split`."""
_SELECTOR = selectors.BaseSelector


class Entrypoint(Protocol):
    """The process of an entrypoint, with the part of subprocess.Popen's interface that the agent uses."""

    pid: int

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None:
        """Return the exit code, -N after signal N; None while the process runs."""


class Starter:
    """Starts the entrypoint of each attempt on this node, and keeps the fork server between them."""

    def __init__(self) -> None:
        self._server: ForkServerProcess | None = None
        self._environment: Mapping[str, str] = {}
        """The environment in which the fork server has imported its modules."""
        self._modules: tuple[str, ...] = ()
        """The modules of the fork server; none if the ranks do not share any."""
        self._is_ready = False
        """Whether the fork server has reported that its imports are done."""
        self._forked: _Forked | None = None
        """The entrypoint of the present attempt, if it is forked."""
        self._number = 0
        """The number of entrypoints that were to be forked."""

    def prepare(self, command: Sequence[str], environment: Mapping[str, str], code: str) -> None:
        """Start to import the modules that the ranks of this command share, unless a fork server has done so.

        `environment`: that of the entrypoint without the variables of the attempt, which are not read by imports.
        `code`: the folder in which the command runs.
        """
        modules = _shared_modules(command, environment, code)
        if (modules, environment) == (self._modules, self._environment):
            return
        self.close()
        self._modules, self._environment = modules, environment
        if modules:
            later = LATER if RANK in modules else ()
            self._server = ForkServerProcess.start(
                [*modules, _DIRECT], later=later, environment=environment, folder=code
            )
            spare(self._server.process.pid)

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], code: str, log: Path | None, selector: _SELECTOR
    ) -> Entrypoint:
        """Start the entrypoint. Raises UsageError if it cannot be executed.

        `log`: the file to which it prints; None: where this process does. `selector`: is woken when a forked
        entrypoint ends.
        """

        def execute() -> Entrypoint:
            return executed(command, environment, code)

        words = _words_of_direct(command, environment)
        if words is None:
            return execute()
        argument = {
            "arguments": [*words],
            "environment": {**environment},
            "folder": code,
            "log": str(log) if log else None,
            "shares_modules": self._server is not None,
        }
        if self._server is None:
            return Forked(lambda: _run_direct(argument))
        self._number += 1
        self._forked = _Forked(self._server, self._number, argument, execute, self._lose, selector)
        if self._is_ready:
            self._forked.begin()
        return self._forked

    def forget(self) -> None:
        """Forget the entrypoint, and end the fork server if it has not forked it yet and so would do it later."""
        if self._forked and not self._forked.has_begun:
            self.close()
        elif self._forked:
            self._is_ready = self._server is not None
        self._forked = None

    def close(self) -> None:
        """End the fork server; the next `prepare` starts a new one."""
        self._end_server()
        self._modules, self._environment = (), {}

    def _lose(self, has_forked: bool) -> None:
        """Clean up after a fork server that has ended. `has_forked`: whether it had forked the present entrypoint."""
        if has_forked or self._is_ready:
            self.close()
        else:  # `prepare` does not try the same imports again
            self._end_server()

    def _end_server(self) -> None:
        if self._server:
            self._server.line.connection.close()
            self._server.process.kill()  # with it the kernel ends the processes that it has forked
            self._server.process.wait()
        self._server, self._is_ready = None, False


class _Forked:
    """An entrypoint that the fork server forks once its imports are done."""

    def __init__(
        self,
        server: ForkServerProcess,
        number: int,
        argument: dict[str, Any],
        execute: Callable[[], Entrypoint],
        on_lost: Callable[[bool], None],
        selector: _SELECTOR,
    ) -> None:
        self.pid = server.process.pid
        self.returncode: int | None = None
        self._server = server
        self._number = number
        """Identifies this entrypoint in messages: the exit of a former one, which was killed, may be reported late."""
        self._argument = argument
        self._execute = execute
        self._on_lost = on_lost
        self._selector = selector
        self._executed: Entrypoint | None = None
        """The entrypoint that was executed because the fork server could not fork it."""
        self._is_forked = False
        selector.register(server.line.connection, selectors.EVENT_READ, self._on_messages)

    def begin(self) -> None:
        """Request the process from the fork server."""
        self._server.fork(self._number, f"{_DIRECT}:forked", self._argument)

    @property
    def has_begun(self) -> bool:
        """Return whether the entrypoint was forked or executed."""
        return self._is_forked or self._executed is not None

    def poll(self) -> int | None:
        if self._executed:
            self.pid, self.returncode = self._executed.pid, self._executed.poll()
        return self.returncode

    def _on_messages(self) -> None:
        messages = self._server.line.receive_some()
        for message in [each.head for each in messages or ()]:
            if message.get("forked") == self._number:
                self._is_forked, self.pid = True, message["pid"]
            elif message.get("exited") == self._number:
                self.returncode = message["code"]
                self._selector.unregister(self._server.line.connection)
            elif "ready" in message and message["ready"] is None:
                self.begin()
            elif "ready" in message:
                messages = None
        if messages is None:
            self._lose_server()

    def _lose_server(self) -> None:
        """Execute the entrypoint if the fork server cannot fork it; else the kernel has ended both."""
        self._selector.unregister(self._server.line.connection)
        self._on_lost(self._is_forked)
        if self._is_forked:
            self.returncode = -signal.SIGKILL
        else:
            self._executed = self._execute()


def environment_of(plan: JobPlan, interface: str | None, scratch: str | None) -> dict[str, str]:
    """Return the environment of all entrypoints on this node, without the variables of an attempt.

    `interface`: the network interface between the nodes; `scratch`: the node's folder for temporary files.
    """
    is_inside = plan.container is not None and plan.container.starts_entrypoint
    # Of the job's variables, a container that the agent starts receives only those that ranks need in it, too.
    given = of_the_job(os.environ) if is_inside else os.environ
    wanted = dict(item.split("=", 1) for item in plan.environment)
    environment = {**given, **({"TMPDIR": scratch} if scratch else {}), **wanted}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [plan.code, environment.get("PYTHONPATH")]))
    environment["HPC_DET_SLOT_TYPE"] = plan.slot_type
    environment[BUNDLE] = plan.bundle
    environment[PRELOAD] = ",".join(plan.preload) if plan.nursery else NO_FORKS
    if plan.slot_type == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # the node may have GPUs that this gang did not request
        environment.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed reports on every rank that it found no GPU
    if plan.container:  # runtimes mount the home folder, and Python would import packages from it
        environment.setdefault("PYTHONNOUSERSITE", "1")
    environment.setdefault("OMP_NUM_THREADS", str(plan.cpus_per_rank))
    limit_look_ups(environment)
    if interface:
        environment = {**variables(interface), **environment}
    return with_compat(environment, compat_packages(environment))


def of_attempt(environment: dict[str, str], attempt: Attempt, interface: str | None) -> dict[str, str]:
    """Return the environment of an attempt's entrypoint: `environment` with the variables of the attempt."""
    environment = {**environment, **attempt.to_env()}
    if DETERMINED in compat_packages(environment):
        from hpc_det.launch.determined_variables import determined_variables  # other jobs need none of its imports

        environment = {**determined_variables(attempt, interface), **environment}
    return environment


def without_torchrun(command: Sequence[str]) -> Sequence[str]:
    """Return the command of a gang of one rank with `direct` instead of torchrun without overrides, which would do the
    same (hpc_det.launch.torch_distributed); another command is returned unchanged.
    """
    python, *words = _plain_words(command)
    if words[:2] == ["-m", _TORCHRUN] and not asks_for_help(words[2:], "torch_distributed"):
        with suppress(HpcDetError):  # the launcher reports it
            if not parse(words[2:], "torch_distributed").overrides:
                return [python, "-m", _DIRECT, *words[2:]]
    return command


def executed(command: Sequence[str], environment: Mapping[str, str], code: str) -> subprocess.Popen[bytes]:
    """Execute a command in the folder `code`. Raises UsageError if that fails."""
    try:
        return subprocess.Popen(
            command,
            cwd=code,
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=ignore_stop_signals,  # the agent handles them and notifies the ranks over its socket
        )
    except OSError as error:
        raise UsageError(f"entrypoint: {error.filename}: {error.strerror}") from None


def _run_direct(argument: dict[str, Any]) -> int:
    """Be the launcher `direct` in a process that was forked from the agent."""
    close_files_of_parent()
    return direct.forked(argument)


def _plain_words(command: Sequence[str]) -> Sequence[str]:
    """Return the words of a command line for a shell if it needs none; else the command."""
    if len(command) == 3 and [*command[:2]] == ["/bin/sh", "-c"] and _NO_SHELL.fullmatch(command[2]):
        return command[2].split()
    return command


def _words_of_direct(command: Sequence[str], environment: Mapping[str, str]) -> Sequence[str] | None:
    """Return the arguments of the launcher `direct`; None if the command is another one, or in another Python."""
    python, *words = _plain_words(command)
    path = shutil.which(python, path=environment.get("PATH"))
    is_this_python = path is not None and os.path.dirname(path) == os.path.dirname(sys.executable)
    return words[2:] if words[:2] == ["-m", _DIRECT] and is_this_python else None


def _shared_modules(command: Sequence[str], environment: Mapping[str, str], code: str) -> tuple[str, ...]:
    """Return the modules that the ranks of this command share."""
    words = _words_of_direct(command, environment)
    if words is None or asks_for_help(words, "direct"):
        return ()
    with suppress(HpcDetError):  # the launcher reports it
        return modules_of(parse(words, "direct").command, Path(code), environment)
    return ()
