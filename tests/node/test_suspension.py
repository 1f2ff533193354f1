"""A suspended process: all its descendants stop and continue with it, and its clock pauses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from hpc_det.node.process import children, descendants, is_stopped
from hpc_det.node.suspension import AwakeClock, guarded
from tests.wait import wait_for

pytestmark = pytest.mark.integration

GUARDED = """
import subprocess, sys
from hpc_det.node.suspension import guarded
with guarded():
    rank = ["bash", "-c", "setsid sleep 600 & wait"]
    subprocess.Popen(rank, start_new_session=True, stdout=subprocess.DEVNULL)
    print("runs", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def job() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process with a rank in a separate session and the rank's worker in a third one."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", GUARDED], stdin=pipe, stdout=pipe) as process:
        assert process.stdout
        assert process.stdout.readline() == b"runs\n"
        wait_for(lambda: len(ranks(process)) == 2)
        found = ranks(process)
        yield process
        for pid in (process.pid, *found):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def ranks(job: subprocess.Popen[bytes]) -> list[int]:
    return [pid for pid in descendants(job.pid) if b"node.suspension" not in command(pid)]


def guardian(job: subprocess.Popen[bytes]) -> int:
    (pid,) = [pid for pid in descendants(job.pid) if b"node.suspension" in command(pid)]
    return pid


def command(pid: int) -> bytes:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()


def test_what_is_below_a_stopped_process_stops_and_continues_with_it(job: subprocess.Popen[bytes]) -> None:
    for _ in range(2):
        job.send_signal(signal.SIGSTOP)
        wait_for(lambda: all(map(is_stopped, ranks(job))))
        assert not is_stopped(guardian(job))
        job.send_signal(signal.SIGCONT)
        wait_for(lambda: not any(map(is_stopped, ranks(job))))


def test_what_a_user_has_stopped_stays_stopped(job: subprocess.Popen[bytes]) -> None:
    by_user, other = ranks(job)
    os.kill(by_user, signal.SIGSTOP)
    wait_for(lambda: is_stopped(by_user))
    job.send_signal(signal.SIGSTOP)
    wait_for(lambda: is_stopped(other))
    job.send_signal(signal.SIGCONT)
    wait_for(lambda: not is_stopped(other))
    assert is_stopped(by_user)


def test_what_a_killed_process_leaves_behind_is_continued_and_nothing_watches_on(job: subprocess.Popen[bytes]) -> None:
    left, watcher = ranks(job), guardian(job)
    job.send_signal(signal.SIGSTOP)
    wait_for(lambda: all(map(is_stopped, left)))
    job.kill()
    wait_for(lambda: not any(map(is_stopped, left)))
    wait_for(lambda: not os.path.exists(f"/proc/{watcher}"))


FROM_NOW_ON = """
import subprocess, sys
from hpc_det.node.suspension import guard_from_now_on
guard_from_now_on()
guard_from_now_on()
subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)
print("runs", flush=True)
sys.stdin.read()
"""


def test_a_process_can_be_guarded_by_one_guardian_for_the_rest_of_its_life() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", FROM_NOW_ON], stdin=pipe, stdout=pipe) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == b"runs\n"
        wait_for(lambda: [command(pid) for pid in ranks(process)] == [b"sleep\x00600\x00"])
        (below,), watcher = ranks(process), guardian(process)
        process.send_signal(signal.SIGSTOP)
        wait_for(lambda: is_stopped(below))
        process.send_signal(signal.SIGCONT)
        wait_for(lambda: not is_stopped(below))
        process.stdin.close()
        assert process.wait() == 0
        assert not os.path.exists(f"/proc/{watcher}")
        os.kill(below, signal.SIGKILL)


def test_a_guardian_is_no_descendant_of_the_process_that_started_it_and_ends_with_the_block() -> None:
    before = children(os.getpid()), descendants(os.getpid())  # of other tests, such as a fork server
    with guarded():
        assert (children(os.getpid()), descendants(os.getpid())) == before
        pids = {int(name) for name in os.listdir("/proc") if name.isdecimal()}
    assert {pid for pid in pids if os.path.exists(f"/proc/{pid}")} < pids


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list whose only item is the time of the machine's clock, in seconds."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_it_counts_seconds_between_looks(now: list[float]) -> None:
    clock = AwakeClock()
    for _ in range(30):
        now[0] += 1
        clock.seconds()
    assert clock.seconds() == 30


def test_the_time_in_which_the_process_was_suspended_hardly_counts(now: list[float]) -> None:
    clock = AwakeClock(every_s=5)
    now[0] += 1
    assert clock.seconds() == 1
    now[0] += 3600
    assert clock.seconds() == 1 + 5
    now[0] += 1
    assert clock.seconds() == 1 + 5 + 1


def test_only_what_is_much_longer_than_between_looks_is_a_stop(now: list[float]) -> None:
    clock = AwakeClock()
    found = []
    for since in (1, 2.5, 100, 1):
        now[0] += since
        found.append(clock.stopped_s())
    assert found == [0, 0, 99, 0]
