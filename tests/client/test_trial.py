"""A trial from Python: hyperparameters, state, metrics and checkpoints."""

from __future__ import annotations

import pytest

from hpc_det import client
from hpc_det.client import TrialState
from hpc_det.errors import UsageError
from hpc_det.store.attempt import read_stop
from tests.cli.life import FakeScheduler, Life
from tests.facts import refused


def test_a_trial_has_its_sample_and_state(searched: Life) -> None:
    trial = client.get_trial(1, 2)
    assert trial.hparams == searched.search.sample(2).hparams
    assert (trial.state, trial.batches, trial.seed) == (TrialState.COMPLETED, 400, searched.search.sample(2).seed)
    assert trial.best == {"metric": "accuracy", "value": 0.95, "batches": 400, "trial": 2}


def test_a_trial_has_only_its_own_checkpoints(searched: Life) -> None:
    trial = client.get_trial(1, 1)
    assert [checkpoint.steps for checkpoint in trial.checkpoints()] == [400, 100]
    best = trial.top_checkpoint()
    assert best
    assert (best.trial_id, best.steps) == (1, 100)


@pytest.mark.parametrize("number", [0, 3])
def test_a_trial_that_the_search_has_not_created_is_refused(searched: Life, number: int) -> None:
    with refused(UsageError, "experiment 1", f"trial {number}"):
        client.get_trial(1, number)


def test_a_killed_trial_gets_a_stop_request(life: Life, scheduler: FakeScheduler) -> None:
    life.begins()
    trial = client.get_trial(1, 1)
    assert trial.state is TrialState.RUNNING
    trial.kill()
    request = read_stop(life.trial.stop, attempt=1)
    assert request
    assert request.reason == "kill"
