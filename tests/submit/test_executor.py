"""Submission by submitit: the input of an executable `sbatch` on PATH, and the files in submitit's folder."""

from __future__ import annotations

import os
import pickle
import pickletools
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_det.schedulers.scheduler import CommandError
from hpc_det.submit.executor import GangExecutor, RunScript
from tests.facts import refused
from tests.schedulers.one_job import submission
from tests.stub import Stub

pytestmark = pytest.mark.integration

SCRIPT = '#!/bin/bash\n#SBATCH "--job-name=größe \'x\'"\necho $SLURM_JOB_ID `true` \\\n  "100%"\n\n'


@pytest.fixture(autouse=True)
def private_files() -> Iterator[None]:
    """Set the umask of `hpc-det experiment create`."""
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "job.sh"
    path.write_bytes(SCRIPT.encode())
    return path


@pytest.fixture
def executor(tmp_path: Path, script: Path) -> GangExecutor:
    return GangExecutor(tmp_path / "submitit", "slurm", submission(script))


@pytest.fixture
def sbatch(stub: Stub, tmp_path: Path) -> Path:
    """Return the folder into which an executable `sbatch` writes its script and environment."""
    records = tmp_path / "records"
    records.mkdir()
    stub("sbatch", f"cat \"${{@: -1}}\" >'{records}/script'; env -0 >'{records}/env'; echo '4711;atlas'")
    return records


def environment(records: Path) -> dict[str, str]:
    items = (records / "env").read_bytes().decode().split("\0")[:-1]
    return dict(item.split("=", 1) for item in items)


def test_sbatch_gets_the_script_byte_for_byte(executor: GangExecutor, sbatch: Path) -> None:
    assert executor.submit_script() == "4711"
    assert (sbatch / "script").read_bytes() == SCRIPT.encode()


def test_variables_of_a_job_around_us_do_not_become_options(
    executor: GangExecutor, sbatch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_NNODES", "SLURM_MEM_PER_NODE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")
    monkeypatch.setenv("SBATCH_RESERVATION", "course")
    before = dict(os.environ)
    executor.submit_script()
    passed_on = environment(sbatch)
    assert {name for name in passed_on if name.startswith("SLURM_")} == {"SLURM_CONF"}
    assert passed_on["SLURM_CONF"] == "/etc/slurm/slurm.conf"
    assert passed_on["SBATCH_RESERVATION"] == "course"
    assert dict(os.environ) == before


def test_a_refusal_says_what_sbatch_said_and_prints_nothing_beside(
    executor: GangExecutor, stub: Stub, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    stub("sbatch", "echo 'sbatch: error: Batch job submission failed: Invalid account' >&2; exit 1")
    with refused(CommandError, "sbatch: error: Batch job submission failed: Invalid account"):
        executor.submit_script()
    assert capfd.readouterr() == ("", "")
    assert os.environ["SLURM_JOB_ID"] == "1"


@pytest.mark.parametrize(
    ("answer", "key"),
    [
        ("Invalid account or account/partition combination specified", "resources.account"),
        ("Invalid qos specification", "resources.qos"),
        ("Invalid feature specification", "resources.constraint"),
        ("Memory specification can not be satisfied", "resources.memory_per_slot"),
        ("qsub: Unknown resource: nvlink", "resources.constraint"),
    ],
)
def test_a_refused_request_is_named_by_its_key(answer: str, key: str, executor: GangExecutor, stub: Stub) -> None:
    stub("sbatch", f"echo '{answer}' >&2; exit 1")
    with refused(CommandError, answer, key):
        executor.submit_script()


def test_the_time_limit_is_no_remedy_for_too_many_jobs(executor: GangExecutor, stub: Stub) -> None:
    stub(
        "sbatch",
        "echo 'Job violates accounting/QOS policy (job submit limit, user size and/or time limits)' >&2; exit 1",
    )
    with refused(CommandError, "job submit limit") as info:
        executor.submit_script()
    assert "resources.time_limit" not in str(info.value)


def test_an_answer_without_a_job_id_is_a_refusal(executor: GangExecutor, stub: Stub) -> None:
    stub("sbatch", "echo all is well")
    with refused(CommandError, "'all is well'"):
        executor.submit_script()


def test_an_absent_sbatch_is_named_with_the_remedy(
    executor: GangExecutor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with refused(CommandError, "sbatch", "PATH", "login node", "--cluster local"):
        executor.submit_script()


def test_the_pickle_holds_one_call_with_a_path(
    executor: GangExecutor, sbatch: Path, script: Path, tmp_path: Path
) -> None:
    executor.submit_script()
    data = (tmp_path / "submitit" / "4711_submitted.pkl").read_bytes()
    submission = pickle.loads(data)
    assert submission.function == RunScript(str(script))
    assert (submission.args, submission.kwargs) == ((), {})
    texts = {str(argument) for _, argument, _ in pickletools.genops(data) if isinstance(argument, str)}
    modules = {text for text in texts if "." in text and not text.startswith("/")}
    assert modules == {"submitit.core.utils", "hpc_det.submit.executor"}


def test_the_pickled_call_runs_the_script_and_returns_its_exit_code(script: Path, tmp_path: Path) -> None:
    script.write_text(f"touch {tmp_path}/ran; exit 3")
    assert pickle.loads(pickle.dumps(RunScript(str(script))))() == 3
    assert (tmp_path / "ran").exists()


def test_files_are_the_owners_alone(executor: GangExecutor, sbatch: Path, tmp_path: Path) -> None:
    executor.submit_script()
    folder = tmp_path / "submitit"
    files = [path for path in folder.rglob("*") if not path.is_symlink()]
    assert {path.name for path in files} == {"4711_submitted.pkl", "4711_submission.sh"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_local_job_takes_the_same_way(tmp_path: Path, script: Path) -> None:
    script.write_text(f"touch {tmp_path}/ran")
    job_id = GangExecutor(tmp_path / "submitit", "local", submission(script)).submit_script()
    assert (tmp_path / "submitit" / f"{job_id}_submission.sh").read_text() == script.read_text()
