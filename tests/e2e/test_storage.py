"""Checkpoints in other places: in a folder of another file system, and in a stand-in for an object store."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_det.checkpoint.committed import committed, newest_steps
from hpc_det.store.metrics import read_reports
from tests.e2e.story import WAITS_AT, WARM, Story, hpc_det
from tests.facts import unnamed

pytestmark = pytest.mark.usefixtures("warm")

SECRET = "hush-5f1e"

S3FS = """
import os
from fsspec.implementations.local import LocalFileSystem

__version__ = "2024.3"


class S3FileSystem(LocalFileSystem):
    protocol = ("s3", "s3a")

    def __init__(self, secret=None, **options):
        super().__init__(auto_mkdir=True)
        if secret != "hush-5f1e":
            raise PermissionError("the key is wrong")

    @classmethod
    def _strip_protocol(cls, path):
        path = str(path).removeprefix("s3://").rstrip("/")
        return path if path.startswith("/") else f"{os.environ['BUCKETS']}/{path}"
"""


@pytest.fixture
def buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder with the buckets of a stand-in for the library s3fs."""
    library, folder = tmp_path / "library", tmp_path / "buckets"
    library.mkdir()
    folder.mkdir()
    (library / "s3fs.py").write_text(S3FS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(library), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("BUCKETS", str(folder))
    return folder


IN_S3 = f"checkpoint_storage={{type: s3, bucket: mine, secret_key: {SECRET}}}"


@pytest.fixture
def other_file_system(state_folder: Path) -> Iterator[Path]:
    """Return a folder on another file system than the state folder, if the machine has one."""
    places = (place for place in ("/dev/shm", tempfile.gettempdir()) if os.access(place, os.W_OK))
    here = state_folder.stat().st_dev
    folder = Path(tempfile.mkdtemp(dir=next((place for place in places if os.stat(place).st_dev != here), None)))
    yield folder
    shutil.rmtree(folder)


def test_a_trial_goes_on_from_a_folder_elsewhere(undisturbed_alone: Story, other_file_system: Path) -> None:
    elsewhere = f"checkpoint_storage={{type: shared_fs, host_path: {other_file_system}, storage_path: team}}"
    story = Story.begin(WARM, WAITS_AT.format(20), elsewhere, "max_restarts=1")
    story.until_batch(20)
    os.kill(story.rank_pid(0), signal.SIGKILL)
    story.wait()
    assert story.causes == ["failed", "finished"]
    assert story.same_as(undisturbed_alone)
    (experiment,) = (other_file_system / "team").iterdir()
    assert experiment.name.startswith(f"{story.number}-")
    assert story.trial.checkpoints.readlink() == experiment / "1"
    for folder in (experiment.parent, experiment, experiment / "1"):
        assert folder.stat().st_mode & 0o777 == 0o700
    there = "checkpoint_storage.storage_path"
    moved = hpc_det("experiment", "continue", story.number, "--config", f"{there}=new", check=False)
    assert moved.returncode == 2
    assert not unnamed(moved.stderr, f"--config {there}", f"experiment {story.number}")


@pytest.mark.long
def test_a_trial_that_lost_its_folder_goes_on_from_the_store(undisturbed_alone: Story, buckets: Path) -> None:
    story = Story.begin(WARM, WAITS_AT.format(20), IN_S3, "max_restarts=0")
    story.until_batch(20)
    story.until(lambda: any(newest_steps(stored) == 16 for stored in buckets.glob("mine/*/1")))
    os.kill(story.rank_pid(0), signal.SIGKILL)
    assert story.wait(check=False).returncode == 1
    shutil.rmtree(story.trial.checkpoints)
    hpc_det("experiment", "continue", story.number)
    story.wait()
    by_attempt = Counter(
        record["attempt"] for record in read_reports(story.trial.metrics) if record["kind"] == "training"
    )
    assert by_attempt == {1: 16, 2: 24}
    assert story.same_as(undisturbed_alone)
    (stored,) = buckets.glob("mine/*/1")
    assert {found.uuid for found in committed(stored)} == {found.uuid for found in committed(story.trial.checkpoints)}


def test_the_key_of_a_store_is_where_the_ranks_read_it_only(buckets: Path) -> None:
    story = Story.begin(WARM, IN_S3, "searcher.max_length.batches=2")
    story.wait()
    files = [path for path in story.trial.experiment().path.rglob("*") if path.is_file()]
    knowing = {path.name: path for path in files if SECRET.encode() in path.read_bytes()}
    assert knowing.keys() == {"effective.json", "trial.json"}
    assert [path.stat().st_mode & 0o777 for path in knowing.values()] == [0o600, 0o600]
    assert not [path for path in buckets.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


def test_a_store_that_takes_nothing_does_not_end_the_training(undisturbed_alone: Story, buckets: Path) -> None:
    (buckets / "mine").write_text("a file, where a folder is needed")
    story = Story.begin(WARM, IN_S3)
    story.wait()
    assert story.causes == ["finished"]
    log = story.trial.rank_log(1, 0).read_text()
    assert not unnamed(log, "40 batches", "uploaded")
    assert story.same_as(undisturbed_alone)
