from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_det.errors import UsageError
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.group import Group
from tests.facts import refused, unnamed

GROUP, OTHER = Group(4242), Group(4243)
is_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can join groups")


@pytest.fixture
def root(tmp_path: Path, no_leaks: None) -> Iterator[Path]:
    before = os.getgroups()
    os.setgroups([*before, GROUP.number, OTHER.number])
    yield tmp_path / "root"
    os.setgroups(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_group_is_named_by_its_name_or_number() -> None:
    own = Group(os.getegid())
    assert Group.of(own.name) == Group.of(str(own.number)) == own


def test_a_group_of_others_is_refused_with_those_that_there_are() -> None:
    name = Group(os.getegid()).name
    with refused(UsageError, "--shared=nobodys", name):
        Group.of("nobodys")


def test_a_primary_group_that_is_the_users_alone_is_no_group_to_share_with(monkeypatch: pytest.MonkeyPatch) -> None:
    primary = Group(os.getegid())
    named = type("Entry", (), {"pw_name": primary.name})
    monkeypatch.setattr(pwd, "getpwuid", lambda number: named)
    with refused(UsageError, "--shared", f"'{primary.name}'"):
        Group.of(None)
    monkeypatch.setattr(named, "pw_name", "somebody")
    assert Group.of(None) == primary


@is_root
def test_a_root_is_opened_no_further_than_needed(root: Path) -> None:
    folder = ExperimentStore(root).create(GROUP)
    assert [oct(mode(path)) for path in (root, root / "experiments", folder.path)] == ["0o710", "0o750", "0o2750"]
    assert {path.stat().st_gid for path in (root, root / "experiments", folder.path)} == {GROUP.number}
    assert (folder.shared_with(), ExperimentStore(root).create().shared_with()) == (GROUP, None)


@is_root
def test_what_the_closed_root_has_hidden_stays_hidden(root: Path, tmp_path: Path) -> None:
    root.mkdir(mode=0o700)
    (root / "conf").mkdir()
    (root / "conf").chmod(0o755)
    (root / "notes").touch()
    (root / "notes").chmod(0o644)
    (tmp_path / "elsewhere").touch()
    (tmp_path / "elsewhere").chmod(0o644)
    (root / "link").symlink_to(tmp_path / "elsewhere")
    ExperimentStore(root).create(GROUP)
    assert [mode(root / name) for name in ("conf", "notes", "link")] == [0o700, 0o600, 0o644]


@is_root
def test_a_root_is_for_one_group(root: Path) -> None:
    store = ExperimentStore(root)
    store.create(GROUP)
    with refused(UsageError, "--shared", root, f"'{GROUP.name}'", f"'{OTHER.name}'", "HPC_DET_ROOT"):
        store.create(OTHER)
    assert [path.name for path in (root / "experiments").iterdir()] == ["1"]


@is_root
def test_a_root_that_all_may_go_through_stays_as_it_is(root: Path) -> None:
    (root / "experiments").mkdir(parents=True)
    for folder in (root, root / "experiments"):
        folder.chmod(0o755)
    ExperimentStore(root).create(GROUP)
    assert [mode(root), mode(root / "experiments")] == [0o755, 0o755]


def test_folders_above_that_are_shut_are_named_with_what_opens_them(tmp_path: Path) -> None:
    (tmp_path / "home" / "root").mkdir(parents=True)
    (tmp_path / "home").chmod(0o700)
    remedy = f"`chmod o+x {tmp_path}/home`"
    (problem,) = (problem for problem in GROUP.obstacles(tmp_path / "home" / "root") if remedy in problem)
    assert unnamed(problem, "'4242'", tmp_path / "home" / "root", f"{tmp_path}/home", "0700") == []
    (tmp_path / "home").chmod(0o711)
    assert remedy not in " ".join(GROUP.obstacles(tmp_path / "home" / "root"))
