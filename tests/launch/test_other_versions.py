"""Jobs and agents whose files another version of hpc_det has written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_det.node.format_version import KEY
from hpc_det.store.attempt import first_failure
from tests.facts import unnamed
from tests.launch.gang import Gang
from tests.wait import DEADLINE_S

pytestmark = pytest.mark.integration


def make_newer(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {KEY: 9}))


def test_a_job_of_a_newer_plan_says_so_and_ends(gang: Gang) -> None:
    gang.plan("true")
    make_newer(gang.experiment.plan)
    assert gang.start_job().wait(timeout=DEADLINE_S) == 1
    printed = gang.printed.read_text()
    assert unnamed(printed, gang.experiment.plan, 9, 1, "upgrade") == []
    assert len(printed.splitlines()) == 1


def test_a_job_of_several_workers_says_once_per_worker_that_the_search_is_newer(gang: Gang) -> None:
    gang.plan("true")
    gang.search_for(name="random", max_trials=2)
    (gang.experiment.search / "000000000.json").write_text(json.dumps({KEY: 9, "event": "submitted"}))
    assert gang.start_job(2).wait(timeout=DEADLINE_S) == 1
    printed = gang.printed.read_text()
    assert unnamed(printed, gang.experiment.search, 9) == []
    assert "Traceback" not in printed


def test_an_agent_of_a_newer_plan_notes_a_permanent_failure(gang: Gang) -> None:
    gang.plan("true")
    make_newer(gang.experiment.plan)
    command = [sys.executable, "-m", "hpc_det.launch.agent", str(gang.trial.path), "1", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    failure = first_failure(gang.trial, 1)
    assert failure is not None
    assert failure.user_error
    assert unnamed(failure.message, gang.experiment.plan, 9) == []


def test_a_trial_with_a_newer_journal_does_not_start(gang: Gang) -> None:
    gang.plan("touch started")
    gang.trial.journal.write_text(json.dumps({KEY: 9, "event": "continued"}) + "\n")
    assert gang.start_job().wait(timeout=DEADLINE_S) == 1
    printed = gang.printed.read_text()
    assert unnamed(printed, gang.trial.journal, 9) == []
    assert "Traceback" not in printed
    assert not (gang.code / "started").exists()


def test_a_job_with_a_script_of_the_first_days_names_the_remedy(gang: Gang) -> None:
    """Its arguments were the first worker and the number of workers, before there were arrays."""
    gang.plan("true")
    command = [sys.executable, "-m", "hpc_det.launch.job", str(gang.experiment.path), "0", "1", "--", "srun", "agent"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
    assert unnamed(done.stdout, gang.experiment.path, "hpc-det experiment continue 12") == []
