from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_det.checkpoint.committed import MANIFEST, Committed, committed, sealed
from hpc_det.checkpoint.remote import Remote, options
from hpc_det.errors import UsageError
from tests.checkpoint.saved import saved


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


def only(checkpoints: list[Committed]) -> Committed:
    (found,) = checkpoints
    return found


def test_what_was_uploaded_is_downloaded_whole(bucket: Remote, mine: Path, other: Path) -> None:
    uploaded = saved(mine, 5)
    bucket.upload(uploaded)
    assert bucket.download(only(bucket.stored(other))) == []
    found = only(committed(other))
    assert (found.uuid, found.steps, found.files, found.damage()) == (uploaded.uuid, 5, uploaded.files, [])
    assert (other / uploaded.uuid / "code" / "model_def.py").read_text() == "pass"


def test_an_empty_store_has_nothing(bucket: Remote, other: Path) -> None:
    assert bucket.stored(other) == []


def test_a_killed_upload_is_no_checkpoint(bucket: Remote, store: Path, mine: Path, other: Path) -> None:
    bucket.upload(saved(mine, 5))
    torn = saved(mine, 9)
    bucket.upload(torn)
    (store / torn.uuid / MANIFEST).unlink()
    assert only(bucket.stored(other)).steps == 5


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_one_does_not_come_here(damage: str, bucket: Remote, store: Path, mine: Path, other: Path) -> None:
    spoilt = saved(mine, 9)
    bucket.upload(spoilt)
    state = store / spoilt.uuid / "state.pt"
    if damage == "cut":
        state.write_bytes(b"weig")
    else:
        state.unlink()
    (problem,) = bucket.download(only(bucket.stored(other)))
    assert problem.startswith("state.pt: ")
    assert committed(other) == []


def test_a_damaged_one_here_is_replaced(bucket: Remote, mine: Path) -> None:
    here = saved(mine, 9)
    bucket.upload(here)
    (here.path / "state.pt").write_bytes(b"weig")
    assert bucket.download(only(bucket.stored(mine))) == []
    assert only(committed(mine)).damage() == []
    assert [entry.name for entry in mine.iterdir()] == [here.uuid]


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "code/../../evil"])
def test_a_name_that_leads_elsewhere_is_refused(
    name: str, bucket: Remote, store: Path, mine: Path, other: Path
) -> None:
    uploaded = saved(mine, 5)
    bucket.upload(uploaded)
    manifest = store / uploaded.uuid / MANIFEST
    told = json.loads(manifest.read_text())
    told["files"][name] = {"size": 0, "crc32": 0}
    manifest.write_text(json.dumps(sealed(told)))
    assert bucket.stored(other) == []


def test_a_checkpoint_under_the_name_of_another_is_none(bucket: Remote, store: Path, mine: Path, other: Path) -> None:
    uploaded = saved(mine, 5)
    bucket.upload(uploaded)
    (store / uploaded.uuid).rename(store / "renamed")
    assert list(bucket.stored(other)) == []


def test_a_removed_one_is_gone(bucket: Remote, store: Path, mine: Path, other: Path) -> None:
    uploaded = saved(mine, 5)
    bucket.upload(uploaded)
    bucket.remove(uploaded.uuid)
    bucket.remove(uploaded.uuid)
    assert list(store.iterdir()) == []
    assert bucket.stored(other) == []


@pytest.mark.parametrize(
    ("storage", "expected"),
    [
        (
            {"type": "s3", "bucket": "b", "prefix": "/a/b/", "access_key": "k", "secret_key": "s", "endpoint_url": "u"},
            {"key": "k", "secret": "s", "endpoint_url": "u"},
        ),
        ({"type": "s3", "bucket": "b", "prefix": None, "access_key": None}, {}),
        ({"type": "gcs", "bucket": "b", "prefix": "p"}, {}),
        ({"type": "azure", "container": "c", "connection_string": "s"}, {"connection_string": "s"}),
        (
            {"type": "azure", "container": "c", "account_url": "https://me.blob.core.windows.net", "credential": "k"},
            {"credential": "k", "account_name": "me", "account_host": "me.blob.core.windows.net"},
        ),
    ],
)
def test_each_store_has_its_options(storage: dict[str, Any], expected: dict[str, Any]) -> None:
    assert options(storage) == expected


def test_an_error_is_told_without_what_opens_the_store(store: Path) -> None:
    remote = Remote(f"file://{store}", {"secret": "hush"})
    assert remote.in_words(ValueError("cannot read hush of me")) == "ValueError: cannot read ******** of me"


def test_a_store_that_nothing_here_reaches_is_told_with_what_to_install() -> None:
    with pytest.raises(UsageError, match=r"checkpoint_storage: abfs://c/1/1: .*; install hpc_det\[cloud\]"):
        Remote("abfs://c/1/1", {})
