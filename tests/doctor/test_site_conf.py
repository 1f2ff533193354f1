"""Findings about the site's configuration."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from hpc_det.doctor.examination import examine
from hpc_det.doctor.site_conf import findings
from hpc_det.schedulers.scheduler import CommandError
from tests.cli.users import SHARED_GROUP
from tests.facts import unnamed

ME = pwd.getpwuid(os.geteuid()).pw_name


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a folder of the site with a profile."""
    folder = tmp_path / "site"
    (folder / "cluster").mkdir(parents=True)
    (folder / "cluster" / "aurora.yaml").write_text("name: aurora\n")
    (folder / "site.yaml").write_text("default_cluster: aurora\n")
    return folder


def env_of(site: Path) -> dict[str, str]:
    return {"HPC_DET_SITE_CONF": str(site), "HPC_DET_ROOT": str(site.parent / "root"), "PATH": ""}


def test_without_a_site_there_is_nothing_to_find() -> None:
    assert list(findings({})) == []


def test_who_can_change_it_is_named(site: Path) -> None:
    (found,) = findings(env_of(site))
    assert found.verdict == "ok"
    assert unnamed(found.message, site, ME) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another group")
def test_a_group_that_can_change_it_is_named(site: Path) -> None:
    file = site / "cluster" / "aurora.yaml"
    file.chmod(0o664)
    os.chown(file, -1, SHARED_GROUP)
    (found,) = findings(env_of(site))
    assert found.verdict == "note"
    assert unnamed(found.message, site, ME, SHARED_GROUP) == []
    assert unnamed(found.remedy, f"chmod -R g-w {site}") == []


def test_each_file_that_every_user_can_change_is_a_problem(site: Path) -> None:
    files = [site / "cluster" / "aurora.yaml", site / "cluster" / "dawn.yaml"]
    for file in files:
        file.write_text("name: x\n")
        file.chmod(0o666)
    found = list(findings(env_of(site)))
    assert [each.verdict for each in found] == ["problem"] * 2
    assert [unnamed(each.message, file) for each, file in zip(found, files, strict=True)] == [[], []]


def test_each_file_that_only_its_owner_can_read_is_a_problem(site: Path) -> None:
    file = site / "cluster" / "aurora.yaml"
    file.chmod(0o600)
    problem, _writers = findings(env_of(site))
    assert problem.verdict == "problem"
    assert unnamed(problem.message, file, "0600", ME) == []
    assert unnamed(problem.remedy, f"chmod a+rX {file}") == []


@pytest.mark.integration
def test_a_mistake_in_its_settings_is_found_once(site: Path) -> None:
    (site / "site.yaml").write_text("default_clutser: aurora\n")

    def refuse(command: object) -> str:
        raise CommandError(f"{command}: not found")

    found = list(examine(None, env_of(site), refuse, lambda _command: None))
    assert len([each for each in found if "default_clutser" in each.message]) == 1
