from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from submitit.core.utils import DelayedSubmission, FailedJobError, FailedSubmissionError

from hpc_det.submit.submitit_pbs.executor import PbsExecutor
from tests.facts import refused
from tests.stub import Stub
from tests.submit.submitit_pbs.functions import add
from tests.submit.submitit_pbs.site import StubSite

pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).parent / "script.sh"


def test_the_whole_script(executor: PbsExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mask = os.umask(0o022)
    executor.python = "apptainer exec image.sif python"
    executor.update_parameters(name="train", nodes=2, tasks_per_node=2, queue="low", setup=["module load cuda"])
    text = executor._make_submission_file_text(executor._submitit_command_str, "UID")
    os.umask(mask)
    assert text.replace(str(tmp_path), "TMP").replace(sys.executable, "PYTHON") == SCRIPT.read_text()


def test_a_folder_may_be_named_after_the_job(site: StubSite, tmp_path: Path) -> None:
    text = PbsExecutor(tmp_path / "%A" / "%j")._make_submission_file_text("true", "UID")
    assert f'exec >>{tmp_path}/"${{job_id%_*}}"/"$job_id"/"$job_id"_0_log.out' in text
    assert f". {tmp_path}/.submission_environment_UID.sh" in text


def test_one_log_where_it_is_asked_for(executor: PbsExecutor) -> None:
    executor.update_parameters(stderr_to_stdout=True)
    text = executor._make_submission_file_text("true", "UID")
    assert "_0_log.out 2>&1\n" in text
    assert "--stderr-to-stdout" in text


def test_a_folder_that_no_script_can_hold_is_refused(site: StubSite, tmp_path: Path) -> None:
    executor = PbsExecutor(tmp_path / "two\nlines")
    executor.folder.mkdir()
    with refused(ValueError, repr(str(executor.folder))[1:-1]):
        executor.submit(add, 1, 2)
    assert site.calls("qsub") == []


def test_a_batch_is_an_array(executor: PbsExecutor, site: StubSite) -> None:
    site.next_id("54[].pbshead")
    executor.update_parameters(array_parallelism=2)
    jobs = executor.map_array(add, [1, 2, 3], [4, 5, 6])
    assert [job.job_id for job in jobs] == ["54_0", "54_1", "54_2"]
    assert [DelayedSubmission.load(job.paths.submitted_pickle).args for job in jobs] == [(1, 4), (2, 5), (3, 6)]
    assert site.calls("qsub")[-1].startswith("-J 0-2%2 -o ")
    assert jobs[2].paths.submission_file.name == "54_submission.sh"
    assert jobs[2].paths.submission_file.exists()


def test_an_array_that_nothing_limits_names_no_limit(executor: PbsExecutor, site: StubSite) -> None:
    site.next_id("54[].pbshead")
    with executor.batch():
        jobs = [executor.submit(add, 1, 2) for _ in range(3)]
    assert jobs[0].job_id == "54_0"
    assert site.calls("qsub")[-1].startswith("-J 0-2 -o ")


def test_a_batch_of_one_is_a_job(executor: PbsExecutor, site: StubSite) -> None:
    (job,) = executor.map_array(add, [1], [2])
    assert job.job_id == "12"
    assert "-J" not in site.calls("qsub")[-1]


def test_a_job_after_an_array_is_none(executor: PbsExecutor, site: StubSite) -> None:
    site.next_id("54[].pbshead")
    executor.map_array(add, [1, 2], [3, 4])
    site.next_id("55.pbshead")
    assert executor.submit(add, 1, 2).job_id == "55"
    assert "-J" not in site.calls("qsub")[-1]


def test_what_qsub_says_reaches_the_program(executor: PbsExecutor, stub: Stub) -> None:
    stub("qsub", "echo 'qsub: Unknown queue' >&2; exit 170")
    with refused(FailedJobError, "Unknown queue"):
        executor.submit(add, 1, 2)


def test_an_answer_without_an_id_is_refused(executor: PbsExecutor, stub: Stub) -> None:
    stub("qsub", "echo waiting for the moon")
    with refused(FailedSubmissionError, "'waiting for the moon'"):
        executor.submit(add, 1, 2)


def test_a_wrong_parameter_changes_nothing(executor: PbsExecutor) -> None:
    executor.update_parameters(name="good")
    with refused(ValueError, "nodes", 0):
        executor.update_parameters(nodes=0, name="other")
    assert executor.parameters == {"name": "good"}


@pytest.mark.parametrize(
    ("text", "affinity"),
    [
        ('echo "pbs_version = 2024.1.0"', 2),
        ('echo "pbs_version = 23.06.06" >&2', 2),
        ("echo 'Version: 6.1.3'; echo 'Commit: abc'", -1),
        ("echo 'Unknown option: version'; exit 2", -1),
    ],
)
def test_only_pbs_is_pbs(text: str, affinity: int, site: StubSite, stub: Stub) -> None:
    stub("qsub", text)
    assert PbsExecutor.affinity() == affinity


def test_without_pbs_there_is_no_executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert PbsExecutor.affinity() == -1
    with refused(RuntimeError, "qsub"):
        PbsExecutor(tmp_path)


def test_the_mask_of_new_files_is_that_of_the_program(executor: PbsExecutor) -> None:
    before = os.umask(0o027)
    try:
        assert "#PBS -W umask=027\n" in executor._make_submission_file_text("true", "UID")
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)
