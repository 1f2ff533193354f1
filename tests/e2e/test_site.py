"""A site's one installation and configuration on a real Slurm, used by two ordinary users of this machine."""

from __future__ import annotations

import json
import os
import pwd
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.story import HERE
from tests.e2e.test_slurm import PROFILE
from tests.labs.slurm import SCRIPTS, SlurmLab, reached_paths
from tests.wait import DEADLINE_S

pytestmark = pytest.mark.slurm

NAMES = ("nobody", "_apt")
"""Two users without permissions, whose primary group is the same on every Debian."""
CREATE = (HERE / "story.yaml", HERE / "trial", "--config", "searcher.max_length={batches: 5}")
ONE_SLOT = ("--config", "entrypoint=model_def:StoryTrial", "--config", "resources.slots_per_trial=1")


@dataclass(frozen=True)
class SiteUser:
    """A user who has only what the site gives to all: PATH and HPC_DET_SITE_CONF."""

    name: str
    env: dict[str, str]

    def run(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run hpc-det as this user. The installation belongs to root."""
        entry = pwd.getpwnam(self.name)
        become = ["setpriv", f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--init-groups", "--"]
        reach = ["unshare", "--mount", str(SCRIPTS / "with-paths"), *map(str, reached_paths()), "--"]
        command = [*reach, *become, sys.executable, "-m", "hpc_det", *map(str, arguments)]
        return subprocess.run(command, env=self.env, cwd="/", capture_output=True, text=True, timeout=DEADLINE_S)

    def succeeds(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        done = self.run(*arguments)
        assert done.returncode == 0, f"{self.name}: {arguments}\n{done.stdout}{done.stderr}"
        return done

    def refused(self, *arguments: object) -> str:
        done = self.run(*arguments)
        assert done.returncode in (1, 2), f"{self.name}: {arguments}\n{done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr
        return done.stderr

    def trains(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Create an experiment without a named cluster, and wait for its end; return what `create` printed."""
        created = self.succeeds("experiment", "create", *CREATE, *ONE_SLOT, *options)
        self.succeeds("experiment", "wait", created.stdout.split()[-1])
        return created


@pytest.fixture
def users(slurm_lab: SlurmLab) -> tuple[SiteUser, ...]:
    """Return two users of a site whose site.yaml names the default profile and a root for each of them."""
    if os.geteuid() != 0:
        pytest.skip("only root can run commands as two other users")
    site = slurm_lab.folder()
    site.chmod(0o755)
    (site / "conf" / "cluster").mkdir(parents=True)
    (site / "conf" / "cluster" / "lab.yaml").write_text(PROFILE)
    (site / "conf" / "cluster" / "other.yaml").write_text(PROFILE)
    (site / "conf" / "site.yaml").write_text(f"default_cluster: lab\nroot: {site}/scratch/$USER/hpc_det\n")
    return tuple(_user(name, site, slurm_lab) for name in NAMES)


def _user(name: str, site: Path, lab: SlurmLab) -> SiteUser:
    entry = pwd.getpwnam(name)
    for folder, mode in ((site / "home" / name, 0o700), (site / "scratch" / name, 0o711)):
        folder.mkdir(parents=True)
        os.chown(folder, entry.pw_uid, entry.pw_gid)
        folder.chmod(mode)
    given = {"HOME": str(site / "home" / name), "USER": name, "HPC_DET_SITE_CONF": str(site / "conf")}
    return SiteUser(name, {**lab.env, **given, "OMP_NUM_THREADS": "1"})


def described(user: SiteUser, experiment: str) -> Any:
    return json.loads(user.succeeds("experiment", "describe", experiment, "--json").stdout)


def test_two_users_train_with_one_installation_and_see_only_what_is_shared(
    users: tuple[SiteUser, SiteUser], slurm_lab: SlurmLab
) -> None:
    nobody, apt = users
    scratch = Path(nobody.env["HPC_DET_SITE_CONF"]).parent / "scratch"
    for user in users:
        created = user.trains()
        assert "cluster: lab" in created.stderr
        assert "site.yaml" in created.stderr
        assert created.stdout.split()[-1] == "1"  # each has a root, and so numbers, of their own
        root = scratch / user.name / "hpc_det"
        assert stat.S_IMODE(root.stat().st_mode) == 0o700
        assert root.stat().st_uid == pwd.getpwnam(user.name).pw_uid
        assert not list((scratch.parent / "home" / user.name).iterdir())

    # private
    for command in ("describe", "logs", "fork"):
        assert "_apt" in nobody.refused("experiment", command, "_apt:1")

    # shared with the group of both
    created = apt.trains("--shared")
    assert created.stdout.split()[-1] == "2"
    assert described(nobody, "_apt:2")["state"] == "COMPLETED"
    assert nobody.succeeds("experiment", "logs", "_apt:2").stdout
    assert [
        row["id"] for row in json.loads(nobody.succeeds("experiment", "list", "--of", "_apt", "--json").stdout)
    ] == [2]
    nobody.refused("experiment", "describe", "_apt:1")
    nobody.refused("experiment", "delete", "_apt:2", "--yes")
    assert described(apt, "2")["state"] == "COMPLETED"
