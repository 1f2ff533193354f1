"""Whose weights the trials of an experiment begin with, and what is said where there are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from hpc_det.checkpoint.committed import Committed, checksum
from hpc_det.checkpoint.staging import Staging
from hpc_det.checkpoint.storage import TrialStorage
from hpc_det.errors import UsageError
from hpc_det.store.experiments import ExperimentStore
from hpc_det.submit.submission import source_checkpoint
from tests.cli.life import Life, halving, random_search


@pytest.fixture
def store(tmp_path: Path) -> ExperimentStore:
    return ExperimentStore(tmp_path)


def source(store: ExperimentStore, **searcher: Any) -> Path | None:
    return source_checkpoint(searcher, store)


def two_trials(store: ExperimentStore) -> Life:
    life = Life.submitted(store.root, **random_search(2))
    life.begins()
    for trial, value in ((1, 0.5), (2, 0.25)):
        life.saves(100, trial=trial)
        life.saves(400, trial=trial)
        life.reaches(value)
    return life


def test_who_names_none_begins_with_their_own(store: ExperimentStore) -> None:
    assert source(store, source_trial_id=None, source_checkpoint_uuid=None) is None
    assert source(store) is None


@pytest.mark.parametrize(("name", "trial"), [("1/2", 2), ("1/1", 1), ("1", 1)])
def test_a_trial_is_named_with_its_experiment_and_an_experiment_means_its_best_trial(
    store: ExperimentStore, name: str, trial: int
) -> None:
    life = two_trials(store)
    found = source(store, source_trial_id=name)
    assert found
    assert found.parent == life.folder.trial(trial).checkpoints
    newest = life.saves(500, trial=trial)
    assert source(store, source_trial_id=name) == newest.path, "the latest, not the best"


def test_the_best_trial_may_have_become_worse_since(store: ExperimentStore) -> None:
    life = Life.submitted(store.root, **halving(4))
    life.begins()
    for value in (0.5, 0.9, 0.4, 0.7, 0.6):
        life.reaches(value)
    for trial in (1, 2, 3, 4):
        life.saves(100, trial=trial)
    assert life.search.state().trials[2].value == 0.6
    found = source(store, source_trial_id="1")
    assert found
    assert found.parent == life.folder.trial(2).checkpoints


def test_a_trial_that_has_not_reported_yet_is_taken_if_it_is_the_only_one(store: ExperimentStore) -> None:
    life = Life.submitted(store.root)
    life.begins()
    saved = life.saves(100)
    assert source(store, source_trial_id="1") == saved.path


def test_a_checkpoint_is_found_wherever_it_is(store: ExperimentStore) -> None:
    two_trials(store)
    saved = two_trials(store).saves(500, trial=2)
    assert source(store, source_checkpoint_uuid=saved.uuid) == saved.path


@pytest.mark.parametrize(
    ("searcher", "said"),
    [
        ({"source_trial_id": "7"}, "searcher.source_trial_id: experiment 7: not found below {root}; "),
        ({"source_trial_id": "1/3"}, "searcher.source_trial_id: 1/3: experiment 1 has no trial 3; it has 1, 2"),
        ({"source_trial_id": "2"}, "searcher.source_trial_id: no trial of experiment 2 has begun"),
        ({"source_trial_id": "3/1"}, "searcher.source_trial_id: trial 3/1 has no checkpoint; name one that was"),
        (
            {"source_checkpoint_uuid": "u"},
            "searcher.source_checkpoint_uuid: no experiment below {root} has a checkpoint 'u'",
        ),
    ],
)
def test_what_is_not_there_is_named(store: ExperimentStore, searcher: dict[str, Any], said: str) -> None:
    two_trials(store)
    Life.submitted(store.root)
    Life.submitted(store.root).begins()
    with pytest.raises(UsageError) as error:
        source(store, **searcher)
    assert str(error.value).startswith(said.format(root=store.root))


def test_a_damaged_checkpoint_is_not_taken(store: ExperimentStore) -> None:
    life = two_trials(store)
    older, newer = life.saves(500), life.saves(600)
    (newer.path / "state_dict.pth").write_bytes(b"wrong")
    assert source(store, source_trial_id="1/1") == older.path
    with pytest.raises(UsageError, match=r"searcher\.source_checkpoint_uuid: .*damaged: state_dict.pth: 5 bytes"):
        source(store, source_checkpoint_uuid=newer.uuid)


def saved_with(life: Life, *names: str) -> Committed:
    staging = Staging(life.trial.checkpoints, str(uuid4()))
    for name in names:
        file = staging.partial / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"content")
    return staging.commit(500, {name: checksum(staging.partial / name) for name in names})


@pytest.mark.parametrize(
    "weights", ["state_dict.pth", "shard-1.pth", "engines.json", "model0/mp_rank_00_model_states.pt"]
)
def test_a_checkpoint_whose_weights_were_removed_is_not_taken(store: ExperimentStore, weights: str) -> None:
    life = Life.submitted(store.root)
    life.begins()
    saved = saved_with(life, weights, "rank-0.pth")
    TrialStorage(life.trial, {"type": "shared_fs"}).remove_files(saved, [weights])
    with pytest.raises(UsageError) as error:
        source(store, source_checkpoint_uuid=saved.uuid)
    assert str(error.value) == (
        f"searcher.source_checkpoint_uuid: {saved.path} lacks files that `hpc-det checkpoint rm --glob` removed: "
        f"{weights}; name one that has its weights: `hpc-det experiment list-checkpoints 1` shows which are COMPLETED"
    )


def test_a_checkpoint_that_has_its_weights_still_is_taken(store: ExperimentStore) -> None:
    life = Life.submitted(store.root)
    life.begins()
    saved = saved_with(life, "state_dict.pth", "rank-0.pth")
    TrialStorage(life.trial, {"type": "shared_fs"}).remove_files(saved, ["rank-0.pth"])
    assert source(store, source_checkpoint_uuid=saved.uuid) == saved.path
