"""A full disk is a separate cause of an attempt's end: the job waits for space, and the trial is not charged."""

from __future__ import annotations

import errno
import os
import re
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_det.launch.job.worker import GAVE_UP
from hpc_det.view.attempt_sentences import attempt_in_words
from hpc_det.view.trial_history import read_attempts
from tests.facts import unnamed
from tests.launch.gang import Gang
from tests.small_disk import disk as disk
from tests.small_disk import fill
from tests.stub import Stub
from tests.wait import wait_for

pytestmark = pytest.mark.integration

WRITES = """
import os, sys
from hpc_det.store.attempt import Attempt
from hpc_det.distributed.rank_process import note_error
from pathlib import Path

attempt = Attempt.from_env(os.environ)
try:
    path = Path(sys.argv[1])
    with open(path, "wb", buffering=0) as file:
        for _ in range(10):
            file.write(bytes(100_000))
    path.unlink()
except OSError as error:
    error.filename = error.filename or str(path)
    note_error(attempt, 0, error)
    raise SystemExit(1)
"""


@pytest.fixture
def gang_on(tmp_path: Path, disk: Path) -> Iterator[Gang]:
    """Return a gang whose run folder is on the small disk."""
    with tempfile.TemporaryDirectory() as tmp:
        gang = Gang(disk / "root", Path(tmp))
        yield gang
        gang.close()


def waits_until_full(folder: Path) -> str:
    """Return an entrypoint whose first attempt fails as soon as `fill_all` has filled the disk."""
    return f"touch started; while [ ! -e {folder}/full ]; do sleep 0.05; done; [ $HPC_DET_NUMBER != 1 ]"


def fill_all(gang: Gang, disk: Path, folder: Path) -> Path:
    """Fill the disk and the journal's last page, which a full tmpfs still lets it use; return the ballast file."""
    wait_for(lambda: (gang.code / "started").exists())
    with gang.trial.journal.open("ab") as journal:
        journal.write(b" " * (-journal.tell() % 4096 - 1) + b"\n")
    ballast = fill(disk)
    (folder / "full").touch()
    return ballast


def output(gang: Gang) -> str:
    return gang.printed.read_text() + (gang.trial.job_log.read_text() if gang.trial.job_log.exists() else "")


def waits_for_space(gang: Gang) -> bool:
    """Return whether a line of the output names the full disk and the seconds until the next try."""
    return re.search(rf"\b\d+ s\b.*{os.strerror(errno.ENOSPC)}", output(gang)) is not None


def test_an_attempt_goes_on_when_there_is_space(gang: Gang, disk: Path) -> None:
    """Only the disk of the checkpoints is full, not that of the run folder."""
    ballast = fill(disk)
    (gang.code / "writes.py").write_text(WRITES)
    gang.plan(f"$PYTHON writes.py {disk}/state")
    job = gang.start_job()
    wait_for(lambda: gang.ends() == [("disk full", "restart")])
    ballast.unlink()
    assert job.wait() == 0
    assert gang.ends()[-1] == ("finished", "done")
    assert {end[1] for end in gang.ends()[:-1]} == {"restart"}, "max_restarts is 0: nothing is charged"
    failure = next(e["failure"] for e in gang.journal.events() if e["event"] == "ended")
    assert unnamed(failure, disk / "state", os.strerror(errno.ENOSPC), "0 B") == []
    attempt = read_attempts(gang.trial)[0]
    assert unnamed(attempt_in_words(attempt, attempt.started, is_over=False), "disk full", "time limit") == []


@pytest.mark.long
def test_where_nothing_can_be_written_the_journal_waits(gang_on: Gang, disk: Path, tmp_path: Path) -> None:
    """There is space neither for the rank's failure nor for the job's journal at first."""
    gang_on.plan(waits_until_full(tmp_path))
    job = gang_on.start_job()
    ballast = fill_all(gang_on, disk, tmp_path)
    wait_for(lambda: waits_for_space(gang_on) or job.poll() is not None, otherwise=lambda: output(gang_on))
    assert job.poll() is None
    ballast.unlink()
    assert job.wait() == 0
    assert gang_on.ends() == [("disk full", "restart"), ("finished", "done")]


def test_a_job_that_is_told_to_leave_while_it_waits_comes_back(gang: Gang, disk: Path) -> None:
    fill(disk)
    (gang.code / "writes.py").write_text(WRITES)
    gang.plan(f"$PYTHON writes.py {disk}/state", scheduler="local")
    job = gang.start_job()
    wait_for(lambda: gang.ends()[:1] == [("disk full", "restart")])
    os.kill(job.pid, signal.SIGTERM)
    job.wait()
    assert gang.ends()[-1] == ("cancelled", "done"), "without a queue a signal is meant for the experiment"


def test_a_job_without_a_queue_that_can_write_nothing_ends_at_a_signal(
    gang_on: Gang, disk: Path, tmp_path: Path
) -> None:
    gang_on.plan(waits_until_full(tmp_path), scheduler="local")
    job = gang_on.start_job()
    fill_all(gang_on, disk, tmp_path)
    wait_for(lambda: waits_for_space(gang_on), otherwise=lambda: output(gang_on))
    os.kill(job.pid, signal.SIGTERM)
    assert job.wait() == GAVE_UP
    assert "Traceback" not in output(gang_on)


def test_a_job_with_a_queue_goes_back_into_it(gang: Gang, disk: Path, stub: Stub, tmp_path: Path) -> None:
    fill(disk)
    (gang.code / "writes.py").write_text(WRITES)
    stub("srun", 'while [[ $1 == --* ]]; do shift; done; SLURM_NODEID=0 exec "$@"')
    stub("scontrol", f'echo "$@" >>{tmp_path}/asked')
    gang.plan(f"$PYTHON writes.py {disk}/state", scheduler="slurm")
    job = gang.start_job(SLURM_JOB_ID="7", SLURM_JOB_NODELIST="node1", SLURM_NODEID="0")
    wait_for(lambda: gang.ends()[:1] == [("disk full", "restart")], otherwise=lambda: output(gang))
    os.kill(job.pid, signal.SIGTERM)
    assert job.wait() == 0
    assert "requeue 7" in (tmp_path / "asked").read_text()
    assert {cause for cause, _ in gang.ends()} == {"disk full"}


def test_a_job_that_can_write_nothing_goes_back_into_the_queue_all_the_same(
    gang_on: Gang, disk: Path, stub: Stub, tmp_path: Path
) -> None:
    stub("srun", 'while [[ $1 == --* ]]; do shift; done; SLURM_NODEID=0 exec "$@"')
    stub("scontrol", f'echo "$@" >>{tmp_path}/asked')
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1", "SLURM_NODEID": "0"}
    gang_on.plan(waits_until_full(tmp_path), scheduler="slurm")
    job = gang_on.start_job(**environment)
    ballast = fill_all(gang_on, disk, tmp_path)
    wait_for(lambda: waits_for_space(gang_on), otherwise=lambda: output(gang_on))
    os.kill(job.pid, signal.SIGTERM)
    assert job.wait() == 0
    assert "requeue 7" in (tmp_path / "asked").read_text()
    assert gang_on.ends() == []
    ballast.unlink()
    assert gang_on.run_job(**environment)[0] == 0
    assert [cause for cause, _ in gang_on.ends()][1:] == ["finished"]
