"""Programs that use submitit, on a PBS that really runs their jobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import submitit
from submitit.core.utils import FailedJobError, UncompletedJobError

from hpc_det.submit.submitit_pbs.executor import PbsExecutor, _is_pbs
from hpc_det.submit.submitit_pbs.job import PbsJob
from tests.facts import refused
from tests.labs.pbs_lab import PbsLab
from tests.submit.submitit_pbs import functions
from tests.wait import wait_for


@pytest.fixture
def executor(any_pbs: PbsLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[submitit.AutoExecutor]:
    monkeypatch.setattr(PbsJob, "watcher", type(PbsJob.watcher)())
    monkeypatch.setattr(PbsJob, "_results_timeout_s", 0)
    yield submitit.AutoExecutor(tmp_path / "jobs", cluster="pbs")
    _is_pbs.cache_clear()


def test_a_result_and_an_exception(executor: submitit.AutoExecutor) -> None:
    good, bad = executor.submit(functions.add, 1, 2), executor.submit(functions.fail)
    assert good.result() == 3
    with refused(FailedJobError, "on purpose"):
        bad.result()
    wait_for(lambda: good.get_info()["State"] == "COMPLETED" and bad.get_info()["State"] == "FAILED")


def test_an_array_of_which_two_run_at_once(executor: submitit.AutoExecutor) -> None:
    executor.update_parameters(pbs_array_parallelism=2)
    jobs = executor.map_array(functions.add, [1, 2, 3, 4], [10, 20, 30, 40])
    assert [job.result() for job in jobs] == [11, 22, 33, 44]


def test_two_nodes_with_two_tasks_each(executor: submitit.AutoExecutor) -> None:
    executor.update_parameters(nodes=2, tasks_per_node=2)
    ranks = executor.submit(functions.who).results()
    hosts = ranks[0][-1]
    assert len(set(hosts)) == 2
    assert ranks == [(2 * node + local, local, node, 4, 2, hosts) for node in (0, 1) for local in (0, 1)]


def test_without_a_history_a_job_still_ends(executor: submitit.AutoExecutor, pbs_lab: PbsLab) -> None:
    pbs_lab.set_history(False)
    good, bad = executor.submit(functions.add, 1, 2), executor.submit(functions.fail)
    assert good.result() == 3
    wait_for(lambda: bad.done(force_check=True))
    wait_for(lambda: (good.get_info()["State"], bad.get_info()["State"]) == ("COMPLETED", "FAILED"))


def test_a_cancelled_job_is_over(executor: submitit.AutoExecutor, tmp_path: Path) -> None:
    job = executor.submit(functions.Counts(str(tmp_path / "never")))
    wait_for((tmp_path / "never.running").exists)
    assert job.get_info()["State"] == "RUNNING"
    job.cancel()
    wait_for(lambda: job.done(force_check=True))
    assert job.state == "CANCELLED"
    with pytest.raises(UncompletedJobError):
        job.result()


def test_an_element_is_cancelled_and_the_others_go_on(executor: submitit.AutoExecutor, tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in "ab"]
    jobs = executor.map_array(functions.wait_for, paths)
    wait_for(lambda: all(Path(f"{path}.running").exists() for path in paths))
    jobs[0].cancel()
    wait_for(lambda: jobs[0].done(force_check=True))
    Path(paths[1]).touch()
    assert jobs[1].result() == "came"


@pytest.mark.long
@pytest.mark.parametrize("way", ["D", "R"])
def test_a_preempted_job_comes_back_with_its_work(
    way: str, executor: submitit.AutoExecutor, any_pbs: PbsLab, tmp_path: Path
) -> None:
    any_pbs.set_preempt_order(way)
    executor.update_parameters(nodes=3, pbs_queue="low")
    job = executor.submit(functions.Counts(str(tmp_path / "enough")))
    wait_for((tmp_path / "enough.running").exists)
    any_pbs.preempt()
    wait_for((tmp_path / "enough.saved").exists)
    (tmp_path / "enough").touch()
    assert job.task(0).result() == 2
    assert job.paths.folder.joinpath(f"{job.job_id}_next").exists() == (way == "D")


def test_a_job_at_its_time_limit_comes_back_with_its_work(any_pbs: PbsLab, executor: object, tmp_path: Path) -> None:
    own = PbsExecutor(tmp_path / "jobs")
    almost_over = f"[ -e {tmp_path}/enough.saved ] || SECONDS=550"  # bash counts up from this value
    own.update_parameters(timeout_min=10, setup=[almost_over])
    job = own.submit(functions.Counts(str(tmp_path / "enough")))
    wait_for((tmp_path / "jobs" / f"{job.job_id}_next").exists)
    (tmp_path / "enough").touch()
    assert job.result() == 2


def test_a_cancelled_job_that_had_moved_on_is_over(
    executor: submitit.AutoExecutor, any_pbs: PbsLab, tmp_path: Path
) -> None:
    any_pbs.set_preempt_order("D")
    executor.update_parameters(nodes=3, pbs_queue="low")
    job = executor.submit(functions.Counts(str(tmp_path / "never")))
    wait_for((tmp_path / "never.running").exists)
    any_pbs.preempt(seconds=60)
    wait_for(job.paths.folder.joinpath(f"{job.job_id}_next").exists)
    job.cancel()
    wait_for(lambda: job.done(force_check=True))
    assert job.state == "CANCELLED"
