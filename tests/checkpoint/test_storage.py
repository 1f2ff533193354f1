from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_det.checkpoint.committed import MANIFEST, Committed, committed
from hpc_det.checkpoint.object_store import Remote
from hpc_det.checkpoint.storage import TrialStorage
from hpc_det.errors import HpcDetError
from hpc_det.node.json_files import write_json
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from tests.checkpoint.saved import saved
from tests.facts import refused


@pytest.fixture
def trial(tmp_path: Path) -> TrialFolder:
    """Return a trial of an experiment whose bucket is a folder."""
    experiment = ExperimentFolder(tmp_path / "12")
    experiment.path.mkdir()
    write_json(experiment.storage, {"url": f"file://{tmp_path}/bucket"})
    experiment.trial().create()
    return experiment.trial()


@pytest.fixture
def bucket(trial: TrialFolder, tmp_path: Path) -> Path:
    return tmp_path / "bucket" / "1"


@pytest.fixture
def uploaded(trial: TrialFolder, bucket: Path) -> Committed:
    checkpoint = saved(trial.checkpoints, 5)
    Remote(f"file://{bucket}", {"auto_mkdir": True}).upload(checkpoint)
    return checkpoint


def test_what_is_here_and_in_the_store_is_one_checkpoint(trial: TrialFolder, uploaded: Committed, bucket: Path) -> None:
    storage = TrialStorage(trial, {})
    assert storage.all() == [uploaded]
    assert storage.places(uploaded.uuid) == [str(uploaded.path), f"file://{bucket}/{uploaded.uuid}"]
    shutil.rmtree(uploaded.path)
    assert storage.all() == [uploaded]
    assert storage.places(uploaded.uuid) == [f"file://{bucket}/{uploaded.uuid}"]


def test_what_nobody_has_any_more_is_not_copied(trial: TrialFolder, uploaded: Committed, tmp_path: Path) -> None:
    storage = TrialStorage(trial, {})
    storage.remove(uploaded.uuid)
    storage.remove(uploaded.uuid)
    with refused(HpcDetError, f"checkpoint {uploaded.uuid}", "folder"):
        storage.copy(uploaded, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_files_go_after_the_manifest_that_names_them(
    trial: TrialFolder, uploaded: Committed, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "unlink", killed)
    with pytest.raises(KeyboardInterrupt):
        TrialStorage(trial, {}).remove_files(uploaded, ["state.pt"])
    (left,) = committed(trial.checkpoints)
    assert (left.removed, left.damage(), (left.path / "state.pt").exists()) == (("state.pt",), [], True)
    assert sorted(path.name for path in (bucket / uploaded.uuid).iterdir()) == ["code", MANIFEST]


def test_names_that_lead_elsewhere_are_not_followed(trial: TrialFolder, uploaded: Committed) -> None:
    planted = replace(uploaded, files={**uploaded.files, "../../trial.json": uploaded.files["state.pt"]})
    with refused(HpcDetError, "'../../trial.json'"):
        TrialStorage(trial, {}).remove_files(planted, list(planted.files))
    assert uploaded.damage() == []


def test_a_store_that_does_not_answer_is_a_sentence(
    trial: TrialFolder, uploaded: Committed, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ConnectionError("no route")

    for call in ("stored", "has", "remove"):
        monkeypatch.setattr(Remote, call, refuse)
    storage = TrialStorage(trial, {})
    for ask in (storage.all, lambda: storage.places(uploaded.uuid), lambda: storage.remove(uploaded.uuid)):
        with refused(HpcDetError, "checkpoint_storage: ", f"file://{bucket}", "ConnectionError: no route"):
            ask()
    assert uploaded.damage() == []
