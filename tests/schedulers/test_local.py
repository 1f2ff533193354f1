"""Jobs without a scheduler, as real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_det.node.files import write_atomic
from hpc_det.node.process import start_ticks
from hpc_det.schedulers import local
from hpc_det.schedulers.local import JobId, Local, start_detached
from hpc_det.schedulers.queue import this_user
from hpc_det.schedulers.scheduler import CommandError, JobState, run_command
from tests.facts import refused
from tests.plan.plans import job_plan
from tests.schedulers.one_job import submission
from tests.wait import wait_for

pytestmark = pytest.mark.integration

HOST = socket.gethostname()


def state(job_id: str) -> JobState:
    return Local().status([job_id], run_command)[job_id].state


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Return a function that submits a script as `hpc-det` does, by a short-lived process, and returns the job's id."""
    job_ids: list[str] = []

    def start(text: str) -> str:
        script = tmp_path / "job.sh"
        script.write_text(text)
        job_ids.append(Local().parse_submit(run_command(Local().submit_command(submission(script)))))
        return job_ids[-1]

    yield start
    for job_id in job_ids:
        if state(job_id) is JobState.RUNNING:
            os.kill(int(job_id.partition("-")[0]), signal.SIGKILL)


def test_a_job_outlives_the_process_that_submitted_it(started: Callable[[str], str]) -> None:
    job_id = started("exec sleep 60")
    assert state(job_id) is JobState.RUNNING
    pid = int(job_id.partition("-")[0])
    assert os.getsid(pid) == pid  # in a separate session, which a closed terminal does not end
    assert os.getpgid(pid) == pid


def test_a_job_has_no_terminal_and_prints_into_nothing(started: Callable[[str], str], tmp_path: Path) -> None:
    started(f"readlink /proc/$$/fd/0 /proc/$$/fd/1 /proc/$$/fd/2 >{tmp_path}/part; mv {tmp_path}/part {tmp_path}/open")
    wait_for((tmp_path / "open").exists)
    descriptors = (tmp_path / "open").read_text().split()
    assert descriptors[0] == descriptors[2] == "/dev/null"


def test_a_job_that_has_ended_is_seen_to_have_ended(started: Callable[[str], str]) -> None:
    job_id = started("exit 3")
    wait_for(lambda: state(job_id) is JobState.ENDED)


def test_cancelling_sends_term_and_the_job_ends_in_its_own_time(started: Callable[[str], str], tmp_path: Path) -> None:
    job_id = started(f"trap 'touch {tmp_path}/saved; exit' TERM; touch {tmp_path}/up; while :; do sleep 0.01; done")
    wait_for((tmp_path / "up").exists)
    Local().cancel(job_id, run_command)
    wait_for(lambda: state(job_id) is JobState.ENDED)
    assert (tmp_path / "saved").exists()


def test_another_process_with_the_same_number_is_not_the_job() -> None:
    """This happens after a wrap-around of process ids."""
    with subprocess.Popen(["sleep", "60"]) as stranger:
        try:
            ticks = start_ticks(stranger.pid)
            assert state(f"{stranger.pid}-{ticks}@{HOST}") is JobState.RUNNING
            job_id = f"{stranger.pid}-{ticks - 100}@{HOST}"
            assert state(job_id) is JobState.ENDED
            Local().cancel(job_id, run_command)
            with pytest.raises(subprocess.TimeoutExpired):
                stranger.wait(timeout=0.1)
        finally:
            stranger.kill()


def test_a_process_that_nobody_has_reaped_yet_has_ended() -> None:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert state(f"{process.pid}-{start_ticks(process.pid)}@{HOST}") is JobState.ENDED


def test_a_job_that_ends_before_anyone_looks_has_an_id_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start_and_let_it_end(*args: object, **options: object) -> subprocess.Popen[bytes]:
        started.append(popen(*args, **options))  # type: ignore[call-overload]
        os.waitid(os.P_PID, started[0].pid, os.WEXITED | os.WNOWAIT)
        return started[0]

    popen = subprocess.Popen
    monkeypatch.setattr("hpc_det.schedulers.local.subprocess.Popen", start_and_let_it_end)
    (tmp_path / "job.sh").write_text("exit 1")
    job_id = Local().parse_submit(start_detached(str(tmp_path / "job.sh")))
    assert state(job_id) is JobState.ENDED
    started[0].wait()


def test_a_job_knows_its_own_id(started: Callable[[str], str], tmp_path: Path) -> None:
    code = "import os; from hpc_det.schedulers.local import Local; print(Local().job_id(os.environ), flush=True)"
    job_id = started(f"exec >{tmp_path}/id; exec {sys.executable} -c '{code}'")
    wait_for(lambda: state(job_id) is JobState.ENDED)
    assert (tmp_path / "id").read_text() == f"{job_id}\n"


@pytest.mark.parametrize("said", ["", "12", "12-", "-5", "a-b", "12-None"])
def test_an_answer_that_is_no_job_id_is_refused(said: str) -> None:
    with refused(ValueError, "int"):
        Local().parse_submit(said)


def test_cancelling_a_job_that_is_gone_is_harmless() -> None:
    with subprocess.Popen(["true"]) as process:
        pass
    Local().cancel(f"{process.pid}-1@{HOST}", run_command)


def test_a_job_of_another_host_is_no_news_and_is_not_killed_here() -> None:
    """A home folder may be shared, and another process with this id may run here."""
    elsewhere = f"{os.getpid()}-{start_ticks(os.getpid())}@elsewhere"
    assert state(elsewhere) is JobState.UNKNOWN
    with refused(CommandError, "elsewhere"):
        Local().cancel(elsewhere, run_command)


def test_gangs_that_share_this_machine_have_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    plan = job_plan(scheduler="local", ranks_per_node=2)
    assert [Local().share(plan, place)["CUDA_VISIBLE_DEVICES"] for place in range(3)] == ["0,1", "2,3", "4,5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,GPU-b2, 3,0")
    assert [Local().share(plan, place)["CUDA_VISIBLE_DEVICES"] for place in range(2)] == ["7,GPU-b2", "3,0"]
    assert Local().share(job_plan(slot_type="cpu"), 1) == {}


Start = Callable[..., int]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a process like a job of an experiment in `tmp_path`, and returns its pid."""
    started: list[subprocess.Popen[bytes]] = []

    def run(module: str = local.JOB_MODULE, *, leads: bool = True) -> int:
        waits = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
        process = subprocess.Popen([*waits, module, str(tmp_path), "1"], stdin=subprocess.PIPE, start_new_session=leads)
        started.append(process)
        # Popen returns a moment before the new program's arguments can be read.
        wait_for(lambda: str(tmp_path) in Path(f"/proc/{process.pid}/cmdline").read_text())
        return process.pid

    yield run
    for process in started:
        process.communicate()


def found(folder: Path) -> list[str]:
    return [job.job_id for job in local.jobs() if job.path == str(folder)]


def test_a_job_is_a_process_that_leads_its_session(start: Start, tmp_path: Path) -> None:
    plan = job_plan(scheduler="local", nodes=1, job_nodes=1, folder=str(tmp_path))
    write_atomic(tmp_path / "plan.json", plan.to_json())
    pid = start()
    start(leads=False)
    start("some.other.module")
    (job,) = (job for job in local.jobs() if job.path == str(tmp_path))
    assert job.job_id == str(JobId.of(pid))
    assert (job.name, job.user, job.pool, job.slots, job.running) == ("digits", this_user(), "local", 4, 1)
    assert job.submitted == pytest.approx(time.time(), abs=60)


def test_a_job_of_a_scheduler_on_this_node_is_not_one_of_this_machine(start: Start, tmp_path: Path) -> None:
    write_atomic(tmp_path / "plan.json", job_plan(folder=str(tmp_path)).to_json())
    start()
    assert found(tmp_path) == []


def test_an_experiment_that_was_deleted_or_damaged_hides_no_other(start: Start, tmp_path: Path) -> None:
    start()
    assert found(tmp_path) == []
    write_atomic(tmp_path / "plan.json", "{")
    assert found(tmp_path) == []


def test_a_plan_that_nobody_ever_writes_is_not_waited_for(start: Start, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "plan.json")
    start()
    assert found(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")
def test_a_plan_of_another_user_is_not_read(start: Start, tmp_path: Path) -> None:
    plan = job_plan(scheduler="local", nodes=1, job_nodes=1, folder=str(tmp_path))
    write_atomic(tmp_path / "plan.json", plan.to_json())
    os.chown(tmp_path / "plan.json", 12345, 12345)
    start()
    assert found(tmp_path) == []


def test_a_name_is_no_command_to_a_terminal(start: Start, tmp_path: Path) -> None:
    plan = job_plan(scheduler="local", nodes=1, job_nodes=1, folder=str(tmp_path), name="a\x1b[2J")
    write_atomic(tmp_path / "plan.json", plan.to_json())
    start()
    assert [job.name for job in local.jobs() if job.path == str(tmp_path)] == ["a\\x1b[2J"]
