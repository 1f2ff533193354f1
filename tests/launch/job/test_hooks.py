"""Hooks that jobs run: real workers, real commands, a server on loopback."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from hpc_det.node.json_files import read_json, write_json
from hpc_det.search.journal import SearchJournal
from hpc_det.store.attempt import request_stop
from tests.launch.gang import Gang
from tests.notify.receiver import Receiver
from tests.notify.receiver import receiver as receiver
from tests.wait import DEADLINE_S

pytestmark = pytest.mark.integration

NOTES = ["sh", "-c", "echo $HPC_DET_STATE >>../notes"]
BOTH = ["RUNNING", "COMPLETED", "ERROR"]


def hooked(gang: Gang, **hook: Any) -> None:
    empty = {"command": None, "webhook": None, "mail": None, "states": BOTH}
    write_json(gang.experiment.effective, {**(read_json(gang.experiment.effective) or {}), "notify": [empty | hook]})


def test_workers_that_end_at_once_tell_it_once(gang: Gang, receiver: Receiver) -> None:
    gang.search_for(name="random", max_trials=2)
    hooked(gang, webhook=receiver.url())
    both = "touch up-$n; while ! [ -e up-1 -a -e up-2 ]; do sleep 0.01; done"
    gang.plan(f"n=${{HPC_DET_FOLDER##*/}}; {both}")
    assert gang.start_job(2).wait(timeout=DEADLINE_S) == 0
    assert receiver.news() == [(12, "RUNNING"), (12, "COMPLETED")]


def test_a_trial_that_fails_is_told_once_over_all_attempts(gang: Gang) -> None:
    hooked(gang, command=NOTES)
    gang.plan("false", max_restarts=2)
    assert gang.run_job()[0] == 1
    assert len(gang.ends()) == 3
    assert (gang.experiment.path / "notes").read_text() == "RUNNING\nERROR\n"


@pytest.mark.parametrize(("wish", "state"), [("pause", "PAUSED"), ("cancel", "CANCELED")])
def test_a_wish_of_the_command_line_is_told_by_the_last_worker_that_leaves(
    gang: Gang, wish: Literal["pause", "cancel"], state: str
) -> None:
    hooked(gang, command=NOTES, states=["PAUSED", "CANCELED"])
    gang.plan("$PYTHON rank.py 0 --trial")
    job = gang.start_job()
    gang.wait_for_ranks(0)
    getattr(SearchJournal(gang.experiment), wish)("ada")
    request_stop(gang.trial.stop, attempt=None, reason=wish, source="ada")
    assert job.wait(timeout=DEADLINE_S) == 0
    assert (gang.experiment.path / "notes").read_text() == f"{state}\n"


def test_what_goes_wrong_with_a_hook_stands_in_the_log_and_harms_nobody(gang: Gang) -> None:
    hooked(gang, command=["./no-such-program"], states=["COMPLETED"])
    gang.plan("true")
    assert gang.run_job()[0] == 0
    assert gang.ends() == [("finished", "done")]
    problem = "notifying command ./no-such-program of COMPLETED failed: ./no-such-program: No such file or directory"
    assert f"worker 0: {problem}\n" in gang.printed.read_text()
