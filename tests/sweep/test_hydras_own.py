"""Hydra's own tests of a launcher (hydra.test_utils.launcher_common_tests), with jobs on this machine."""

from __future__ import annotations

import pytest
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.test_utils.launcher_common_tests import IntegrationTestSuite, LauncherTestSuite


@pytest.mark.parametrize("name", ["HpcSlurmLauncher", "HpcPbsLauncher", "HpcLocalLauncher"])
def test_hydra_finds_the_launchers(name: str) -> None:
    assert name in [plugin.__name__ for plugin in Plugins.instance().discover(Launcher)]


@pytest.mark.parametrize(("launcher_name", "overrides"), [("hpc_local", [])])
class TestLauncher(LauncherTestSuite):
    pass


@pytest.mark.parametrize(("task_launcher_cfg", "extra_flags"), [({}, ["-m", "hydra/launcher=hpc_local"])])
class TestApps(IntegrationTestSuite):
    pass
