"""The task of a job of agents: it runs one agent, forwards the scheduler's signals to it, and restarts it if it is
killed.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_det.sgd.elastic.agents import AgentTask, BackOff
from hpc_det.sgd.elastic.check_in import failed
from hpc_det.sgd.elastic.meeting import announce
from hpc_det.store.run_folder import RunFolder
from tests.facts import unnamed
from tests.launch.gang import is_there
from tests.wait import DEADLINE_S, wait_for

pytestmark = pytest.mark.integration

AGENT = """
import os, signal, sys, time
run = sys.argv[1]
def note(number, frame):
    open(f"{run}/{signal.Signals(number).name}", "w").close()
    sys.exit(3 if number == signal.SIGUSR1 else 0)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2): signal.signal(number, note)
open(f"{run}/pid-{os.getpid()}", "w").close()
time.sleep(60)
"""
TASK = """
import pickle, signal, sys
for number in (signal.SIGTERM, signal.SIGUSR2): signal.signal(number, signal.SIG_IGN)  # submitit's own come before
sys.exit(pickle.load(sys.stdin.buffer)())
"""
STARTS = """
import subprocess, sys
from pathlib import Path
from hpc_det.sgd.elastic.meeting import DriverAddress, claim
from hpc_det.store.run_folder import DriverRun, RunFolder
run = RunFolder(Path(sys.argv[1]))
claim(run, DriverAddress("127.0.0.9", 9))
DriverRun(run, sys.argv[2] == "True").goes_with_driver()
agent = subprocess.Popen([sys.executable, "-m", "hpc_det.sgd.elastic.node", run.path, "1"])
(run.path.parent / "pid").write_text(str(agent.pid))
agent.wait()
"""


@pytest.fixture
def task(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    (tmp_path / "logs").mkdir()
    process = subprocess.Popen([sys.executable, "-c", TASK], stdin=subprocess.PIPE)
    assert process.stdin
    process.stdin.write(pickle.dumps(AgentTask(str(tmp_path), ("-c", AGENT, str(tmp_path)))))
    process.stdin.close()
    yield process
    process.kill()
    process.wait()


def agents(run: Path) -> list[int]:
    return [int(path.name.removeprefix("pid-")) for path in sorted(run.glob("pid-*"), key=os.path.getctime)]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGUSR2, 0), (signal.SIGUSR1, 3)])
def test_the_agent_hears_what_the_scheduler_sends_to_the_task(
    task: subprocess.Popen[bytes], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    wait_for(lambda: agents(tmp_path))
    task.send_signal(number)
    assert task.wait(DEADLINE_S) == code
    assert (tmp_path / number.name).exists()


def test_an_agent_that_was_killed_is_started_again(task: subprocess.Popen[bytes], tmp_path: Path) -> None:
    wait_for(lambda: agents(tmp_path))
    os.kill(agents(tmp_path)[0], signal.SIGKILL)
    wait_for(lambda: len(agents(tmp_path)) == 2)
    task.terminate()
    assert task.wait(DEADLINE_S) == 0


def test_a_task_fails_with_its_agent(tmp_path: Path) -> None:
    """Else the scheduler shows the job of an agent that never reached its driver as completed."""
    (tmp_path / "logs").mkdir()
    task = pickle.dumps(AgentTask(str(tmp_path), ("-c", "raise SystemExit(1)")))
    assert subprocess.run([sys.executable, "-c", TASK], input=task).returncode == 1


@pytest.mark.parametrize("has_driver", [True, False])
def test_an_agent_without_a_driver_fails_and_leaves_no_process(tmp_path: Path, has_driver: bool) -> None:
    run = RunFolder(tmp_path / "run")
    run.make()
    if has_driver:
        announce(run, "127.0.0.9", 9)
    text = "import sys; from hpc_det.sgd.elastic import node; node.MEET_S = 0.1; sys.exit(node.main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", text, run.path, "1"], capture_output=True, text=True)
    facts = ("127.0.0.9:9", "127.0.0.1 (lo)", "Connection refused") if has_driver else (run.driver,)
    assert (done.returncode, unnamed(done.stderr, *facts)) == (1, [])
    assert "Traceback" not in done.stderr
    assert len(failed(run)) == has_driver


@pytest.mark.parametrize("is_temporary", [True, False])
def test_an_agent_that_has_not_found_its_driver_ends_with_the_process_that_started_it(
    tmp_path: Path, is_temporary: bool
) -> None:
    """Of a temporary run, whose driver is that process, nothing is left."""
    run = RunFolder(tmp_path / "run")
    run.make()
    announce(run, "127.0.0.9", 9)
    driver = subprocess.Popen([sys.executable, "-c", STARTS, run.path, str(is_temporary)])
    try:
        wait_for(lambda: failed(run))
    finally:
        driver.kill()
        driver.wait()
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not is_there(pid))
    assert run.path.exists() is not is_temporary


def test_an_agent_ends_with_a_task_that_is_killed(task: subprocess.Popen[bytes], tmp_path: Path) -> None:
    wait_for(lambda: agents(tmp_path))
    task.kill()
    wait_for(lambda: not is_there(agents(tmp_path)[0]))


def test_submitit_is_told_that_the_job_does_not_come_back() -> None:
    checkpoint: Callable[[], object] = AgentTask("/run", ()).checkpoint
    assert checkpoint() is None, "submitit's core.job_environment would put back anything else"


def test_what_ends_soon_is_started_later_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    again, waits = BackOff(most_s=5.0, lasted_s=60.0), []
    assert again.is_due()
    for _ in range(5):
        again.begin()
        began = now
        while not again.is_due():
            now += 0.5
        waits.append(now - began)
    assert waits == [1, 2, 4, 5, 5]
    now += 61
    again.begin()
    now += 1
    assert again.is_due()
