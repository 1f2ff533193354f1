"""Scripts run as PBS runs them, with stubs for its commands; test_on_pbs.py has the rest."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from submitit.core.utils import FailedJobError, UncompletedJobError

from hpc_det.schedulers.pbs.hosts import POLL_S
from hpc_det.submit.submitit_pbs import in_job
from hpc_det.submit.submitit_pbs.executor import PbsExecutor
from hpc_det.submit.submitit_pbs.paths import PbsJobPaths
from tests.facts import refused, unnamed
from tests.stub import Stub
from tests.submit.submitit_pbs import functions
from tests.submit.submitit_pbs.site import StubSite
from tests.wait import wait_for

pytestmark = pytest.mark.integration

PREEMPTED = {"12.pbshead": {"job_state": "R", "comment": "Job run at Fri and terminated by Scheduler@pbshead"}}
DELETED = {"12.pbshead": {"job_state": "R", "comment": "Job run at Fri and terminated by alice@pbslogin"}}
RUNS = {"12.pbshead": {"job_state": "R", "comment": "Job run at Fri on (n1:ncpus=1)"}}
GONE = "qstat: Unknown Job Id 12.pbshead"


def test_the_environment_of_the_program_is_that_of_its_tasks(
    executor: PbsExecutor, site: StubSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ODD", "it's\n$HOME, and more")
    executor.update_parameters(nodes=2, setup=["ODD+=' set up'"])
    job = executor.submit(functions.environment, "ODD")
    site.start(job.paths.submission_file, "12.pbshead", nodes="n1 n2").end()
    assert job.results() == [("it's\n$HOME, and more set up", os.getcwd())] * 2


def test_other_nodes_than_asked_for_are_refused(executor: PbsExecutor, site: StubSite) -> None:
    job = executor.submit(functions.add, 1, 2)
    assert site.start(job.paths.submission_file, "12.pbshead", nodes="n1 n2").end() == 1
    assert not unnamed(str(job.stderr()), 1, "n1, n2")


def test_a_task_that_fails_on_another_node_is_the_jobs_failure(executor: PbsExecutor, site: StubSite) -> None:
    executor.update_parameters(nodes=2)
    job = executor.submit(functions.fail)
    assert site.start(job.paths.submission_file, "12.pbshead", nodes="n1 n2").end() == 1
    assert all("on purpose" in str(job.task(rank).exception()) for rank in (0, 1))


def test_tasks_of_other_nodes_are_started_by_what_the_site_has_and_their_exit_codes_are_seen(
    executor: PbsExecutor, site: StubSite, stub: Stub
) -> None:
    """pbsdsh is preferred to pbs_tmrsh; it passes on no environment and returns no exit code of a process."""
    own = 'PBS_JOBID="$PBS_JOBID" HPC_DET_TEST_ID="$HPC_DET_TEST_ID"'
    stub("pbsdsh", f'[ "$2" = 2 ] || exit; shift 3; env -i PATH=/bin:/usr/bin {own} "$@"; exit 0')
    executor.update_parameters(nodes=2)
    job = executor.submit(functions.second_fails)
    assert site.start(job.paths.submission_file, "12.pbshead", nodes="n1 n1 n2").end() == 1
    assert job.task(0).result() == "first"
    assert "on purpose" in str(job.task(1).exception())


def test_a_server_that_cannot_be_reached_is_asked_again_for_the_job_that_goes_on(
    executor: PbsExecutor, site: StubSite, stub: Stub, tmp_path: Path
) -> None:
    job = executor.submit(functions.Counts(str(tmp_path / "enough")))
    running = site.start(job.paths.submission_file, "12.pbshead")
    wait_for((tmp_path / "enough.running").exists)
    site.answer(PREEMPTED)
    away = "touch away; echo 'qsub: cannot connect to server pbshead (errno=111)' >&2; exit 1"
    stub("qsub", f"cd '{tmp_path}'; [ -e away ] || {{ {away}; }}; echo 13.pbshead")
    running.term()
    running.end()
    assert PbsJobPaths(executor.folder, job_id="12").chain() == ["12", "13"]


@pytest.mark.parametrize("by_hand", [False, True])
def test_what_the_user_ends_does_not_come_back(
    by_hand: bool, executor: PbsExecutor, site: StubSite, tmp_path: Path
) -> None:
    job = executor.submit(functions.Counts(str(tmp_path / "enough")))
    running = site.start(job.paths.submission_file, "12.pbshead")
    wait_for((tmp_path / "enough.running").exists)
    site.answer(DELETED)
    if not by_hand:
        job.cancel()
    running.term()
    running.end()
    assert len(site.calls("qsub")) == 1
    site.answer({}, GONE, 153)
    with refused(UncompletedJobError, "FAILED"):
        job.result()


def test_a_plain_function_whose_time_is_over_says_so(executor: PbsExecutor, site: StubSite, tmp_path: Path) -> None:
    executor.update_parameters(timeout_min=0.03)
    job = executor.submit(functions.wait_for, str(tmp_path / "never"))
    site.start(job.paths.submission_file, "12.pbshead").end()
    with refused(FailedJobError, "timed-out and not checkpointable"):
        job.result()
    assert len(site.calls("qsub")) == 1


def test_a_task_that_works_on_after_the_first_is_done_has_all_of_its_time(
    executor: PbsExecutor, site: StubSite, tmp_path: Path
) -> None:
    executor.update_parameters(tasks_per_node=2)
    job = executor.submit(functions.second_waits_for, str(tmp_path / "enough"))
    running = site.start(job.paths.submission_file, "12.pbshead")
    wait_for(job.task(0).paths.result_pickle.exists)
    running.term()
    wait_for((executor.folder / "12_stop").exists)
    (tmp_path / "enough").touch()
    running.end()
    assert job.results() == ["first", "came"]


def test_time_limits_are_counted(site: StubSite, tmp_path: Path) -> None:
    executor = PbsExecutor(tmp_path / "jobs", max_num_timeout=0)
    executor.update_parameters(timeout_min=0.03)
    job = executor.submit(functions.Counts(str(tmp_path / "enough")))
    site.start(job.paths.submission_file, "12.pbshead").end()
    with refused(FailedJobError, "timed-out too many times"):
        job.result()


def test_preemptions_are_not(site: StubSite, tmp_path: Path) -> None:
    executor = PbsExecutor(tmp_path / "jobs", max_num_timeout=0)
    job = executor.submit(functions.Counts(str(tmp_path / "enough")))
    site.answer(RUNS)
    for _ in range(2):
        running = site.start(job.paths.submission_file, "12.pbshead")
        wait_for((tmp_path / "enough.running").exists)
        running.term()
        running.end()
    (tmp_path / "enough").touch()
    site.start(job.paths.submission_file, "12.pbshead").end()
    assert job.result() == 3


@pytest.mark.parametrize("name", ["TMPDIR", "PBS_TMPDIR"])
def test_another_job_is_submitted_where_the_temporary_folder_of_the_job_is_gone(
    name: str, executor: PbsExecutor, site: StubSite, tmp_path: Path
) -> None:
    """This happens after a preemption by deletion, where the nodes share the folder."""
    job = executor.submit(functions.Counts(str(tmp_path / "enough")))
    (tmp_path / "gone").mkdir()
    running = site.start(job.paths.submission_file, "12.pbshead", **{name: str(tmp_path / "gone")})
    wait_for((tmp_path / "enough.running").exists)
    (tmp_path / "gone").rmdir()
    site.answer(PREEMPTED)
    site.next_id("13.pbshead")
    running.term()
    running.end()
    assert PbsJobPaths(executor.folder, job_id="12").chain() == ["12", "13"]


def test_a_site_that_takes_no_jobs_from_a_node_says_so(executor: PbsExecutor, site: StubSite, tmp_path: Path) -> None:
    job = executor.submit(functions.Counts(str(tmp_path / "enough")))
    running = site.start(job.paths.submission_file, "12.pbshead")
    wait_for((tmp_path / "enough.running").exists)
    site.answer(PREEMPTED)
    site.refuse_qsub()
    running.term()
    running.end()
    site.answer({}, GONE, 153)
    with refused(UncompletedJobError, "PBS", "not from here"):
        job.result()


def test_a_job_that_another_goes_on_for_does_not_run_again(executor: PbsExecutor, site: StubSite) -> None:
    job = executor.submit(functions.add, 1, 2)
    (job.paths.folder / "12_next").write_text("13\n14\n")
    assert site.start(job.paths.submission_file, "12.pbshead").end() == 0
    assert site.start(job.paths.submission_file, "13.pbshead", successor_of="12").end() == 0
    assert not job.paths.result_pickle.exists()
    site.start(job.paths.submission_file, "15.pbshead", successor_of="12").end()  # not recorded in 12_next yet
    assert job.result() == 3


def test_half_a_file_of_a_killed_run_does_not_stop_the_next(executor: PbsExecutor, site: StubSite) -> None:
    job = executor.submit(functions.add, 1, 2)
    job.paths.result_pickle.with_name("12_0_result.pkl.save_tmp").write_bytes(b"half")
    site.start(job.paths.submission_file, "12.pbshead").end()
    assert job.result() == 3


def test_nothing_of_ours_is_left_but_the_environment(executor: PbsExecutor, site: StubSite) -> None:
    executor.update_parameters(nodes=2)
    job = executor.submit(functions.add, 1, 2)
    site.start(job.paths.submission_file, "12.pbshead", nodes="n1 n2").end()
    names = {path.name for path in executor.folder.iterdir() if not path.name.startswith(".submission_")}
    logs = {f"12_{rank}_log.{kind}" for rank in (0, 1) for kind in ("out", "err")}
    assert names == {"12_submission.sh", "12_submitted.pkl", "12_0_result.pkl", "12_1_result.pkl"} | logs


def test_the_end_of_a_job_takes_nothing_from_the_one_that_goes_on_already(
    executor: PbsExecutor, site: StubSite, tmp_path: Path
) -> None:
    executor.update_parameters(nodes=2)
    job = executor.submit(functions.LeavesLate(str(tmp_path / "enough")))
    first = site.start(job.paths.submission_file, "12.pbshead", nodes="n1 n2")
    wait_for((tmp_path / "enough.running").exists)
    site.answer(PREEMPTED)
    site.next_id("13.pbshead")
    first.term()
    wait_for(lambda: PbsJobPaths(executor.folder, job_id="12").chain() == ["12", "13"])
    second = site.start(job.paths.submission_file, "13.pbshead", nodes="n1 n2", successor_of="12")
    wait_for((tmp_path / "enough.running").exists)
    (tmp_path / "enough.leave").touch()
    first.end()
    assert (executor.folder / "12_ready").exists()
    time.sleep(2 * POLL_S)  # in this time the other node would notice that its folder is gone
    (tmp_path / "enough").touch()
    assert second.end() == 0
    assert job.task(0).result() == 2


def test_a_suspended_jobs_clock_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    clock = in_job.Clock(used_s=2)
    now[0] += 1
    assert clock.look() == 3
    now[0] += 3600
    assert clock.look() == 3 + in_job.SUSPENDED_S


def test_a_signal_of_the_users_choice(
    executor: PbsExecutor, site: StubSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUBMITIT_PREEMPT_SIGNAL", "TERM")
    job = executor.submit(functions.Counts(str(tmp_path / "enough")))
    running = site.start(job.paths.submission_file, "12.pbshead")
    wait_for((tmp_path / "enough.running").exists)
    site.answer(RUNS)
    running.term()
    running.end()
    assert f"Caught signal {signal.SIGTERM.name}" in str(job.stderr())
    assert str(job.stderr()).count("Caught signal") == 1


def test_a_term_in_the_middle_of_a_print_is_no_error(executor: PbsExecutor, site: StubSite, tmp_path: Path) -> None:
    """A signal handler that prints would fail there (reentrant call)."""
    executor.update_parameters(tasks_per_node=2)
    job = executor.submit(functions.prints_until, str(tmp_path / "enough"))
    running = site.start(job.paths.submission_file, "12.pbshead")
    wait_for(lambda: all(job.task(rank).paths.stderr.exists() for rank in (0, 1)))
    wait_for(lambda: job.task(1).paths.stderr.stat().st_size > 0)
    for _ in range(50):
        os.kill(int((tmp_path / "enough.1").read_text()), signal.SIGTERM)
        os.kill(int((tmp_path / "enough.1").read_text()), signal.SIGUSR2)
    (tmp_path / "enough").touch()
    running.end()
    assert job.results() == ["came", "came"]
    assert "signal" not in str(job.task(1).stderr())
