"""Who descends from whom, and the end of all of them, whatever sessions and parents they have."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hpc_det.node.process import descendants, is_running, place, start_ticks
from tests.wait import DEADLINE_S

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


def test_without_descendants_there_is_nothing_to_end() -> None:
    assert in_a_process("end_descendants(); print('fine')") == ["fine"]


def test_the_exit_code_of_a_command_is_its_threads() -> None:
    """It may have ended just when a gang is."""
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
    code = "from hpc_det.node.process import place; print(place())"
    inside = subprocess.run(
        ["unshare", "--map-root-user", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code],
        capture_output=True,
        text=True,
    )
    if inside.returncode:
        pytest.skip(f"no namespace of processes here: {inside.stderr}")
    here = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert here.stdout.strip() == place()
    assert inside.stdout.strip() not in ("", place())
