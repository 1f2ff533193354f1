"""Which rank is blamed."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from hpc_det.store.failure import COLLATERAL_S, Failure, failure_now, first_failure, note_failure
from hpc_det.store.folders import TrialFolder


@pytest.fixture
def trial(tmp_path: Path) -> TrialFolder:
    return TrialFolder(tmp_path)


def note(trial: TrialFolder, rank: int | None, time: float, message: str = "", **details: Any) -> None:
    note_failure(trial, 1, Failure(rank=rank, host="node1", time=time, message=message, **details))


def blamed(trial: TrialFolder) -> int | None:
    failure = first_failure(trial, 1)
    assert failure is not None
    return failure.rank


def test_without_failures_nobody_is_blamed(trial: TrialFolder) -> None:
    assert first_failure(trial, 1) is None


def test_the_earliest_is_blamed_in_whatever_order_they_were_noted(trial: TrialFolder) -> None:
    for rank, time in ((0, 30.0), (5, 10.0), (10, 20.0)):
        note(trial, rank, time)
    assert blamed(trial) == 5


def test_a_lost_rank_goes_before_the_peers_that_complain_of_it(trial: TrialFolder) -> None:
    note(trial, 0, 10.0, "Connection closed by peer")
    note(trial, 1, 10.1, "Connection reset by peer")
    note(trial, 2, 10.0 + COLLATERAL_S, "gone", lost=True)
    assert blamed(trial) == 2


def test_a_rank_lost_much_later_is_not_the_cause(trial: TrialFolder) -> None:
    note(trial, 0, 10.0, "ValueError")
    note(trial, 2, 10.1 + COLLATERAL_S, "gone", lost=True)
    assert blamed(trial) == 0


def test_of_several_lost_ranks_the_earliest_is_blamed(trial: TrialFolder) -> None:
    note(trial, 1, 11.0, lost=True)
    note(trial, 2, 10.5, lost=True)
    note(trial, 0, 10.0)
    assert blamed(trial) == 2


def test_a_ranks_first_failure_is_kept(trial: TrialFolder) -> None:
    note(trial, 1, 10.0, "the cause")
    note(trial, 1, 11.0, "an effect of it", lost=True)
    failure = first_failure(trial, 1)
    assert failure is not None
    assert (failure.message, failure.lost) == ("the cause", False)


def test_every_nodes_entrypoint_may_fail_for_itself(trial: TrialFolder) -> None:
    for host, time in (("node2", 11.0), ("node1", 10.0)):
        note_failure(trial, 1, Failure(rank=None, host=host, time=time, message=f"on {host}"))
    assert len(list(trial.failures(1).iterdir())) == 2
    failure = first_failure(trial, 1)
    assert failure is not None
    assert failure.sentence() == "the entrypoint on node1: on node1"


def test_failures_of_another_attempt_are_not_looked_at(trial: TrialFolder) -> None:
    note(trial, 0, 10.0)
    assert first_failure(trial, 2) is None


def test_a_failure_reads_back_whole(trial: TrialFolder) -> None:
    noted = failure_now(3, "ValueError: größe\n2", traceback="Traceback\n  ...\n", user_error=True)
    note_failure(trial, 1, noted)
    assert first_failure(trial, 1) == noted
    assert noted.sentence() == f"rank 3 on {socket.gethostname()}: ValueError: größe\n2"


def test_a_note_that_was_never_finished_is_not_read(trial: TrialFolder) -> None:
    note(trial, 0, 10.0)
    (trial.failures(1) / f".rank-1.json.{os.getpid()}").write_text('{"rank": 1')
    assert blamed(trial) == 0
