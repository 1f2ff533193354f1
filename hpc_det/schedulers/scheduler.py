"""The interface of a scheduler, and functions that run its commands.

A scheduler is a class with the methods of `Scheduler`: command builders, output parsers and one table of states. To add
one, add a folder here and a template in slurm_templates/. Commands are argument lists and are never run by a shell.

Nothing here imports more than the standard library at run time: node agents import this module, and so does every
program that loads submitit with the PBS plugin. hpc_det.plan is imported for types only.
"""

from __future__ import annotations

import enum
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from hpc_det.errors import HpcDetError, shown
from hpc_det.requeue import Cause

if TYPE_CHECKING:
    from hpc_det.plan.job_plan import JobArray, JobPlan

Run = Callable[[Sequence[str]], str]
"""A function that runs a command and returns its stdout. Raises CommandError. Tests pass their own."""

T = TypeVar("T")

TIMEOUT_S = 60.0
"""Seconds until a command of the scheduler counts as unanswered."""
ENV = "env"
"""env(1), with which a command may begin to set or unset variables."""
# Long enough for a restart or an upgrade of the scheduler. Waiting costs nothing: the job keeps its nodes, and a
# scheduler that is away could not give them to another job.
AWAY_S, AGAIN_S = 1800.0, 3.0
"""AWAY_S: seconds that a job waits for a scheduler that does not answer. AGAIN_S: seconds between two tries."""
_TEMPORARY = ("/var/tmp", "/tmp")
"""Candidates for a temporary folder, in order of preference. /var/tmp is the default of PBS."""


class CommandError(HpcDetError):
    """A scheduler's command was not found, failed, or did not answer in time."""

    def __init__(self, message: str, output: str = "", returncode: int | None = None) -> None:
        super().__init__(message)
        self.output = output
        """The stdout of the failed command: qstat prints the jobs that it found even if it fails for others."""
        self.returncode = returncode
        """The exit code; None if the command did not run, did not answer in time, or ran but its answer is unusable."""


class NoAnswer(CommandError):
    """The scheduler could not be reached or did not answer in time; a later try may succeed.

    `may_have_acted`: whether the scheduler may have received and served the request nevertheless.
    """

    def __init__(self, message: str, output: str = "", *, may_have_acted: bool = True) -> None:
        super().__init__(message, output)
        self.may_have_acted = may_have_acted


# From slurm_errno.c, pbs_error.h, and strerror(3) for errors that they pass on. scontrol reports a refused connection
# as "Unexpected message received".
_NOT_CONNECTED = re.compile(
    r"(?:Unable to contact slurm controller )?\(connect failure\)|"
    r"cannot connect to server|Connection refused|No route to host|Network is unreachable"
)
_NOT_ANSWERED = re.compile(
    r"Unable to contact slurm controller|timed out|Unexpected message received|Zero Bytes were transmitted|"
    r"Transport endpoint is not connected|Connection reset|Communication connection failure|in standby mode|End of File"
)


def says_no_answer(said: str) -> bool:
    """Return whether `said`, the output of a scheduler's command, reports that the scheduler did not answer."""
    return bool(_NOT_CONNECTED.search(said) or _NOT_ANSWERED.search(said))


def refusal(message: str, said: str, output: str = "", returncode: int | None = None) -> CommandError:
    """Return the error of a command that has failed and printed `said`: NoAnswer if the scheduler did not answer."""
    if not says_no_answer(said):
        return CommandError(message, output, returncode)
    # A command may try several servers in turn: one that timed out may have received the request.
    others = _NOT_CONNECTED.sub("", said)
    return NoAnswer(f"{message}; try again later", output, may_have_acted=bool(_NOT_ANSWERED.search(others)))


def run_command(command: Sequence[str], env: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S) -> str:
    """Run `command` and return its stdout.

    `env` is its environment; None: that of this process. Raises NoAnswer if the scheduler cannot be reached or takes
    longer than `timeout_s`, and CommandError for any other failure.
    """
    name = _program(command)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            env=env,
        )
    except FileNotFoundError:
        raise _not_found(name) from None
    except OSError as error:  # not executable, or no permission
        raise CommandError(f"{name}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{name}: no answer within {timeout_s:g} s; try again later") from None
    if done.returncode == 127 and command[0] == ENV:  # env(1): exit status if the command is not found
        raise _not_found(name)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "no output").replace("\n", "; ")
        raise refusal(f"{name}: refused with exit code {done.returncode}: {said}", said, done.stdout, done.returncode)
    return done.stdout


def _program(command: Sequence[str]) -> str:
    """Return the program that `command` runs, without a leading env(1) and its arguments."""
    words = command[1:] if command[0] == ENV else command
    return next((word for word in words if not word.startswith("-") and "=" not in word), command[0])


def _not_found(name: str) -> CommandError:
    return CommandError(
        f"{name}: not found on PATH; run this on a login node of the cluster, or choose --cluster local"
    )


def patiently(ask: Callable[[], T], say: Callable[[str], None], within_s: float = AWAY_S) -> T:
    """Call `ask` until it does not raise NoAnswer, and return its result. Raises the last NoAnswer after `within_s`
    seconds.

    `say` receives one message, when the first try fails.
    """
    end, is_news = time.monotonic() + within_s, True
    while True:
        try:
            return ask()
        except NoAnswer as error:
            if time.monotonic() > end:
                raise
            if is_news:
                say(f"the scheduler gives no answer; retrying for up to {within_s / 60:.0f} min: {error}")
            is_news = False
        time.sleep(AGAIN_S)


def whole_lines(output: str) -> list[str]:
    """Return the lines of `output` that end with a newline."""
    # A wrapper or cache of the site may pass on only a part of an answer, so a last line without a newline may be cut
    # off.
    return output.split("\n")[:-1]


@contextmanager
def reading(command: str) -> Iterator[None]:
    """Convert errors of parsing the answer of `command` to CommandError. A context manager, or a decorator of a
    function.
    """
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CommandError(
            f"{command}: its answer cannot be parsed ({type(error).__name__}: {shown(str(error))}); run the command by "
            "hand to see what it prints"
        ) from error


def outside_any_job(env: Mapping[str, str], python: str | None = None) -> dict[str, str]:
    """Return `env` without the variables of the job that this process runs in, for a submission from inside a job.

    `python` is the interpreter of the job. `TMPDIR` is set to a writable folder if necessary.
    """
    # sbatch reads SLURM_* variables as options (sbatch(1), INPUT ENVIRONMENT VARIABLES). Only those that locate the
    # site's scheduler are kept.
    of_site = ("SLURM_CONF", "PBS_CONF_FILE", "PBS_EXEC", "PBS_HOME", "PBS_SERVER", "PBS_DEFAULT")
    outside = {n: value for n, value in env.items() if n in of_site or not n.startswith(("SLURM_", "PBS_"))}
    # Each job puts the folder of its Python before PATH; without this, a chain of jobs would add it again each time.
    if python and "PATH" in outside:
        outside["PATH"] = outside["PATH"].removeprefix(f"{os.path.dirname(python)}:")
    return {**outside, **temporary_folder(outside)}


def submit_from_job(
    command: Sequence[str], parse: Callable[[str], str], env: Mapping[str, str], python: str | None = None
) -> str:
    """Run `command`, which submits a job, and return the id that `parse` finds in its answer. Raises CommandError.

    `env` is the environment of the job that this process runs in; the new job inherits nothing specific to that job.
    """
    answer = run_command(command, outside_any_job(env, python))
    try:
        return parse(answer)
    except ValueError as error:
        raise CommandError(str(error)) from None


def temporary_folder(env: Mapping[str, str]) -> dict[str, str]:
    """Return variables that name a writable temporary folder for `qsub`; empty if that of `env` is writable."""
    # qsub first copies the script to a temporary folder. PBS removes the job's own, even before the job has ended where
    # several nodes share that folder.
    own = env.get("PBS_TMPDIR") or env.get("TMPDIR") or _TEMPORARY[0]
    if _can_write(own):
        return {}
    folder = os.path.abspath(next(filter(_can_write, (*_TEMPORARY, ".")), own))
    return {"TMPDIR": folder, **({"PBS_TMPDIR": folder} if "PBS_TMPDIR" in env else {})}


def _can_write(folder: str) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


class JobState(enum.Enum):
    """The states of a job that hpc_det distinguishes."""

    QUEUED = "queued"
    HELD = "held"
    """Held by the scheduler for a while after a requeue; `Scheduler.release` starts it. A QueuedJob also if a person
    holds it.
    """
    RUNNING = "running"
    ENDED = "ended"
    UNKNOWN = "unknown"
    """The scheduler did not answer. This is never a reason to act on the job."""


@dataclass(frozen=True)
class JobStatus:
    """The status of a job, or of all elements of a job array together: RUNNING if any of them runs."""

    state: JobState
    reason: str = ""
    """The scheduler's reason for the state, or why the state is unknown; "" without one."""
    held: tuple[str, ...] = ()
    """The ids that `release` can start."""
    is_suspended: bool = False
    """Whether all processes of a RUNNING job are stopped until the scheduler resumes it."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """The arguments of one call of sbatch or qsub."""

    script: str
    """The path of the job script."""
    array: JobArray
    """The array that the script was written for."""
    index: int | None = None
    """The only element of the array to submit; None submits all of them."""
    after: str | None = None
    """The id of a job that must end first; None: start without waiting."""
    exclude: tuple[str, ...] = ()
    """Hosts that the job must not run on."""


class Scheduler(Protocol):
    """A scheduler, without state. `env` is the environment of the job, as seen on its own nodes."""

    template: str
    """The file name of the job script's template in slurm_templates/."""
    has_queue: bool
    """Whether a job can be requeued. Without a queue, its next attempt starts at once in the same job."""

    def script_variables(self, plan: JobPlan, array: JobArray, script: Path) -> dict[str, object]:
        """Return the variables that only this scheduler's template uses. `script` is the path that the script will
        have.
        """

    def submit_command(self, submission: Submission, run: Run = run_command) -> list[str]:
        """Return the command line that submits a job.

        Raises CommandError if the installed commands belong to another scheduler, or if too few nodes remain to run on.
        """

    def parse_submit(self, output: str, element: int | None = None) -> str:
        """Return the job id in the output of the submit command. Raises ValueError if there is not exactly one.

        `element`: the index, if only one element of an array was submitted.
        """

    def status(self, job_ids: Sequence[str], run: Run) -> dict[str, JobStatus]:
        """Return the status of each job, with as few queries as possible. It is UNKNOWN for a job whose query fails."""

    def cancel(self, job_id: str, run: Run) -> None:
        """End the job, or all elements of the array, whether waiting or running. Raises CommandError."""

    def withdraw(self, job_id: str, run: Run) -> None:
        """Remove a job, or the waiting elements of an array, from the queue; what already runs continues."""

    def release(self, job_id: str, run: Run) -> None:
        """Start a requeued job now, instead of when the scheduler ends its hold."""

    def job_id(self, env: Mapping[str, str]) -> str:
        """Return the id of the job that `env` belongs to; for an element of an array, the element's id."""

    def array_index(self, env: Mapping[str, str]) -> int:
        """Return the index of the job in its array, counted from 0."""

    def share(self, plan: JobPlan, place: int) -> dict[str, str]:
        """Return the variables that select the share of one gang, for jobs that several gangs share.

        `place` is the position of the gang in the allocation, counted from 0.
        """

    def node_rank(self, env: Mapping[str, str]) -> int:
        """Return the number of this node in its gang, counted from 0. `env`: the environment of the node's agent."""

    def hosts(self, env: Mapping[str, str]) -> list[str]:
        """Return the hosts of the gang that `env` belongs to, by node rank, with the names that `Submission.exclude`
        accepts.
        """

    def down_hosts(self, hosts: Sequence[str], run: Run) -> list[str]:
        """Return those of `hosts`, with the same names, that the scheduler considers down. Raises CommandError."""

    def unreached_hosts(self, printed: str) -> list[str]:
        """Return the hosts that the agent launcher could not reach or lost, found in its output."""

    def was_away(self, printed: str) -> bool:
        """Return whether the agent launcher failed because the scheduler did not answer, judged by its output."""

    def avoid(self, job_id: str, hosts: Sequence[str], run: Run) -> None:
        """Exclude these hosts for a job that waits in the queue or is being requeued."""

    def ends_at(self, plan: JobPlan, env: Mapping[str, str], run: Run) -> float | None:
        """Return when the job that `env` belongs to reaches its time limit, in seconds since the epoch.

        None: it has no limit, or the limit is not known.
        """

    def stop_cause(self, plan: JobPlan, env: Mapping[str, str], signalled_at: float, run: Run) -> Cause:
        """Return why the job that `env` belongs to was signalled at `signalled_at`, in seconds since the epoch."""

    def replaced(self, job_id: str, run: Run) -> None:
        """Inform the scheduler that another job continues this one, so that it does not requeue this one."""

    def requeue(self, job_id: str, env: Mapping[str, str], run: Run) -> None:
        """Requeue the running job that `env` belongs to. Calling this twice is harmless."""


_CLASSES = {
    "slurm": ("hpc_det.schedulers.slurm.scheduler", "Slurm"),
    "pbs": ("hpc_det.schedulers.pbs.scheduler", "Pbs"),
    "local": ("hpc_det.schedulers.local", "Local"),
}


def scheduler(name: str) -> Scheduler:
    """Return the scheduler `name` of a plan. Its module is imported only when it is used."""
    module, class_name = _CLASSES[name]
    instance: Scheduler = getattr(import_module(module), class_name)()
    return instance


def array_of(job_id: str) -> str:
    """Return the id of the array that an element belongs to; the id of a single job is returned unchanged.

    Slurm: `12` for `12_3`. PBS: `12[].server` for `12[3].server`.
    """
    return re.sub(r"\[\d+\]", "[]", job_id.partition("_")[0])
