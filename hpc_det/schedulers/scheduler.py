"""What every scheduler has to offer, and how its commands are run.

A scheduler is command builders, output parsers and one state table: a class with the methods of `Scheduler`. A third
one is one new folder here and one template in slurm_templates/. Commands are argument lists, never run by a shell.
Nothing here imports more than the standard library: node agents use it too, and so does every program that loads
submitit with our plugin, for which hpc_det.plan is imported for types only.
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
"""Runs a command and returns its stdout; raises CommandError. Tests pass their own."""

T = TypeVar("T")

TIMEOUT_S = 60.0
ENV = "env"
"""env(1): a command can begin with it, and with settings of variables."""
AWAY_S, AGAIN_S = 1800.0, 3.0
"""Seconds that a job waits for a scheduler that does not answer, which may be restarted or upgraded meanwhile, and
seconds between two tries. The job keeps its nodes, and the scheduler could not give them to anybody else.
"""
_TEMPORARY = ("/var/tmp", "/tmp")
"""PBS' own default comes first."""


class CommandError(HpcDetError):
    """A scheduler's command is absent, failed, or gave no answer in time."""

    def __init__(self, message: str, output: str = "", returncode: int | None = None) -> None:
        super().__init__(message)
        self.output = output
        """What a command that failed has printed before: qstat answers for some jobs and fails for others."""
        self.returncode = returncode
        """None: the command did not run, gave no answer in time, or its answer is the error."""


class NoAnswer(CommandError):
    """The scheduler could not be reached, or did not answer in time; later it may.

    `may_have_acted`: whether the request may have arrived, and been served, all the same.
    """

    def __init__(self, message: str, output: str = "", *, may_have_acted: bool = True) -> None:
        super().__init__(message, output)
        self.may_have_acted = may_have_acted


# slurm_errno.c and pbs_error.h, and strerror(3) of what they pass on. scontrol turns a refused connection into
# "Unexpected message received".
_NOT_CONNECTED = re.compile(
    r"(?:Unable to contact slurm controller )?\(connect failure\)|"
    r"cannot connect to server|Connection refused|No route to host|Network is unreachable"
)
_NOT_ANSWERED = re.compile(
    r"Unable to contact slurm controller|timed out|Unexpected message received|Zero Bytes were transmitted|"
    r"Transport endpoint is not connected|Connection reset|Communication connection failure|in standby mode|End of File"
)


def says_no_answer(said: str) -> bool:
    """Whether a command of the scheduler complains, in what it has printed, that the scheduler gives no answer."""
    return bool(_NOT_CONNECTED.search(said) or _NOT_ANSWERED.search(said))


def refusal(message: str, said: str, output: str = "", returncode: int | None = None) -> CommandError:
    """The error of a command that failed and has printed `said`."""
    if not says_no_answer(said):
        return CommandError(message, output, returncode)
    others = _NOT_CONNECTED.sub("", said)  # one of several servers may have had the request
    return NoAnswer(message, output, may_have_acted=bool(_NOT_ANSWERED.search(others)))


def run_command(command: Sequence[str], env: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S) -> str:
    """The stdout of `command`, run in `env`; None: in that of this process."""
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
    except OSError as error:  # no program, or not one that this user may run
        raise CommandError(f"{name}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{name}: no answer in {timeout_s:g} s; try again later") from None
    if done.returncode == 127 and command[0] == ENV:  # env(1), exit status
        raise _not_found(name)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "it printed nothing").replace("\n", "; ")
        raise refusal(f"{name}: refused with exit code {done.returncode}: {said}", said, done.stdout, done.returncode)
    return done.stdout


def _program(command: Sequence[str]) -> str:
    """What `env` starts, or the command itself."""
    words = command[1:] if command[0] == ENV else command
    return next((word for word in words if not word.startswith("-") and "=" not in word), command[0])


def _not_found(name: str) -> CommandError:
    return CommandError(
        f"{name}: not found on PATH; run this on a login node of the cluster, or choose --cluster local"
    )


def patiently(ask: Callable[[], T], say: Callable[[str], None], within_s: float = AWAY_S) -> T:
    """What `ask` returns, called again as long as it raises NoAnswer; the last NoAnswer where that takes too long."""
    end, is_news = time.monotonic() + within_s, True
    while True:
        try:
            return ask()
        except NoAnswer as error:
            if time.monotonic() > end:
                raise
            if is_news:
                say(f"the scheduler gives no answer, asking again for {within_s / 60:.0f} min: {error}")
            is_news = False
        time.sleep(AGAIN_S)


def whole_lines(output: str) -> list[str]:
    """Without the last one where it was cut off: a site's wrapper or cache may pass on a part of an answer."""
    return output.split("\n")[:-1]


@contextmanager
def reading(command: str) -> Iterator[None]:
    """Around code that reads the answer of `command`, or on a function that does: raises CommandError where the answer
    has another form than that of any known version.
    """
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CommandError(
            f"{command}: its answer cannot be read ({type(error).__name__}: {shown(str(error))}); see what the command "
            f"prints when you run it by hand"
        ) from error


def outside_any_job(env: Mapping[str, str], python: str | None = None) -> dict[str, str]:
    """`env` for a submission. Variables of a job that we run in would reach sbatch as options (sbatch(1), INPUT
    ENVIRONMENT VARIABLES), and the folder of `python`, which each job puts before the PATH, would be there once more
    for each job after the other. `TMPDIR` is a folder that can be written.
    """
    of_site = ("SLURM_CONF", "PBS_CONF_FILE", "PBS_EXEC", "PBS_HOME", "PBS_SERVER", "PBS_DEFAULT")
    outside = {n: value for n, value in env.items() if n in of_site or not n.startswith(("SLURM_", "PBS_"))}
    if python and "PATH" in outside:
        outside["PATH"] = outside["PATH"].removeprefix(f"{os.path.dirname(python)}:")
    return {**outside, **temporary_folder(outside)}


def submit_from_job(
    command: Sequence[str], parse: Callable[[str], str], env: Mapping[str, str], python: str | None = None
) -> str:
    """The id of the job that `command` submits, found by `parse` in its answer. `env`: of the job that this runs in, of
    which the other one gets nothing. Raises CommandError.
    """
    answer = run_command(command, outside_any_job(env, python))
    try:
        return parse(answer)
    except ValueError as error:
        raise CommandError(str(error)) from None


def temporary_folder(env: Mapping[str, str]) -> dict[str, str]:
    """The variables for a `qsub`, which first copies the script to a temporary folder, where those of `env` cannot be
    written: PBS removes a job's own, even before the job has ended where several nodes share the folder.
    """
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
    QUEUED = "queued"
    HELD = "held"
    """Requeued and held back by the scheduler; `release` lifts it."""
    RUNNING = "running"
    ENDED = "ended"
    UNKNOWN = "unknown"
    """The scheduler could not be asked: no news, never a state to act on."""


@dataclass(frozen=True)
class JobStatus:
    """Of a job, or of all elements of a job array together: RUNNING if any of them runs."""

    state: JobState
    reason: str = ""
    held: tuple[str, ...] = ()
    """The ids that `release` can let go."""
    is_suspended: bool = False
    """RUNNING, but all its processes are stopped until the scheduler resumes it."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One call of sbatch or qsub."""

    script: str
    array: JobArray
    """What the script was written for."""
    index: int | None = None
    """Only this element of the array; None: all of them."""
    after: str | None = None
    """A job that must have ended before."""
    exclude: tuple[str, ...] = ()
    """Hosts to keep away from."""


class Scheduler(Protocol):
    """Stateless. `env` is the environment of the job, on its own nodes."""

    template: str
    """The script's template in slurm_templates/."""
    has_queue: bool
    """Whether a job can go back into a queue. Without one, its next attempt starts at once in the same job."""

    def script_variables(self, plan: JobPlan, array: JobArray, script: Path) -> dict[str, object]:
        """What the template shows beside what all of them do, all of it used there. `script`: where it will lie."""

    def submit_command(self, submission: Submission, run: Run = run_command) -> list[str]:
        """Raises CommandError where these are another scheduler's commands, or too few nodes are left to run on."""

    def parse_submit(self, output: str, element: int | None = None) -> str:
        """The job id; ValueError where there is none. `element`: the only one of its array that was submitted."""

    def status(self, job_ids: Sequence[str], run: Run) -> dict[str, JobStatus]:
        """One query for all jobs. A failed query is UNKNOWN for each."""

    def cancel(self, job_id: str, run: Run) -> None: ...

    def withdraw(self, job_id: str, run: Run) -> None:
        """Take a job, or the elements of an array, out of the queue; what runs already goes on."""

    def release(self, job_id: str, run: Run) -> None:
        """Let a requeued job start now."""

    def job_id(self, env: Mapping[str, str]) -> str: ...

    def array_index(self, env: Mapping[str, str]) -> int:
        """The place of the job in its array, from 0."""

    def share(self, plan: JobPlan, place: int) -> dict[str, str]:
        """The environment of the worker at this place among those that share an allocation, from 0."""

    def node_rank(self, env: Mapping[str, str]) -> int: ...

    def hosts(self, env: Mapping[str, str]) -> list[str]:
        """The nodes of the gang that `env` belongs to, by node rank, in the names that `Submission.exclude` takes."""

    def down_hosts(self, hosts: Sequence[str], run: Run) -> list[str]:
        """Those of `hosts`, in the same names, that the scheduler takes for down. Raises CommandError."""

    def unreached_hosts(self, printed: str) -> list[str]:
        """The hosts that the starter of agents could not reach, or has lost, from what it has printed."""

    def was_away(self, printed: str) -> bool:
        """Whether what starts processes on nodes could not, since the scheduler gave it no answer."""

    def avoid(self, job_id: str, hosts: Sequence[str], run: Run) -> None:
        """Keep a job that waits in the queue, or is requeued, away from these hosts."""

    def ends_at(self, plan: JobPlan, env: Mapping[str, str], run: Run) -> float | None:
        """When the job that `env` belongs to is out of time, in seconds since the epoch; None: never, or unknown."""

    def stop_cause(self, plan: JobPlan, env: Mapping[str, str], signalled_at: float, run: Run) -> Cause:
        """Why the job that `env` belongs to was signalled."""

    def replaced(self, job_id: str, run: Run) -> None:
        """Another job goes on for this one: the scheduler need not put it back, whatever happens to it."""

    def requeue(self, job_id: str, env: Mapping[str, str], run: Run) -> None:
        """Put the running job that `env` belongs to back. Once more is harmless."""


_CLASSES = {
    "slurm": ("hpc_det.schedulers.slurm.scheduler", "Slurm"),
    "pbs": ("hpc_det.schedulers.pbs.scheduler", "Pbs"),
    "local": ("hpc_det.schedulers.local", "Local"),
}


def scheduler(name: str) -> Scheduler:
    """The scheduler `name` of a plan, imported on use."""
    module, class_name = _CLASSES[name]
    instance: Scheduler = getattr(import_module(module), class_name)()
    return instance


def array_of(job_id: str) -> str:
    """The id of the whole array, for that of an element: `12` for Slurm's `12_3`, `12[].server` for `12[3].server`."""
    return re.sub(r"\[\d+\]", "[]", job_id.partition("_")[0])
