"""Hydra's own tests of a launcher (hydra.test_utils.launcher_common_tests), with jobs on this machine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.test_utils.launcher_common_tests import IntegrationTestSuite, LauncherTestSuite
from hydra.version import VersionBase, __compat_version__

from hydra_plugins.hpc_launcher.launchers import HpcSlurmConf


@pytest.fixture(autouse=True)
def version_base() -> Iterator[None]:
    """Set Hydra's default version base, which its tests expect: an app in the same process may have set another one."""
    held = VersionBase.instance()
    before = held.version_base
    held.setbase(__compat_version__)
    yield
    held.version_base = before


@pytest.mark.parametrize("name", ["HpcSlurmLauncher", "HpcPbsLauncher", "HpcLocalLauncher"])
def test_hydra_finds_the_launchers(name: str) -> None:
    assert name in [plugin.__name__ for plugin in Plugins.instance().discover(Launcher)]


@pytest.mark.integration
@pytest.mark.parametrize(("launcher_name", "overrides"), [("hpc_local", [])])
class TestLauncher(LauncherTestSuite):
    pass


@pytest.mark.long
@pytest.mark.parametrize(("task_launcher_cfg", "extra_flags"), [({}, ["-m", "hydra/launcher=hpc_local"])])
class TestApps(IntegrationTestSuite):
    pass


def test_the_page_about_sweeps_names_every_field_and_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "run-hydra-apps.md").read_text(encoding="utf-8")
    rows = {
        name: value
        for named, value in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (.+?) \|", page, re.MULTILINE)
        for name in re.findall(r"\w+", named)
    }
    shown = {name: value for name, value in rows.items() if value not in ("the cluster's", "the default's", "none")}
    conf = HpcSlurmConf()
    assert rows.keys() == vars(conf).keys() - {"_target_"}
    assert {name: yaml.safe_load(value.strip("`")) for name, value in shown.items()} == {
        name: getattr(conf, name) for name in shown
    }
