from __future__ import annotations

from pathlib import Path

import pytest

from hpc_det.config.storage import Directory, OwnFolder, SharedFs, is_below, storage_folder


@pytest.mark.parametrize(
    ("storage_path", "folder"), [(None, "/shared"), ("team/a", "/shared/team/a"), ("/shared/b", "/shared/b")]
)
def test_a_shared_folder_is_a_path_of_the_host(storage_path: str | None, folder: str) -> None:
    storage = SharedFs(type="shared_fs", host_path="/shared", storage_path=storage_path)
    assert storage_folder(storage) == Path(folder)


def test_a_directory_is_a_path_as_the_ranks_see_it() -> None:
    assert storage_folder(Directory(type="directory", container_path="/c")) == Path("/c")


def test_without_a_type_the_trials_keep_their_own() -> None:
    assert storage_folder(OwnFolder()) is None


@pytest.mark.parametrize(
    ("path", "below"), [("a", True), ("/s", True), ("/s/a", True), ("/t", False), ("../s/a", False), ("/sa", False)]
)
def test_a_path_is_below_by_its_name(path: str, below: bool) -> None:
    assert is_below(path, "/s") is below
