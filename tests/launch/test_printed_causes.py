"""The causes of failures in the output of programs; the reports are those of torch 2.13, Open MPI 4.1, MPICH, Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_det.launch.printed_causes import (
    cause_line,
    failed_rank,
    is_of_the_code,
    missing_part,
    schedulers_notice,
    without_reports,
)
from tests.facts import unnamed

TRACEBACK = """\
Traceback (most recent call last):
  File "/code/train.py", line 4, in <module>
    raise ValueError('loss is nan')
ValueError: loss is nan
"""
COLLATERAL = """\
Traceback (most recent call last):
  File "/code/train.py", line 9, in <module>
    loss.backward()
RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:7001
"""
TORCHRUN = """\
W1128 20:32:25.071000 10893 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 11039 closing signal
E1128 20:32:25.072000 10893 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9) local_rank: 1
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/lib/torch/distributed/launcher/api.py", line 383, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: 
=======================================================
train.py FAILED
-------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-28_20:32:25
  host      : node2
  rank      : 4 (local_rank: 0)
  exitcode  : -15 (pid: 11039)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 11039
-------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-28_20:32:25
  host      : node2
  rank      : 5 (local_rank: 1)
  exitcode  : CODE (pid: 11040) 
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
=======================================================
"""
OPEN_MPI = """\
--------------------------------------------------------------------------
Primary job  terminated normally, but 1 process returned
a non-zero exit code. Per user-direction, the job has been aborted.
--------------------------------------------------------------------------
--------------------------------------------------------------------------
mpirun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: [[18195,1],3]
  Exit code:    2
--------------------------------------------------------------------------
"""
OPEN_MPI_KILL = """\
--------------------------------------------------------------------------
mpirun noticed that process rank 1 with PID 0 on node vm exited on signal 9 (Killed).
--------------------------------------------------------------------------
"""
MPICH = """\

===================================================================================
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 12253 RUNNING AT vm
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES
===================================================================================
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
This typically refers to a problem with your application.
Please see the FAQ page for debugging suggestions
"""
SRUN = """\
srun: error: node2: task 1: Exited with exit code 1
slurmstepd: error: *** STEP 5.0 ON node1 CANCELLED AT 2026-11-28T20:32:25 ***
"""
DEEPSPEED = """\
[2026-11-28 20:32:25,123] [INFO] [launch.py:335:sigkill_handler] Killing subprocess 11039
[2026-11-28 20:32:25,456] [ERROR] [launch.py:341:sigkill_handler] ['/usr/bin/python3', 'train.py'] exits with \
return code = 1
"""
REPORTS = {
    "torchrun": TORCHRUN.replace("CODE", "1"),
    "mpirun": OPEN_MPI,
    "mpirun, kill": OPEN_MPI_KILL,
    "mpiexec": MPICH,
    "srun": SRUN,
    "deepspeed": DEEPSPEED,
}


def prefixed(prefix: str, text: str) -> str:
    return "".join(f"{prefix}{line}\n" for line in text.splitlines())


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_above_a_launchers_report_are_the_words_of_the_ranks(report: str) -> None:
    assert without_reports(report).strip() == ""
    assert cause_line(report) == ""
    assert cause_line(f"epoch 1\n{TRACEBACK}{report}") == "ValueError: loss is nan"
    assert cause_line(f"epoch 1\n{TRACEBACK}{COLLATERAL}{report}") == "ValueError: loss is nan"
    assert cause_line(f"{COLLATERAL}{report}").startswith("RuntimeError")
    assert cause_line(f"epoch 1\nbad data\n{report}") == "bad data"


@pytest.mark.parametrize("prefix", ["[rank5]:", "[default1]:", "[rank=5] ", "[1,5]<stderr>:", "5: "])
def test_of_several_exceptions_that_of_the_rank_is_taken_which_the_report_names(prefix: str) -> None:
    other = prefixed("[rank4]:", TRACEBACK.replace("loss is nan", "of another rank"))
    own = prefixed(prefix, TRACEBACK)
    assert cause_line(f"{own}{other}{REPORTS['torchrun']}") == "ValueError: loss is nan"
    assert cause_line(f"{own}{other}", rank=5) == "ValueError: loss is nan" or prefix == "[default1]:"


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("", ""),
        ("begins\nout of memory\n\n", "out of memory"),
        ("ValueError: handled\nKilled\n", "Killed"),
        (f"{TRACEBACK}Killed\n", "Killed"),
        (f"{TRACEBACK}----\n", "ValueError: loss is nan"),
        ("hpc-det: of the agent\n", ""),
    ],
)
def test_without_a_report_the_last_line_is_taken(printed: str, expected: str) -> None:
    assert cause_line(printed) == expected


CAUGHT = """\
import traceback

def main():
    import nothere

try:
    main()
except ValueError:
    pass
BLOCK
"""


@pytest.mark.parametrize(
    ("block", "is_caught"),
    [
        ("try: main()\nexcept ImportError: traceback.print_exc()", True),
        ("try: main()\nexcept (KeyError, builtins.Exception): pass", True),
        ("try: main()\nexcept: pass", True),
        ("try: main()\nexcept ImportError: raise", False),
        ("try: main()\nexcept ImportError: sys.exit(1)", False),
        ("try: main()\nexcept ValueError: pass", False),
        ("try: main()\nfinally: pass", False),
        ("main(); no python", False),
    ],
)
@pytest.mark.parametrize("report", ["", REPORTS["torchrun"]], ids=["alone", "torchrun"])
def test_an_exception_that_the_program_has_caught_is_not_the_cause(
    tmp_path: Path, block: str, is_caught: bool, report: str
) -> None:
    script, line = tmp_path / "s.py", "ModuleNotFoundError: No module named 'nothere'"
    script.write_text(CAUGHT.replace("BLOCK", block))
    frames = f'  File "{script}", line 10, in <module>\n    main()\n  File "{script}", line 4, in main\n'
    printed = f"Traceback (most recent call last):\n{frames}    import nothere\n{line}\nlast words\n{report}"
    assert cause_line(printed) == ("last words" if is_caught else line)


def test_an_exception_long_before_the_end_has_not_ended_the_program(tmp_path: Path) -> None:
    trace = TRACEBACK.replace("/code/train.py", str(tmp_path / "train.py"))
    (tmp_path / "train.py").write_text("\n\n\nraise ValueError('loss is nan')\n")
    assert cause_line(f"{trace}" + "output at exit\n" * 20) == "ValueError: loss is nan"
    assert cause_line(f"{trace}" + "output of another program\n" * 21) == "output of another program"


@pytest.mark.parametrize(
    ("report", "facts"),
    [
        (TORCHRUN.replace("CODE", "1"), ["torchrun", "rank 5", 11040, "exit code 1"]),
        (TORCHRUN.replace("CODE", "-9"), ["torchrun", "rank 5", 11040, "SIGKILL"]),
        (OPEN_MPI, ["mpirun", "rank 3", "exit code 2"]),
        (OPEN_MPI_KILL, ["mpirun", "rank 1", "SIGKILL"]),
        (SRUN, ["srun", "rank 1", "exit code 1"]),
    ],
)
def test_the_rank_of_a_report_is_named_with_its_end(report: str, facts: list[object]) -> None:
    found = failed_rank(f"epoch 1\n{report}")
    assert found is not None
    assert unnamed(found.sentence(), *facts) == []


def test_a_program_without_a_report_has_no_failed_rank() -> None:
    assert failed_rank(f"epoch 1\n{TRACEBACK}") is None


@pytest.mark.parametrize(
    ("printed", "fact"),
    [
        (f"{SRUN}slurmstepd: error: Detected 1 oom_kill event in StepId=4.0. Some of the step tasks ...\n", "oom_kill"),
        ("slurmstepd-node1: error: Detected 1 oom-kill event(s) in step 4.0 cgroup.\n", "oom-kill"),
        ("srun: error: node1: task 0: Out Of Memory\n", "Out Of Memory"),
        ("slurmstepd: error: *** STEP 4.0 ON node1 CANCELLED AT 2026-11-28 DUE TO TIME LIMIT ***\n", "TIME LIMIT"),
        ("=>> PBS: job killed: mem 1234kb exceeded limit 1000kb\n", "mem 1234kb exceeded limit 1000kb"),
    ],
)
def test_a_kill_that_the_scheduler_reports_is_found(printed: str, fact: str) -> None:
    assert unnamed(schedulers_notice(f"epoch 1\n{printed}") or "", fact) == []


def test_a_step_that_srun_ends_for_a_failed_rank_is_no_kill_by_the_scheduler() -> None:
    assert schedulers_notice(SRUN) is None


@pytest.mark.parametrize(
    ("line", "module", "file"),
    [
        ("ModuleNotFoundError: No module named 'a.b'", "a.b", None),
        ("ModuleNotFoundError: No module named 'a'; 'a' is not a package", "a", None),
        ("ImportError: cannot import name 'x' from 'a' (/code/a.py)", None, None),
        ("SyntaxError: invalid syntax", None, None),
        ("IndentationError: unexpected indent", None, None),
        ("/venv/bin/python3.11: can't open file '/code/x.py': [Errno 2] No such file or directory", None, "/code/x.py"),
        ("python3: No module named a", "a", None),
        (
            "/bin/python3: Error while finding module specification for 'a.b' "
            "(ModuleNotFoundError: No module named 'a')",
            "a",
            None,
        ),
    ],
)
def test_code_that_cannot_be_loaded_is_recognized(line: str, module: str | None, file: str | None) -> None:
    assert is_of_the_code(line)
    assert missing_part(line) == (module, file)


@pytest.mark.parametrize(
    "line",
    [
        "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
        "OSError: [Errno 116] Stale file handle",
        "python3: can't open file '/code/x.py': [Errno 5] Input/output error",
        "ValueError: SyntaxError: x",
        "",
    ],
)
def test_what_may_differ_on_another_node_or_later_is_not_of_the_code(line: str) -> None:
    assert not is_of_the_code(line)
