"""Finds in the output of a program why it failed: exceptions of Python, and the reports of launchers about their ranks.

A launcher such as torchrun or mpirun ends its output with a framed report that names the failed rank and not its
exception, which is further above.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from hpc_det.launch.printed_exceptions import printed_exceptions
from hpc_det.node.process import signal_name


class FailedRank(NamedTuple):
    """The rank that a launcher reports as the first to fail."""

    launcher: str
    rank: int
    code: int
    """Exit code; below 0 for a signal."""
    pid: int | None = None
    local_rank: int | None = None

    def sentence(self) -> str:
        how = f"ended by signal {signal_name(-self.code)}" if self.code < 0 else f"exit code {self.code}"
        process = f" (process {self.pid})" if self.pid else ""
        return f"{self.launcher} reports rank {self.rank}{process}: {how}"


_TORCHRUN = re.compile(
    r"Root Cause \(first observed failure\):\n\[\d+\]:\n(?:  (?:time|host) .*\n)*"
    r"  rank +: (?P<rank>\d+) \(local_rank: (?P<local_rank>\d+)\)\n  exitcode +: (?P<code>-?\d+) +\(pid: (?P<pid>\d+)\)"
)
_OPEN_MPI_SIGNAL = re.compile(r"(?:mpirun|prterun|mpiexec) noticed that process rank (?P<rank>\d+) .*? on signal (\d+)")
_OPEN_MPI_CODE = re.compile(r"Process name: \[.*,(?P<rank>\d+)\]\s+Exit code: +(?P<code>\d+)")
_SRUN_CODE = re.compile(r"(?m)^srun: error: \S+: tasks? (?P<rank>\d+).*?: Exited with exit code (?P<code>\d+)")
_REPORTS = (
    # torchrun: its own traceback and the report
    re.compile(
        r"(?m)^(?:Traceback \(most recent call last\):\n(?:[ \t].*\n)+)?"
        r"(?:[\w.]+\.)?ChildFailedError: *\n=+\n(?:.*\n)*?=+\n?"
    ),
    re.compile(r"(?m)^[IWE]\d{4} [\d:.]+ +\d+ .*torch/distributed/.*\n?"),
    # mpirun of Open MPI; mpiexec of MPICH
    re.compile(r"(?m)^-{20,}\n(?:.*\n)*?-{20,}\n?"),
    re.compile(r"(?m)^={20,}\n(?:=   .*\n)+={20,}\n"),
    re.compile(r"(?m)^(?:YOUR APPLICATION TERMINATED|This typically refers to|Please see the FAQ page) .*\n?"),
    # srun, unless it could start nothing, and slurmstepd; deepspeed
    re.compile(r"(?m)^(?:srun|slurmstepd)(?:-[\w.-]+)?: (?!error: Unable to ).*\n?"),
    re.compile(r"(?m)^\[[-\d :,]+\] \[(?:INFO|ERROR)\] \[launch\.py:.*\n?"),
)
_COLLATERAL = re.compile(
    r"Connection (?:closed|reset|refused)|closed by (?:remote )?peer|DistBackendError|DistNetworkError|NCCL|"
    r"BrokenPipeError|KeyboardInterrupt|SignalException"
)
"""Exceptions that a rank raises because another one has failed."""
_PERMANENT = re.compile(
    r"ModuleNotFoundError: |ImportError: (?:cannot import name|attempted relative import)|"
    r"(?:SyntaxError|IndentationError|TabError): |"
    r"\S*python[\d.]*: (?:can't open file .*\[Errno 2\]|No module named |"
    r"Error while finding module specification for '[^']*' \(ModuleNotFoundError: )"
)
_MOST_LINES_AT_EXIT = 20
"""Lines that a program prints between an exception that ends it and its exit, at most: functions of atexit."""
_NAMES = re.compile(r"No module named '?(?P<module>[\w.]+)|can't open file '(?P<file>[^']+)'")


_SCHEDULERS = re.compile(
    r"(?m)^(?:(?:slurmstepd|srun)[\w.-]*: (?:error: )?(?P<slurm>.*(?:oom[-_]kill|Out Of Memory|DUE TO ).*)|"
    r"=>> PBS: (?P<pbs>job killed: .*))$"
)
"""Messages of Slurm (slurmstepd, srun) and PBS (MOM) about processes that they, or the kernel for them, have killed."""


def schedulers_notice(printed: str) -> str | None:
    """Return the last message of a scheduler that it, or the kernel at the job's limit, has killed processes."""
    found = list(_SCHEDULERS.finditer(printed))
    if not found:
        return None
    return f"Slurm reports: {found[-1]['slurm'].strip()}" if found[-1]["slurm"] else f"PBS reports: {found[-1]['pbs']}"


def failed_rank(printed: str) -> FailedRank | None:
    """Return the rank that a launcher reports to have failed first, or None without such a report."""
    if found := _TORCHRUN.search(printed):
        numbers = {name: int(number) for name, number in found.groupdict().items()}
        return FailedRank("torchrun", **numbers)
    if found := _OPEN_MPI_SIGNAL.search(printed):
        return FailedRank("mpirun", int(found["rank"]), -int(found[2]))
    for launcher, pattern in (("mpirun", _OPEN_MPI_CODE), ("srun", _SRUN_CODE)):
        if found := pattern.search(printed):
            return FailedRank(launcher, int(found["rank"]), int(found["code"]))
    return None


def cause_line(printed: str, rank: int | None = None) -> str:
    """Return the line of the output that names the cause best, or "".

    It is the exception that has ended the program, or else the last line, but without the reports of launchers. For a
    failed rank, which `rank` or such a report names, it is the exception of that rank, or the last one that is not the
    consequence of another rank's failure.
    """
    own = without_reports(printed)
    failed = failed_rank(printed) if rank is None else FailedRank("", rank, 1)
    found = exception_of(failed, own) if own != printed or failed else exception_at_end(own)
    return found or next(reversed(_own_lines(own.split("\n"))), "")


def exception_of(rank: FailedRank | None, printed: str) -> str | None:
    """Return the line that names the exception of a rank; None: nothing in the output is one that was not caught.

    `rank` None, or a rank whose lines have no prefix: the last exception of any rank.
    """
    found = [each for each in printed_exceptions(printed) if not each.was_caught()]
    if rank:
        names = {f"[rank{rank.rank}]", f"[rank={rank.rank}]", f"[default{rank.local_rank}]", f"[1,{rank.rank}]"}
        names |= {f"{rank.rank}:"}
        found = [each for each in found if each.prefix.startswith(tuple(names))] or found
    lines = [each.line for each in found]
    first_hand = [line for line in lines if not _COLLATERAL.search(line)]
    return next(reversed(first_hand or lines), None)


def exception_at_end(printed: str) -> str | None:
    """Return the line that names the exception which has ended a program, also before output at exit; else None."""
    lines = printed.split("\n")
    for each in reversed([*printed_exceptions(printed)]):
        if len(_own_lines(lines[each.end :])) > _MOST_LINES_AT_EXIT:
            return None
        if each.was_caught() is False:
            return each.line
    return None


def _own_lines(lines: list[str]) -> list[str]:
    """Return the lines with words that hpc_det has not written."""
    return [line.strip() for line in lines if re.search(r"\w", line) and not line.startswith("hpc-det: ")]


def without_reports(printed: str) -> str:
    """Return the output without what launchers print about failed ranks."""
    for report in _REPORTS:
        printed = report.sub("", printed)
    return printed


def is_of_the_code(line: str) -> bool:
    """Return whether a program's last line means that its code cannot be loaded, which no restart changes.

    That is a missing module or file, a name that a module does not define, or a syntax error. A library that the system
    cannot load does not count: it may exist on other nodes.
    """
    return bool(_PERMANENT.match(line))


def missing_part(line: str) -> tuple[str | None, str | None]:
    """Return the module and the file that a line accepted by `is_of_the_code` reports as missing; None for others."""
    found = _NAMES.search(line)
    return (found["module"], found["file"]) if found else (None, None)
