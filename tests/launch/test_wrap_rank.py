from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

import pytest

from hpc_det.errors import UsageError
from hpc_det.launch.wrap_rank import LONGEST_LINE, parse
from tests.facts import unnamed
from tests.wait import DEADLINE_S

pytestmark = pytest.mark.integration

WRAP_RANK = [sys.executable, "-m", "hpc_det.launch.wrap_rank"]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*WRAP_RANK, *words], capture_output=True, text=True, timeout=DEADLINE_S)


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("3 python3 train.py -- x", 3),
        ("HOROVOD_RANK,OMPI_COMM_WORLD_RANK,PMI_RANK python3 train.py -- x", 5),
        ("--no-redirect-stdio 0 -- python3 train.py -- x", 0),
    ],
)
def test_a_rank_is_a_number_or_the_first_variable_that_is_set(line: str, rank: int) -> None:
    command = ["python3", "train.py", "--", "x"]
    assert parse(line.split(), {"PMI_RANK": "6", "OMPI_COMM_WORLD_RANK": "5"}) == (rank, command)


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        ("", ["rank"]),
        ("3", ["command"]),
        ("3 --", ["command"]),
        ("RANK,PMI_RANK true", ["RANK,PMI_RANK", "rank"]),
        ("NAME true", ["NAME", "'first'", "rank"]),
        ("-1 true", ["-1", "rank"]),
    ],
)
def test_a_line_that_makes_no_sense_is_answered_with_the_usage(line: str, facts: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        parse(line.split(), {"NAME": "first"})
    first, usage = str(error.value).splitlines()
    assert unnamed(first, "hpc_det.launch.wrap_rank: ", *facts) == []
    assert usage.startswith("usage:")


def test_each_line_of_either_stream_begins_with_the_rank() -> None:
    done = run("2", "sh", "-c", r"printf 'one\n\ntwo'; printf 'bad\n' >&2; exit 3")
    assert (done.stdout, done.stderr) == ("[rank=2] one\n[rank=2] \n[rank=2] two\n", "[rank=2] bad\n")
    assert done.returncode == 3


def test_a_progress_bar_is_a_line_for_each_of_its_states() -> None:
    assert run("0", "printf", r"10%%\r20%%\r").stdout == "[rank=0] 10%\n[rank=0] 20%\n"


def test_a_line_without_an_end_is_cut() -> None:
    done = run("0", sys.executable, "-c", f"print('x' * {LONGEST_LINE + 3}, end='')")
    assert "".join(line.removeprefix("[rank=0] ") for line in done.stdout.splitlines()) == "x" * (LONGEST_LINE + 3)
    assert max(map(len, done.stdout.splitlines())) <= LONGEST_LINE + len("[rank=0] ")


def test_signals_reach_the_command() -> None:
    script = "trap 'echo heard; exit 5' TERM; echo up; while :; do sleep 0.01; done"
    with subprocess.Popen([*WRAP_RANK, "1", "sh", "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "[rank=1] up\n"
        process.terminate()
        assert process.stdout.read() == "[rank=1] heard\n"
    assert process.returncode == 5


def test_a_command_that_a_signal_ends_is_told_as_the_shell_does() -> None:
    assert run("1", "sh", "-c", "kill -KILL $$").returncode == 128 + signal.SIGKILL


def test_output_that_cannot_be_written_is_no_missing_command() -> None:
    """Exit code 127 would count as a user error, which is not retried."""
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*WRAP_RANK, "1", "echo", "x"], stdout=full, stderr=subprocess.PIPE, timeout=DEADLINE_S)
    assert done.returncode == 1
    assert os.strerror(errno.ENOSPC) in done.stderr.decode()


def test_children_that_hold_the_streams_open_do_not_hold_the_gang() -> None:
    done = run("1", "sh", "-c", "sleep 60 & echo $!")
    pid = int(done.stdout.removeprefix("[rank=1] "))
    subprocess.run(["kill", str(pid)], check=True)


def test_a_command_that_there_is_not_is_named() -> None:
    done = run("1", "no-such-program")
    assert done.returncode == 127
    assert unnamed(done.stderr, "hpc_det.launch.wrap_rank: ", "no-such-program", os.strerror(errno.ENOENT)) == []
    assert done.stderr.count("\n") == 1
