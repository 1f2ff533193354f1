"""Checkpoints on the disk and in an object store: a folder serves as the bucket, and one class simulates failures."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_det.checkpoint.committed import MANIFEST, Committed, committed
from hpc_det.checkpoint.damaged import damaged_ones
from hpc_det.checkpoint.object_store import Mirror, Remote, options
from hpc_det.checkpoint.seals import CRC
from hpc_det.errors import HpcDetError, UsageError
from tests.checkpoint.saved import saved
from tests.facts import refused, unnamed


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return the folder that serves as the bucket."""
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
    """Return the empty checkpoint folder of the same trial on another machine."""
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
    manifest.write_text(json.dumps(CRC.sealed(told)))
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
    said = remote.in_words(ValueError("cannot read hush of me"))
    assert unnamed(said, "ValueError", "cannot read ******** of me") == []
    assert "hush" not in said


def test_a_store_that_nothing_here_reaches_is_told_with_what_to_install() -> None:
    with refused(UsageError, "checkpoint_storage: ", "abfs://c/1/1", "hpc_det[azure]"):
        Remote("abfs://c/1/1", {})


class Moody(Remote):
    """A store that refuses some calls."""

    refuses: tuple[str, ...] = ()

    def _may(self, call: str) -> None:
        if call in self.refuses:
            raise PermissionError(f"{call}: no, hush")

    def stored(self, *arguments, **named):  # type: ignore[no-untyped-def]
        self._may("stored")
        return super().stored(*arguments, **named)

    def upload(self, *arguments, **named):  # type: ignore[no-untyped-def]
        self._may("upload")
        return super().upload(*arguments, **named)

    def remove(self, *arguments, **named):  # type: ignore[no-untyped-def]
        self._may("remove")
        return super().remove(*arguments, **named)


@pytest.fixture
def remote(tmp_path: Path) -> Moody:
    return Moody(f"file://{tmp_path}/bucket", {"auto_mkdir": True, "secret": "hush"})


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    return folder


def steps_in(remote: Moody, here: Path) -> list[int]:
    return sorted(checkpoint.steps for checkpoint in Remote.stored(remote, here))


def lost(here: Path) -> None:
    shutil.rmtree(here)
    here.mkdir()


def test_the_newest_comes_back_after_a_loss_and_only_that(remote: Moody, here: Path) -> None:
    for steps in (5, 20, 10):
        saved(here, steps)
    Mirror(remote, here).update(committed(here), set())
    lost(here)
    found, skipped = Mirror(remote, here).newest_good()
    assert found is not None
    assert (found.steps, skipped) == (20, [])
    assert [checkpoint.steps for checkpoint in committed(here)] == [20]


def test_what_is_here_and_whole_is_not_fetched(remote: Moody, here: Path) -> None:
    mirror, own = Mirror(remote, here), saved(here, 5)
    mirror.update([own], set())
    shutil.rmtree(here.parent / "bucket" / own.uuid / "code")
    assert mirror.newest_good() == (own, [])


def test_a_damaged_one_here_comes_back_whole(remote: Moody, here: Path) -> None:
    own = saved(here, 5)
    Mirror(remote, here).update([own], set())
    (own.path / "state.pt").write_bytes(b"rubbish")
    found, (skipped,) = Mirror(remote, here).newest_good()
    assert found is not None
    assert found.damage() == []
    assert unnamed(skipped, own.uuid, "state.pt") == []


def test_a_damaged_one_there_is_named_and_the_next_is_taken(remote: Moody, here: Path) -> None:
    older, newer = saved(here, 5), saved(here, 9)
    Mirror(remote, here).update([newer, older], set())
    (here.parent / "bucket" / newer.uuid / "state.pt").write_bytes(b"rubbish")
    lost(here)
    found, (skipped,) = Mirror(remote, here).newest_good()
    assert found is not None
    assert found.steps == 5
    assert unnamed(skipped, newer.uuid, f"file://{here.parent}/bucket", "state.pt") == []


def test_a_damaged_one_there_is_set_aside_and_counts_no_more(remote: Moody, here: Path) -> None:
    older, newer = saved(here, 5), saved(here, 9)
    Mirror(remote, here).update([newer, older], set())
    (here.parent / "bucket" / newer.uuid / "state.pt").write_bytes(b"rubbish")
    lost(here)
    Mirror(remote, here).newest_good()
    assert steps_in(remote, here) == [5]
    assert (here.parent / "bucket" / newer.uuid / "state.pt").exists(), "it is kept"
    (aside,) = damaged_ones(here)
    assert (aside.uuid, aside.steps, aside.place) == (newer.uuid, 9, f"{remote.url}/{newer.uuid}")
    mirror = Mirror(remote, here)
    mirror.update([older], {newer.uuid})
    assert [found.steps for found in mirror.with_stored(committed(here))] == [5]


def test_a_download_that_was_torn_on_its_way_is_tried_again(
    remote: Moody, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = saved(here, 9)
    Mirror(remote, here).update([own], set())
    lost(here)
    answers = [["state.pt: 3 bytes"]]
    download = remote.download
    monkeypatch.setattr(remote, "download", lambda found: answers.pop() if answers else download(found))
    assert Mirror(remote, here).newest_good() == (own, [])
    assert (steps_in(remote, here), damaged_ones(here)) == ([9], [])


def test_what_is_not_kept_leaves_the_store(remote: Moody, here: Path) -> None:
    mirror, older, newer = Mirror(remote, here), saved(here, 5), saved(here, 9)
    mirror.update([older], set())
    mirror.update([newer], {older.uuid})
    assert steps_in(remote, here) == [9]


def test_what_is_in_the_store_only_is_known(remote: Moody, here: Path) -> None:
    Mirror(remote, here).update([saved(here, 9), saved(here, 5)], set())
    lost(here)
    mirror = Mirror(remote, here)
    mirror.newest_good()
    saved(here, 12)
    assert [checkpoint.steps for checkpoint in mirror.with_stored(committed(mirror._checkpoints))] == [12, 9, 5]


def test_a_refused_upload_is_said_and_made_up_for(
    remote: Moody, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror, first = Mirror(remote, here), saved(here, 5)
    remote.refuses = ("upload",)
    mirror.update([first], set())
    said = capsys.readouterr().out
    assert unnamed(said, "PermissionError: upload: no, ********", "5 batches", first.path) == []
    remote.refuses = ()
    mirror.update([saved(here, 9), first], set())
    assert steps_in(remote, here) == [5, 9]
    assert capsys.readouterr().out == ""


def test_nothing_leaves_a_store_that_takes_nothing(remote: Moody, here: Path) -> None:
    mirror, older = Mirror(remote, here), saved(here, 5)
    mirror.update([older], set())
    remote.refuses = ("upload",)
    mirror.update([saved(here, 9)], {older.uuid})
    assert steps_in(remote, here) == [5]


def test_nothing_leaves_a_store_that_nobody_has_judged(remote: Moody, here: Path) -> None:
    Mirror(remote, here).update([saved(here, 5)], set())
    lost(here)
    own, mirror, remote.refuses = saved(here, 7), Mirror(remote, here), ("stored",)
    mirror.newest_good()
    remote.refuses = ()
    mirror.update([own], set())
    assert steps_in(remote, here) == [5, 7]
    assert [checkpoint.steps for checkpoint in mirror.with_stored(committed(mirror._checkpoints))] == [7, 5]


def test_a_refused_removal_is_made_up_for(remote: Moody, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mirror, older = Mirror(remote, here), saved(here, 5)
    mirror.update([older], set())
    remote.refuses = ("remove",)
    newer = saved(here, 9)
    mirror.update([newer], {older.uuid})
    assert "PermissionError: remove" in capsys.readouterr().out
    remote.refuses = ()
    mirror.update([newer], {older.uuid})
    assert steps_in(remote, here) == [9]


def test_a_silent_store_stops_nobody_who_has_a_checkpoint(
    remote: Moody, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, remote.refuses = saved(here, 5), ("stored",)
    assert Mirror(remote, here).newest_good() == (own, [])
    said = capsys.readouterr().out
    assert unnamed(said, "warning", "checkpoint_storage: ", "PermissionError: stored: no, ********") == []


def test_nobody_begins_anew_because_a_store_is_silent(remote: Moody, here: Path) -> None:
    remote.refuses = ("stored",)
    with refused(HpcDetError, "checkpoint_storage: ", "PermissionError: stored: no, ********"):
        Mirror(remote, here).newest_good()


def test_what_its_owner_has_removed_files_of_is_not_fetched(remote: Moody, here: Path) -> None:
    own = saved(here, 9)
    Mirror(remote, here).update([own], set())
    remote.remove_files(replace(own, files={}, removed=tuple(own.files)), list(own.files))
    lost(here)
    found, skipped = Mirror(remote, here).newest_good()
    assert (found, len(skipped)) == (None, 1)
    assert unnamed(skipped[0], own.uuid, "`hpc-det checkpoint rm --glob`", *own.files) == []
