"""Checkpoints here and in a store: a folder stands for the bucket, and an object for its bad days."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_det.checkpoint.committed import committed
from hpc_det.checkpoint.damaged import damaged_ones
from hpc_det.checkpoint.mirror import Mirror
from hpc_det.checkpoint.remote import Remote
from hpc_det.errors import HpcDetError
from tests.checkpoint.saved import saved


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
    assert "is damaged: state.pt" in skipped


def test_a_damaged_one_there_is_named_and_the_next_is_taken(remote: Moody, here: Path) -> None:
    older, newer = saved(here, 5), saved(here, 9)
    Mirror(remote, here).update([newer, older], set())
    (here.parent / "bucket" / newer.uuid / "state.pt").write_bytes(b"rubbish")
    lost(here)
    found, (skipped,) = Mirror(remote, here).newest_good()
    assert found is not None
    assert found.steps == 5
    assert skipped.startswith(f"checkpoint {newer.uuid} in file://{here.parent}/bucket is damaged: state.pt: ")


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
    assert "PermissionError: upload: no, ********" in said
    assert f"the checkpoint at 5 batches is not uploaded; it is in {first.path}" in said
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
    assert "cannot be read: PermissionError: stored: no, ********; going on from the checkpoint here" in (
        capsys.readouterr().out
    )


def test_nobody_begins_anew_because_a_store_is_silent(remote: Moody, here: Path) -> None:
    remote.refuses = ("stored",)
    with pytest.raises(HpcDetError, match="no checkpoint is here to go on from instead"):
        Mirror(remote, here).newest_good()


def test_what_its_owner_has_removed_files_of_is_not_fetched(remote: Moody, here: Path) -> None:
    own = saved(here, 9)
    Mirror(remote, here).update([own], set())
    remote.remove_files(replace(own, files={}, removed=tuple(own.files)), list(own.files))
    lost(here)
    found, skipped = Mirror(remote, here).newest_good()
    assert (found, len(skipped)) == (None, 1)
    assert "lacks files that `hpc-det checkpoint rm --glob` removed: " in skipped[0]
