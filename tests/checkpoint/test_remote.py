from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_det.checkpoint import remote as module
from hpc_det.checkpoint.committed import MANIFEST, Committed, FileEntry, committed, sealed
from hpc_det.checkpoint.remote import Remote, remote
from hpc_det.checkpoint.staging import new_staging
from hpc_det.errors import UsageError


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """The folder that stands for a bucket."""
    return tmp_path / "bucket" / "runs"


@pytest.fixture
def bucket(store: Path) -> Remote:
    return Remote(f"file://{store}", {"auto_mkdir": True})


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    return folder


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The checkpoints of the same trial on a machine that has seen none."""
    folder = tmp_path / "other"
    folder.mkdir()
    return folder


def checkpoint(checkpoints: Path, steps: int) -> Committed:
    staging = new_staging(checkpoints)
    entries: dict[str, FileEntry] = {}
    (staging.partial / "code").mkdir()
    (staging.partial / "code" / "model_def.py").write_text("pass")
    with staging.file("state.pt", entries) as file:
        file.write(b"weights" * steps)
    staging.add_others(entries)
    return staging.commit(steps, entries)


def test_what_was_uploaded_is_fetched_whole(bucket: Remote, mine: Path, other: Path) -> None:
    saved = checkpoint(mine, 5)
    bucket.upload(saved)
    assert bucket.fetch(other) == []
    (found,) = committed(other)
    assert (found.uuid, found.steps, found.files, found.damage()) == (saved.uuid, 5, saved.files, [])
    assert (other / saved.uuid / "code" / "model_def.py").read_text() == "pass"


def test_only_the_newest_is_fetched(bucket: Remote, mine: Path, other: Path) -> None:
    for steps in (5, 20, 10):
        bucket.upload(checkpoint(mine, steps))
    assert bucket.fetch(other) == []
    assert [found.steps for found in committed(other)] == [20]


def test_nothing_is_fetched_that_is_no_newer(bucket: Remote, mine: Path, other: Path) -> None:
    bucket.upload(checkpoint(mine, 5))
    here = checkpoint(other, 5)
    assert bucket.fetch(other) == []
    assert [found.uuid for found in committed(other)] == [here.uuid]


def test_an_empty_store_has_nothing(bucket: Remote, other: Path) -> None:
    assert bucket.fetch(other) == []
    assert committed(other) == []


def test_a_killed_upload_is_no_checkpoint(bucket: Remote, store: Path, mine: Path, other: Path) -> None:
    bucket.upload(checkpoint(mine, 5))
    torn = checkpoint(mine, 9)
    bucket.upload(torn)
    (store / torn.uuid / MANIFEST).unlink()
    assert bucket.fetch(other) == []
    assert [found.steps for found in committed(other)] == [5]


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_one_is_named_and_the_next_is_taken(
    damage: str, bucket: Remote, store: Path, mine: Path, other: Path
) -> None:
    bucket.upload(checkpoint(mine, 5))
    spoilt = checkpoint(mine, 9)
    bucket.upload(spoilt)
    state = store / spoilt.uuid / "state.pt"
    if damage == "cut":
        state.write_bytes(b"weig")
    else:
        state.unlink()
    (skipped,) = bucket.fetch(other)
    assert skipped.startswith(f"checkpoint {spoilt.uuid} in {store} is damaged: state.pt: ")
    assert [found.steps for found in committed(other)] == [5]


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "code/../../evil"])
def test_a_name_that_leads_elsewhere_is_refused(
    name: str, bucket: Remote, store: Path, mine: Path, other: Path
) -> None:
    saved = checkpoint(mine, 5)
    bucket.upload(saved)
    manifest = store / saved.uuid / MANIFEST
    told = json.loads(manifest.read_text())
    told["files"][name] = {"size": 0, "crc32": 0}
    manifest.write_text(json.dumps(sealed(told)))
    (skipped,) = bucket.fetch(other)
    assert skipped.endswith(f"is damaged: {name!r} is no file of a checkpoint")
    assert list(other.iterdir()) == []


def test_a_removed_one_is_gone(bucket: Remote, store: Path, mine: Path, other: Path) -> None:
    saved = checkpoint(mine, 5)
    bucket.upload(saved)
    bucket.remove(saved.uuid)
    bucket.remove(saved.uuid)
    assert list(store.iterdir()) == []
    assert bucket.fetch(other) == []


@pytest.mark.parametrize(
    ("storage", "url", "options"),
    [
        (
            {"type": "s3", "bucket": "b", "prefix": "/a/b/", "access_key": "k", "secret_key": "s", "endpoint_url": "u"},
            "s3://b/a/b/12/3",
            {"key": "k", "secret": "s", "endpoint_url": "u"},
        ),
        ({"type": "s3", "bucket": "b", "prefix": None, "access_key": None}, "s3://b/12/3", {}),
        ({"type": "gcs", "bucket": "b", "prefix": "p"}, "gs://b/p/12/3", {}),
        ({"type": "azure", "container": "c", "connection_string": "s"}, "az://c/12/3", {"connection_string": "s"}),
        (
            {"type": "azure", "container": "c", "account_url": "https://me.blob.core.windows.net", "credential": "k"},
            "az://c/12/3",
            {"credential": "k", "account_name": "me", "account_host": "me.blob.core.windows.net"},
        ),
    ],
)
def test_each_store_has_its_url_and_options(
    storage: dict[str, Any], url: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, Any]] = []
    monkeypatch.setattr(module, "Remote", lambda *arguments: made.append(arguments))
    remote(storage, experiment_id=12, trial_id=3)
    assert made == [(url, options)]


@pytest.mark.parametrize("storage", [{"type": None}, {"type": "shared_fs", "host_path": "/x"}])
def test_a_folder_is_no_store(storage: dict[str, Any]) -> None:
    assert remote(storage, 1, 1) is None


def test_a_store_that_nothing_here_reaches_is_told_with_what_to_install() -> None:
    with pytest.raises(UsageError, match=r"checkpoint_storage: abfs://c/1/1: .*; install hpc_det\[cloud\]"):
        Remote("abfs://c/1/1", {})
