from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from submitit.core.utils import FailedJobError

from hpc_det.schedulers.pbs.answers import ask_elements
from hpc_det.submit.submitit_pbs.job import PbsJob
from tests.facts import refused
from tests.submit.submitit_pbs.site import StubSite

pytestmark = pytest.mark.integration

RECORDED = Path(__file__).parent / "recorded"


def recorded(name: str) -> dict[str, Any]:
    jobs: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text())["Jobs"]
    return jobs


@pytest.mark.parametrize(
    ("name", "number", "state"),
    [
        ("finished-ok", "48", "COMPLETED"),
        ("finished-qdel", "47", "CANCELLED"),
        ("dependent-after-failed-parent", "53", "CANCELLED"),
        ("preempt-suspend-2-high-running", "130", "PREEMPTED"),
        ("preempt-requeue-2-high-running", "126", "PENDING"),
        ("preempt-delete-1-after2s", "134", "RUNNING"),
        ("array-later-some-expired", "54_1", "COMPLETED"),
        ("array-later-some-expired", "54_2", "RUNNING"),
        ("array-later-some-expired", "54_7", "PENDING"),
    ],
)
def test_the_state_of_a_recorded_job(name: str, number: str, state: str, site: StubSite, tmp_path: Path) -> None:
    site.answer(recorded(name))
    assert PbsJob(tmp_path, number).state == state


@pytest.mark.parametrize(
    ("job", "state"),
    [
        ({"job_state": "F", "Exit_status": -29, "substate": 93}, "TIMEOUT"),
        ({"job_state": "F", "Exit_status": 1, "substate": 93}, "FAILED"),
        ({"job_state": "F", "Exit_status": 1, "substate": 91}, "CANCELLED"),
        ({"job_state": "E"}, "COMPLETING"),
        ({"job_state": "?"}, "UNKNOWN"),
    ],
)
def test_the_state_of_other_jobs(job: dict[str, Any], state: str, site: StubSite, tmp_path: Path) -> None:
    site.answer({"12.pbshead": job})
    assert PbsJob(tmp_path, "12").state == state


def test_one_question_for_all_jobs(site: StubSite, tmp_path: Path) -> None:
    site.answer(recorded("array-later-some-expired") | recorded("finished-ok"))
    jobs: list[PbsJob[Any]] = [PbsJob(tmp_path, number) for number in ("54_0", "54_2", "54_7", "48")]
    jobs[0].get_info()
    assert [job.get_info("cache")["State"] for job in jobs] == ["COMPLETED", "RUNNING", "PENDING", "COMPLETED"]
    assert site.calls("qstat") == ["-f -F json -E -t 48 54[]"]


def test_a_job_that_is_done_is_not_asked_about_again(site: StubSite, tmp_path: Path) -> None:
    site.answer(recorded("finished-ok"))
    job: PbsJob[Any] = PbsJob(tmp_path, "48")
    assert job.done(force_check=True)
    assert job.done(force_check=True)
    assert len(site.calls("qstat")) == 1


@pytest.mark.parametrize(
    ("text", "said", "code"),
    [
        ('{"timestamp": 1}', "Connection refused\nqstat: cannot connect to server pbshead (errno=15010)", 255),
        ("no JSON", "", 0),
        ("", "", 0),
    ],
)
def test_a_question_without_an_answer_is_no_news(
    text: str, said: str, code: int, site: StubSite, tmp_path: Path
) -> None:
    site.answer({"12.pbshead": {"job_state": "R"}})
    job: PbsJob[Any] = PbsJob(tmp_path, "12")
    assert not job.done(force_check=True)
    site.answer_text(text, said, code)
    assert not job.done(force_check=True)
    assert job.state == "RUNNING"


def test_one_unknown_job_among_others(site: StubSite, tmp_path: Path) -> None:
    others = recorded("several-ids-one-unknown")
    site.answer(others, "qstat: Unknown Job Id 999999.pbshead", 153)
    known: PbsJob[Any] = PbsJob(tmp_path, "47")
    unknown: PbsJob[Any] = PbsJob(tmp_path, "999999")
    assert unknown.done(force_check=True)
    assert (known.state, unknown.state) == ("RUNNING", "FAILED")


@pytest.mark.parametrize(("word", "state"), [("success", "COMPLETED"), ("error", "FAILED")])
def test_a_job_that_pbs_has_forgotten_ended_as_its_result_says(
    word: str, state: str, site: StubSite, tmp_path: Path
) -> None:
    site.answer({}, "qstat: Unknown Job Id 12[].pbshead", 153)
    job: PbsJob[Any] = PbsJob(tmp_path, "12_3")
    job.paths.result_pickle.write_bytes(pickle.dumps((word, "something"), pickle.HIGHEST_PROTOCOL))
    assert job.state == state


def test_the_history_is_asked_of_a_job_that_has_just_finished(site: StubSite, tmp_path: Path) -> None:
    site.answer(recorded("finished-qdel"), "qstat: 47.pbshead Job has finished, use -x or -H to obtain it", 35)
    assert PbsJob(tmp_path, "47").state == "CANCELLED"
    assert site.calls("qstat") == ["-f -F json -E -t 47", "-f -F json -E -x -t 47.pbshead"]


def test_the_job_that_goes_on_for_another_is_asked_about_in_its_place(site: StubSite, tmp_path: Path) -> None:
    (tmp_path / "12_next").write_text("13")
    site.answer({"13.pbshead": {"job_state": "R"}})
    assert PbsJob(tmp_path, "12").state == "RUNNING"
    assert site.calls("qstat") == ["-f -F json -E -t 13"]


def test_the_next_job_may_be_written_down_while_pbs_answers(
    site: StubSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def answered_late(job_ids: Any, run: Any) -> Any:
        answer = ask_elements(job_ids, run)
        (tmp_path / "12_next").write_text("13")
        return answer

    monkeypatch.setattr("hpc_det.submit.submitit_pbs.job.ask_elements", answered_late)
    site.answer({"12.pbshead": {"job_state": "F", "Exit_status": 255}})
    job: PbsJob[Any] = PbsJob(tmp_path, "12")
    assert not job.done(force_check=True)
    assert job.state == "REQUEUED"


def test_a_job_keeps_its_way_through_a_pickle(site: StubSite, tmp_path: Path) -> None:
    (tmp_path / "12_next").write_text("13")
    again = pickle.loads(pickle.dumps(PbsJob(tmp_path, "12")))
    again.watcher.clear()
    site.answer({"13.pbshead": {"job_state": "R"}})
    assert again.get_info()["State"] == "RUNNING"


def test_cancelling_deletes_the_job_that_runs_now(site: StubSite, tmp_path: Path) -> None:
    (tmp_path / "12_3_next").write_text("14")
    PbsJob(tmp_path, "12_3").cancel()
    PbsJob(tmp_path, "12_4").cancel()
    assert site.calls("qdel") == ["14", "12[4]"]


@pytest.mark.parametrize("code", [35, 153])
def test_cancelling_what_has_ended_is_fine(code: int, site: StubSite, tmp_path: Path) -> None:
    site.refuse_qdel(code)
    PbsJob(tmp_path, "12").cancel()


def test_a_refused_cancellation_is_an_error_where_it_is_checked(site: StubSite, tmp_path: Path) -> None:
    site.refuse_qdel(162)
    PbsJob(tmp_path, "12").cancel(check=False)
    with refused(FailedJobError, "qdel 12"):
        PbsJob(tmp_path, "12").cancel()
