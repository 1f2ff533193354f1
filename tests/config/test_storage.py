from __future__ import annotations

from collections.abc import Callable

import pytest

from hpc_det.config.storage import S3, Azure, Directory, Gcs, OwnFolder, StorageKind, is_below, store_url
from hpc_det.plan.effective import Effective
from tests.facts import each_names

Build = Callable[..., Effective]
Problems = Callable[..., list[str]]


@pytest.mark.parametrize(
    ("storage", "url"),
    [
        (S3(type="s3", bucket="b", prefix="/a/b/"), "s3://b/a/b"),
        (S3(type="s3", bucket="b"), "s3://b"),
        (Gcs(type="gcs", bucket="b", prefix="p"), "gs://b/p"),
        (Azure(type="azure", container="c", connection_string="s"), "az://c"),
        (Directory(type="directory", container_path="/c"), None),
        (OwnFolder(), None),
    ],
)
def test_a_store_has_a_url(storage: StorageKind, url: str | None) -> None:
    assert store_url(storage) == url


@pytest.mark.parametrize("prefix", ["..", "../p", "a/../p", "a/.."])
@pytest.mark.parametrize("kind", ["s3", "gcs"])
def test_a_prefix_with_a_parent_folder_is_refused_as_in_determined(problems: Problems, kind: str, prefix: str) -> None:
    storage = {"type": kind, "bucket": "b", "prefix": prefix}
    each_names(problems(checkpoint_storage=storage), ["checkpoint_storage.prefix", repr(prefix)])


@pytest.mark.parametrize("prefix", ["this/./prefix", "this/.../a/", "..a/b"])
def test_a_prefix_with_other_dots_is_accepted(build: Build, prefix: str) -> None:
    build(checkpoint_storage={"type": "s3", "bucket": "b", "prefix": prefix})


@pytest.mark.parametrize(
    ("path", "below"), [("a", True), ("/s", True), ("/s/a", True), ("/t", False), ("../s/a", False), ("/sa", False)]
)
def test_a_path_is_below_by_its_name(path: str, below: bool) -> None:
    assert is_below(path, "/s") is below
