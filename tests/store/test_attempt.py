from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_det.errors import HpcDetError
from hpc_det.store.attempt import Attempt

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
    with pytest.raises(HpcDetError) as error:
        Attempt.from_env(env)
    assert str(error.value).startswith(f"{missing} is not set: this is started by a node agent; create an experiment")


def test_its_trial_is_the_folder_of_the_plan() -> None:
    assert str(ATTEMPT.trial.stop) == "/state/experiments/12/trials/1/stop.json"
