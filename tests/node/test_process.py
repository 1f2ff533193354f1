"""Processes, their ends and signals, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpc_det.node.process import (
    STOP_SIGNALS,
    descendants,
    ignore_stop_signals,
    is_running,
    process_namespace,
    programs,
    start_ticks,
)
from tests.wait import DEADLINE_S, wait_for

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[1]
TREE = """
import os, subprocess
from hpc_det.node.process import adopt_orphans, descendants, end_descendants, end_other_sessions
from tests.wait import wait_for

def below():
    return descendants(os.getpid())

adopt_orphans()
"""


def in_a_process(code: str) -> list[str]:
    command = [sys.executable, "-c", TREE + textwrap.dedent(code)]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True, timeout=DEADLINE_S)
    return done.stdout.split()


def test_grandchildren_in_sessions_of_their_own_with_dead_parents_are_found_and_ended() -> None:
    assert in_a_process(
        """
        launcher = subprocess.Popen(["sh", "-c", "setsid sh -c 'setsid sleep 60 & sleep 60 & wait' & sleep 60 & wait"])
        wait_for(lambda: len(below()) == 5)
        launcher.kill()
        launcher.wait()
        print(len(below()))
        end_descendants()
        print(len(below()))
        """
    ) == ["4", "0"]


def test_children_that_ignore_every_polite_signal_are_ended() -> None:
    assert in_a_process(
        """
        subprocess.Popen(["sh", "-c", "trap '' TERM INT HUP; sleep 60 & wait; wait; sleep 60"])
        wait_for(lambda: len(below()) == 2)
        end_descendants()
        print(len(below()))
        """
    ) == ["0"]


def test_a_process_that_breeds_while_it_is_ended_leaves_nobody() -> None:
    assert in_a_process(
        """
        subprocess.Popen(["sh", "-c", "while :; do setsid sleep 60 & sleep 0.002; done"])
        wait_for(lambda: len(below()) > 5)
        end_descendants()
        print(len(below()))
        """
    ) == ["0"]


def test_a_gang_can_be_ended_while_a_thread_waits_for_a_command() -> None:
    assert in_a_process(
        """
        command = subprocess.Popen(["sleep", "60"])
        gang = subprocess.Popen(["sh", "-c", "sleep 60 & wait"], start_new_session=True)
        wait_for(lambda: len(below()) == 3)
        end_other_sessions()
        print(below() == [command.pid])
        end_descendants()
        """
    ) == ["True"]


def test_a_spared_process_survives_the_end_of_its_own_descendants() -> None:
    assert in_a_process(
        """
        from hpc_det.node.process import spare

        server = subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60; sleep 60"])
        spare(server.pid)
        wait_for(lambda: len(below()) == 2)
        before = set(below())
        os.kill(server.pid, 19)  # else the shell would go on to its next command
        end_descendants()
        print(len(before & set(below())), server.poll())
        server.kill()
        server.wait()
        """
    ) == ["0", "None"]


def test_without_descendants_there_is_nothing_to_end() -> None:
    assert in_a_process("end_descendants(); print('fine')") == ["fine"]


def test_the_exit_code_of_a_command_is_its_threads() -> None:
    """The command may end just when the gang's processes are ended."""
    assert in_a_process(
        """
        command = subprocess.Popen(["sh", "-c", "exit 3"])
        wait_for(lambda: not below())
        gang = subprocess.Popen(["sleep", "60"], start_new_session=True)
        end_other_sessions()
        print(command.wait())
        """
    ) == ["3"]


def test_an_orphan_that_was_ended_is_reaped() -> None:
    assert in_a_process(
        """
        subprocess.run(["sh", "-c", "sleep 60 &"])
        end_descendants()
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            print("reaped")
        """
    ) == ["reaped"]


def test_parents_come_before_their_children() -> None:
    assert (
        in_a_process(
            """
        subprocess.Popen(["sh", "-c", "sh -c 'sh -c \\"sleep 60; :\\"; :' & sleep 60; :"])
        wait_for(lambda: len(below()) == 5)
        known = [os.getpid()]
        for pid in below():
            with open(f"/proc/{pid}/stat") as file:
                print(int(file.read().rpartition(")")[2].split()[1]) in known)
            known.append(pid)
        end_descendants()
        """
        )
        == ["True"] * 5
    )


def test_a_process_is_known_by_its_number_and_its_start() -> None:
    me = os.getpid()
    assert is_running(me, start_ticks(me))
    assert not is_running(me, start_ticks(me) + 1)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ([sys.executable, "-u", "s.py", "--key=TOP"], f"{sys.executable} s.py"),
        ([sys.executable, "-m", "s", "--key", "TOP"], f"{sys.executable} -m s"),
        ([sys.executable, "-c", "import s", "TOP"], sys.executable),
        (["sh", "-c", "read line; : TOP"], "sh"),
    ],
)
def test_a_program_shows_its_script_and_no_other_argument(tmp_path: Path, command: list[str], shown: str) -> None:
    (tmp_path / "s.py").write_text("import time; time.sleep(60)")
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE) as process:
        wait_for(lambda: process.pid in programs(os.getpid()))
        assert programs(os.getpid())[process.pid] == shown
        process.kill()


def test_a_process_that_is_gone_runs_no_more_and_has_no_start() -> None:
    with subprocess.Popen(["true"]) as process:
        ticks = start_ticks(process.pid)
    assert not is_running(process.pid, ticks)
    with pytest.raises(ProcessLookupError):
        start_ticks(process.pid)


def test_a_name_with_blanks_and_brackets_confuses_nobody(tmp_path: object) -> None:
    strange = f"{tmp_path}/a) Z 1 (b"
    os.symlink("/bin/sleep", strange)
    with subprocess.Popen([strange, "60"]) as process:
        assert is_running(process.pid, start_ticks(process.pid))
        assert process.pid in descendants(os.getpid())
        process.kill()


def test_a_process_number_of_a_container_is_none_of_its_host() -> None:
    code = "from hpc_det.node.process import process_namespace; print(process_namespace())"
    inside = subprocess.run(
        ["unshare", "--map-root-user", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code],
        capture_output=True,
        text=True,
    )
    if inside.returncode:
        pytest.skip(f"no namespace of processes here: {inside.stderr}")
    here = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert here.stdout.strip() == process_namespace()
    assert inside.stdout.strip() not in ("", process_namespace())


LISTENS = """
import select, signal, sys
from hpc_det.node.process import STOP_SIGNALS, SignalPipe

pipe = SignalPipe(STOP_SIGNALS)
print("listens", pipe.received(), flush=True)
while True:
    select.select([pipe.fd], [], [])
    print(*(number.name for number in pipe.received()), flush=True)
"""
BUSY = """
import os, signal, sys
from hpc_det.node.process import SignalPipe

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
    with subprocess.Popen(tree, stdout=subprocess.PIPE, text=True, preexec_fn=ignore_stop_signals) as launcher:
        child = int(line(launcher))
        assert ignored(launcher.pid) == ignored(child) == set(STOP_SIGNALS)
        for number in STOP_SIGNALS:
            launcher.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            launcher.wait(timeout=0.1)
        subprocess.run(["kill", "-KILL", str(launcher.pid), str(child)], check=True)


def test_a_rank_behind_the_shield_hears_signals_again() -> None:
    command = [sys.executable, "-c", LISTENS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=ignore_stop_signals) as rank:
        assert line(rank) == "listens []"
        rank.send_signal(signal.SIGUSR2)
        assert line(rank) == "SIGUSR2"
        rank.kill()


def test_signals_that_others_handle_are_no_news() -> None:
    """torch handles CHLD as soon as a DataLoader has workers; every such handler writes into the wake-up pipe."""
    code = """
import os, select, signal
from hpc_det.node.process import STOP_SIGNALS, SignalPipe
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
    """`multiprocessing.Pool` ends its processes with TERM, for example."""
    code = """
import os, select, signal
from hpc_det.node.process import STOP_SIGNALS, SignalPipe
pipe = SignalPipe(STOP_SIGNALS)
ready, is_forked = os.pipe()
if not (child := os.fork()):
    os.write(is_forked, b"x")
    signal.pause()
os.read(ready, 1)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), pipe.received())
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "-15 []\n"


def test_blocked_stop_signals_stay_blocked_in_children_until_they_unblock_them() -> None:
    listens = """if True:
        import os, signal, sys
        from hpc_det.node.process import STOP_SIGNALS, unblock_stop_signals
        for number in STOP_SIGNALS:
            signal.signal(number, lambda number, frame: sys.exit(f"heard {number}"))
            os.kill(os.getpid(), number)
        print("deaf")
        unblock_stop_signals()
        signal.signal(signal.SIGTERM, lambda number, frame: print("hears again"))
        os.kill(os.getpid(), signal.SIGTERM)
    """
    starts = f"""if True:
        import os, sys
        from hpc_det.node.process import block_stop_signals
        block_stop_signals()
        os.execv(sys.executable, [sys.executable, "-c", {listens!r}])
    """
    done = subprocess.run([sys.executable, "-c", starts], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("deaf\nhears again\n", 0), done.stderr


def test_a_ctrl_c_waits_for_a_command_and_does_not_reach_it() -> None:
    """As a terminal does, the command sends the signal to all processes of the foreground."""
    text = """
import subprocess, sys
from hpc_det.node.process import uninterrupted_commands
command = "import os, signal; os.killpg(0, signal.SIGINT); print('submitted', flush=True)"
try:
    with uninterrupted_commands():
        subprocess.run([sys.executable, "-c", command])
        print("recorded", flush=True)
    print("not interrupted")
except KeyboardInterrupt:
    print("interrupted", flush=True)
subprocess.run([sys.executable, "-c", "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))"])
"""
    done = subprocess.run([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert done.stdout.split() == ["submitted", "recorded", "interrupted", "set()"]
