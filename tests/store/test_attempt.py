from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_det.errors import HpcDetError
from hpc_det.node.json_files import DamagedFile, read_map, write_json
from hpc_det.store.attempt import (
    COLLATERAL_S,
    Attempt,
    Failure,
    Reason,
    failure_now,
    first_failure,
    note_failure,
    read_stop,
    request_stop,
)
from hpc_det.store.folders import TrialFolder
from tests.facts import refused, unnamed

text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
number = st.integers(0, 10**6)

ATTEMPT = Attempt(
    folder="/state/experiments/12/trials/1",
    number=3,
    worker=5,
    node_rank=1,
    nodes=2,
    ranks_per_node=4,
    address="10.0.0.8",
    master_addr="10.0.0.7",
    master_port=15001,
    secret="5ec2e7",
    socket="/tmp/hpc-det-x/agent",
)


@settings(deadline=None)
@given(
    st.builds(
        Attempt,
        folder=text,
        number=number,
        node_rank=number,
        nodes=number,
        ranks_per_node=number,
        address=text,
        master_addr=text,
        master_port=number,
        secret=text,
        socket=text,
    )
)
def test_an_attempt_reads_back_from_the_environment(attempt: Attempt) -> None:
    assert Attempt.from_env({"PATH": "/bin", **attempt.to_env()}) == attempt


def test_its_variables_are_recognised_by_their_names() -> None:
    assert all(name.startswith("HPC_DET_") for name in ATTEMPT.to_env())
    assert ATTEMPT.to_env()["HPC_DET_MASTER_PORT"] == "15001"


@pytest.mark.parametrize("missing", sorted(ATTEMPT.to_env()))
def test_without_an_agent_the_error_names_the_variable_and_what_to_do(missing: str) -> None:
    env = ATTEMPT.to_env()
    del env[missing]
    with refused(HpcDetError, missing, "hpc-det experiment create", "torchrun"):
        Attempt.from_env(env)


def test_its_trial_is_the_folder_of_the_plan() -> None:
    assert str(ATTEMPT.trial.stop) == "/state/experiments/12/trials/1/stop.json"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "stop.json"


def ask(path: Path, attempt: int | None, reason: Reason, source: str = "a test") -> str:
    return request_stop(path, attempt=attempt, reason=reason, source=source).reason


def test_without_a_request_nothing_stops(path: Path) -> None:
    assert read_stop(path, 1) is None


def test_a_request_reads_back_with_its_source_and_time(path: Path) -> None:
    before = time.time()
    asked = request_stop(path, attempt=3, reason="signal", source="SIGTERM on node1")
    assert read_stop(path, 3) == asked
    assert (asked.reason, asked.source) == ("signal", "SIGTERM on node1")
    assert before <= asked.time <= time.time()


def test_a_request_left_over_from_an_earlier_attempt_does_not_fire(path: Path) -> None:
    ask(path, 1, "signal")
    assert read_stop(path, 2) is None


def test_a_left_over_request_gives_way_to_a_new_one(path: Path) -> None:
    ask(path, 1, "kill")
    assert ask(path, 2, "signal") == "signal"
    assert read_stop(path, 1) is None


def test_a_request_for_no_attempt_in_particular_fires_in_whichever_comes(path: Path) -> None:
    ask(path, None, "cancel")
    assert [request.reason for attempt in (1, 2, 9) if (request := read_stop(path, attempt))] == ["cancel"] * 3


@pytest.mark.parametrize("standing_for", [1, None])
@pytest.mark.parametrize(
    ("standing", "then", "stands"),
    [
        ("signal", "signal", "signal"),
        ("signal", "cancel", "signal"),
        ("cancel", "signal", "cancel"),
        ("kill", "signal", "kill"),
        ("kill", "cancel", "kill"),
        ("signal", "kill", "kill"),
        ("cancel", "kill", "kill"),
    ],
)
def test_the_first_request_stands_but_kill_overrules_all(
    path: Path, standing_for: int | None, standing: Reason, then: Reason, stands: Reason
) -> None:
    ask(path, standing_for, standing, "the first")
    assert ask(path, 1, then, "the second") == stands
    found = read_stop(path, 1)
    assert found is not None
    assert (found.reason, found.source) == (stands, "the second" if stands == then != standing else "the first")


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
    for rank, moment in ((0, 30.0), (5, 10.0), (10, 20.0)):
        note(trial, rank, moment)
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
    for host, moment in (("node2", 11.0), ("node1", 10.0)):
        note_failure(trial, 1, Failure(rank=None, host=host, time=moment, message=f"on {host}"))
    assert len(list(trial.failures(1).iterdir())) == 2
    failure = first_failure(trial, 1)
    assert failure is not None
    assert (failure.host, failure.message) == ("node1", "on node1")
    assert unnamed(failure.sentence(), "entrypoint", "on node1") == []


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


def test_a_note_of_another_shape_is_damage_and_names_the_file(trial: TrialFolder) -> None:
    note(trial, 0, 10.0)
    (path,) = trial.failures(1).iterdir()
    noted = read_map(path) or {}
    write_json(path, {**noted, "added_by_a_newer_version": 1})
    assert blamed(trial) == 0
    write_json(path, {**noted, "time": "yesterday"})
    with refused(DamagedFile, path, "time", "yesterday"):
        first_failure(trial, 1)
