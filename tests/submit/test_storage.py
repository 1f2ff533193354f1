"""Where a new experiment's checkpoints will lie, and what is said before it is submitted."""

from __future__ import annotations

import os
import stat
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from hpc_det.errors import UsageError
from hpc_det.node.files import share
from hpc_det.node.json_files import read_json
from hpc_det.plan.effective import Effective
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder
from hpc_det.submit import submission as module
from hpc_det.submit.submission import check_storage, make_storage
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
    with pytest.raises(UsageError) as refused:
        check_storage(effective)
    return refused.value.problems


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
    assert problems(asked(shared(tmp_path / "none"))) == [
        f"checkpoint_storage.host_path: '{tmp_path}/none' is no folder on this machine; name one that this machine and "
        "all nodes see, since hpc-det reads checkpoints from both"
    ]
    (tmp_path / "file").touch()
    (problem,) = problems(asked({"type": "directory", "container_path": str(tmp_path / "file")}))
    assert problem.startswith(f"checkpoint_storage.container_path: '{tmp_path}/file' is no folder")
    (problem,) = problems(asked(shared(tmp_path, storage_path="file/a")))
    assert problem.startswith(f"checkpoint_storage.host_path: '{tmp_path}/file' is no folder")


def test_a_folder_of_somebody_else_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    assert problems(asked(shared(tmp_path, storage_path="team"))) == [
        f"checkpoint_storage.host_path: '{tmp_path}' may not be written; name a folder that you may write"
    ]


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
    assert problem.startswith(f"checkpoint_storage.type: '{storage['type']}' needs {library}, which ")
    assert problem.endswith("-m pip install 'hpc_det[cloud]'`")


def test_without_a_type_nothing_is_elsewhere(new: ExperimentFolder) -> None:
    check_storage(asked({}))
    make_storage(asked({}), new)
    assert not new.storage.exists()
    new.trial(1).create()
    assert new.trial(1).checkpoints.is_dir()
    assert not new.trial(1).checkpoints.is_symlink()
