"""A new experiment: the storage of its checkpoints, and the checkpoint from which its weights are loaded."""

from __future__ import annotations

import os
import stat
from importlib import util
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from hpc_det.checkpoint.committed import Committed, checksum
from hpc_det.checkpoint.staging import Staging
from hpc_det.checkpoint.storage import TrialStorage
from hpc_det.errors import UsageError
from hpc_det.node.files import share
from hpc_det.node.json_files import read_json
from hpc_det.plan.effective import Effective
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder
from hpc_det.submit import submission as module
from hpc_det.submit.submission import check_storage, make_storage, source_checkpoint
from tests.cli.life import Life, halving, random_search
from tests.facts import each_names, refused, unnamed
from tests.plan.sites import cluster, experiment


def asked(storage: dict[str, Any], **settings: Any) -> Effective:
    return Effective(
        experiment=experiment(checkpoint_storage=storage, **settings),
        cluster=cluster(containers={"runtime": "podman"}),
        tree={},
        origins={},
        notes=[],
        context_dir=Path(),
    )


def shared(folder: Path, **more: str) -> dict[str, Any]:
    return {"type": "shared_fs", "host_path": str(folder), **more}


@pytest.fixture
def new(state_folder: Path) -> ExperimentFolder:
    return ExperimentStore(state_folder).create()


def problems(effective: Effective) -> list[str]:
    with pytest.raises(UsageError) as error:
        check_storage(effective)
    return error.value.problems


# --- folders


@pytest.mark.parametrize("storage_path", [None, "team/a"])
def test_an_experiment_gets_a_folder_that_only_its_owner_sees(
    storage_path: str | None, tmp_path: Path, new: ExperimentFolder
) -> None:
    storage = shared(tmp_path, **({"storage_path": storage_path} if storage_path else {}))
    check_storage(asked(storage))
    former = os.umask(0)
    try:
        make_storage(asked(storage), new)
        new.trial(1).create()
    finally:
        os.umask(former)
    (folder,) = (tmp_path / (storage_path or "")).iterdir()
    assert folder.name.startswith("1-")
    assert new.trial(1).checkpoints.readlink() == folder / "1"
    for made in (folder / "1", *(path for path in (folder, *folder.parents) if tmp_path in path.parents)):
        assert made.stat().st_mode & 0o777 == 0o700


def test_a_trial_may_be_made_again_after_a_scratch_folder_was_cleaned_up(tmp_path: Path, new: ExperimentFolder) -> None:
    make_storage(asked(shared(tmp_path)), new)
    trial = new.trial(1)
    trial.create()
    (folder,) = tmp_path.iterdir()
    trial.checkpoints.readlink().rmdir()
    folder.rmdir()
    trial.create()
    assert trial.checkpoints.is_dir()


def test_the_folder_of_a_shared_experiment_is_for_its_group_also_when_it_is_made_again(
    tmp_path: Path, new: ExperimentFolder
) -> None:
    share(new.path, os.getegid())
    make_storage(asked(shared(tmp_path)), new)
    new.trial(1).create()
    (folder,) = tmp_path.iterdir()
    for _ in range(2):
        assert [oct(stat.S_IMODE(path.stat().st_mode)) for path in (folder, folder / "1")] == ["0o2750", "0o2750"]
        (folder / "1").rmdir()
        folder.rmdir()
        new.trial(1).create()


def test_two_users_of_a_folder_have_nothing_in_common(tmp_path: Path, new: ExperimentFolder) -> None:
    other = ExperimentStore(tmp_path / "root of another").create()
    (tmp_path / "shared").mkdir()
    assert other.id == new.id
    for folder in (new, other):
        make_storage(asked(shared(tmp_path / "shared")), folder)
    assert len(list((tmp_path / "shared").iterdir())) == 2


def test_an_experiment_that_goes_takes_its_folder_along(tmp_path: Path, new: ExperimentFolder) -> None:
    make_storage(asked(shared(tmp_path)), new)
    new.trial(1).create()
    new.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_here_is_told(tmp_path: Path) -> None:
    each_names(problems(asked(shared(tmp_path / "none"))), ["checkpoint_storage.host_path", f"'{tmp_path}/none'"])
    (tmp_path / "file").touch()
    (problem,) = problems(asked({"type": "directory", "container_path": str(tmp_path / "file")}))
    assert not unnamed(problem, "checkpoint_storage.container_path", f"'{tmp_path}/file'")
    (problem,) = problems(asked(shared(tmp_path, storage_path="file/a")))
    assert not unnamed(problem, "checkpoint_storage.host_path", f"'{tmp_path}/file'")


def test_a_folder_of_somebody_else_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    found = problems(asked(shared(tmp_path, storage_path="team")))
    each_names(found, ["checkpoint_storage.host_path", f"'{tmp_path}'"])


def test_a_directory_in_a_container_is_the_folder_that_is_mounted_there(tmp_path: Path, new: ExperimentFolder) -> None:
    mount = {"host_path": str(tmp_path), "container_path": "/results"}
    (tmp_path / "a").mkdir()
    inside = asked(
        {"type": "directory", "container_path": "/results/a"},
        environment={"image": "site/cuda:1"},
        bind_mounts=[mount],
    )
    check_storage(inside)
    make_storage(inside, new)
    (folder,) = (tmp_path / "a").iterdir()
    assert new.checkpoints_elsewhere() == folder


# --- stores


def test_a_store_has_a_url_for_each_experiment(new: ExperimentFolder) -> None:
    make_storage(asked({"type": "gcs", "bucket": "b", "prefix": "p"}), new)
    url = new.checkpoints_url()
    assert url is not None
    assert url.startswith("gs://b/p/1-")
    assert read_json(new.storage) == {"url": url}
    new.trial(1).create()
    assert not new.trial(1).checkpoints.is_symlink()


@pytest.mark.parametrize(
    ("storage", "library"),
    [
        ({"type": "s3", "bucket": "b"}, "s3fs"),
        ({"type": "gcs", "bucket": "b"}, "gcsfs"),
        ({"type": "azure", "container": "c", "connection_string": "s"}, "adlfs"),
    ],
)
def test_a_missing_library_is_told_with_what_to_run(
    storage: dict[str, Any], library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == library else util.find_spec("os"))
    (problem,) = problems(asked(storage))
    remedy = f"-m pip install 'hpc_det[{storage['type']}]'`"
    assert not unnamed(problem, "checkpoint_storage.type", repr(storage["type"]), library, remedy)


def test_without_a_type_nothing_is_elsewhere(new: ExperimentFolder) -> None:
    check_storage(asked({}))
    make_storage(asked({}), new)
    assert not new.storage.exists()
    new.trial(1).create()
    assert new.trial(1).checkpoints.is_dir()
    assert not new.trial(1).checkpoints.is_symlink()


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
    ("searcher", "facts"),
    [
        ({"source_trial_id": "7"}, ["searcher.source_trial_id", "experiment 7", "{root}"]),
        ({"source_trial_id": "1/3"}, ["searcher.source_trial_id", "1/3", "1, 2"]),
        ({"source_trial_id": "2"}, ["searcher.source_trial_id", "experiment 2"]),
        ({"source_trial_id": "3/1"}, ["searcher.source_trial_id", "trial 3/1"]),
        (
            {"source_checkpoint_uuid": "u"},
            ["searcher.source_checkpoint_uuid", "{root}", "'u'"],
        ),
    ],
)
def test_what_is_not_there_is_named(store: ExperimentStore, searcher: dict[str, Any], facts: list[str]) -> None:
    two_trials(store)
    Life.submitted(store.root)
    Life.submitted(store.root).begins()
    with refused(UsageError, *(fact.format(root=store.root) for fact in facts)):
        source(store, **searcher)


def test_a_damaged_checkpoint_is_not_taken(store: ExperimentStore) -> None:
    life = two_trials(store)
    older, newer = life.saves(500), life.saves(600)
    (newer.path / "state_dict.pth").write_bytes(b"wrong")
    assert source(store, source_trial_id="1/1") == older.path
    with refused(UsageError, "searcher.source_checkpoint_uuid", "state_dict.pth", "5 bytes"):
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
    remedy = "`hpc-det experiment list-checkpoints 1`"
    with refused(UsageError, "searcher.source_checkpoint_uuid", saved.path, weights, remedy, "COMPLETED"):
        source(store, source_checkpoint_uuid=saved.uuid)


def test_a_checkpoint_that_has_its_weights_still_is_taken(store: ExperimentStore) -> None:
    life = Life.submitted(store.root)
    life.begins()
    saved = saved_with(life, "state_dict.pth", "rank-0.pth")
    TrialStorage(life.trial, {"type": "shared_fs"}).remove_files(saved, ["rank-0.pth"])
    assert source(store, source_checkpoint_uuid=saved.uuid) == saved.path
