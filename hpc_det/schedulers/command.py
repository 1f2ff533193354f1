"""Running a scheduler's commands: argument lists only, never a shell."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from hpc_det.errors import HpcDetError, shown

Run = Callable[[Sequence[str]], str]
"""Runs a command and returns its stdout; raises CommandError. Tests pass their own."""

T = TypeVar("T")

TIMEOUT_S = 60.0
ENV = "env"
"""env(1): a command can begin with it, and with settings of variables."""
AWAY_S, AGAIN_S = 1800.0, 3.0
"""So long a job waits for a scheduler that does not answer, which may be restarted or upgraded meanwhile, and so often
it asks again. The job keeps its nodes, and the scheduler could not give them to anybody else.
"""
_TEMPORARY = ("/var/tmp", "/tmp")
"""PBS' own default comes first."""


class CommandError(HpcDetError):
    """A scheduler's command is absent, failed, or gave no answer in time."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output
        """What a command that failed has printed before: qstat answers for some jobs and fails for others."""


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


def refusal(message: str, said: str, output: str = "") -> CommandError:
    """The error of a command that failed and has printed `said`."""
    if not says_no_answer(said):
        return CommandError(message, output)
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
        said = (done.stderr.strip() or done.stdout.strip() or "without a word").replace("\n", "; ")
        raise refusal(f"{name}: refused with exit code {done.returncode}: {said}", said, done.stdout)
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
