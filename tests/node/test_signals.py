"""Signals and processes, in real processes: both change the process that uses them for good."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpc_det.node.signals import STOP_SIGNALS, shielded

LISTENS = """
import select, signal, sys
from hpc_det.node.signals import STOP_SIGNALS, SignalPipe

pipe = SignalPipe(STOP_SIGNALS)
print("listens", pipe.received(), flush=True)
while True:
    select.select([pipe.fd], [], [])
    print(*(number.name for number in pipe.received()), flush=True)
"""
BUSY = """
import os, signal, sys
from hpc_det.node.signals import SignalPipe

pipe = SignalPipe([signal.SIGTERM, signal.SIGUSR1])
os.kill(os.getpid(), signal.SIGTERM)
for _ in range(100_000):  # more than the pipe holds
    os.kill(os.getpid(), signal.SIGUSR1)
names = []
while received := pipe.received():
    names += received
print(names[0].name, {number.name for number in names[1:]}, pipe.received())
"""


@contextmanager
def python(code: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_every_stop_signal_wakes_whoever_waits_and_ends_nothing() -> None:
    with python(LISTENS) as process:
        assert line(process) == "listens []"
        for number in STOP_SIGNALS:
            process.send_signal(number)
            assert line(process) == number.name
        assert process.poll() is None


def test_a_storm_of_signals_neither_blocks_nor_hides_the_first() -> None:
    with python(BUSY) as process:
        assert line(process) == "SIGTERM {'SIGUSR1'} []"


def ignored(pid: int) -> set[signal.Signals]:
    status = dict(text.split(":\t") for text in Path(f"/proc/{pid}/status").read_text().splitlines())
    mask = int(status["SigIgn"], 16)
    return {number for number in STOP_SIGNALS if mask >> (number - 1) & 1}


def test_a_shielded_launcher_and_its_children_outlive_every_stop_signal() -> None:
    tree = ["sh", "-c", "sleep 60 & echo $!; wait"]
    with subprocess.Popen(tree, stdout=subprocess.PIPE, text=True, preexec_fn=shielded()) as launcher:
        child = int(line(launcher))
        assert ignored(launcher.pid) == ignored(child) == set(STOP_SIGNALS)
        for number in STOP_SIGNALS:
            launcher.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            launcher.wait(timeout=0.1)
        subprocess.run(["kill", "-KILL", str(launcher.pid), str(child)], check=True)


def test_a_rank_behind_the_shield_hears_signals_again() -> None:
    command = [sys.executable, "-c", LISTENS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=shielded()) as rank:
        assert line(rank) == "listens []"
        rank.send_signal(signal.SIGUSR2)
        assert line(rank) == "SIGUSR2"
        rank.kill()


def test_signals_that_others_handle_are_no_news() -> None:
    """torch handles CHLD as soon as a DataLoader has workers; every such handler writes into the wake-up pipe."""
    code = """
import os, select, signal
from hpc_det.node.signals import STOP_SIGNALS, SignalPipe
pipe = SignalPipe(STOP_SIGNALS)
signal.signal(signal.SIGALRM, lambda *_: None)
os.kill(os.getpid(), signal.SIGALRM)
select.select([pipe.fd], [], [], 5)
print(pipe.received())
os.kill(os.getpid(), signal.SIGUSR1)
select.select([pipe.fd], [], [], 5)
print(pipe.received())
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True).splitlines() == [
        "[]",
        "[<Signals.SIGUSR1: 10>]",
    ]


def test_a_forked_child_dies_of_its_signals_and_its_parent_hears_nothing() -> None:
    """Such as the TERM with which `multiprocessing.Pool` ends its processes."""
    code = """
import os, select, signal
from hpc_det.node.signals import STOP_SIGNALS, SignalPipe
pipe = SignalPipe(STOP_SIGNALS)
ready, told = os.pipe()
if not (child := os.fork()):
    os.write(told, b"x")
    signal.pause()
os.read(ready, 1)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), pipe.received())
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "-15 []\n"


def test_what_a_deaf_process_starts_is_deaf_though_it_sets_handlers_until_it_hears_again() -> None:
    listens = """if True:
        import os, signal, sys
        from hpc_det.node.signals import STOP_SIGNALS, hear_again
        for number in STOP_SIGNALS:
            signal.signal(number, lambda number, frame: sys.exit(f"heard {number}"))
            os.kill(os.getpid(), number)
        print("deaf")
        hear_again()
        signal.signal(signal.SIGTERM, lambda number, frame: print("hears again"))
        os.kill(os.getpid(), signal.SIGTERM)
    """
    starts = f"""if True:
        import os, sys
        from hpc_det.node.signals import turn_deaf
        turn_deaf()
        os.execv(sys.executable, [sys.executable, "-c", {listens!r}])
    """
    done = subprocess.run([sys.executable, "-c", starts], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("deaf\nhears again\n", 0), done.stderr
