"""The labs on a machine that has a scheduler already: its commands, configuration and variables have no effect."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.labs.isolation import forget_other_schedulers, path_with_only
from tests.labs.pbs_lab import PbsLab
from tests.labs.test_pbs_jobs import output

PROFILE = "export PATH={folder}:$PATH PBS_CONF_FILE=/etc/other.conf PBS_EXEC={folder} LMOD=1\n"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Return a folder with another site's commands, which fail, and with one command that no scheduler has."""
    folder = tmp_path / "other"
    folder.mkdir()
    for name in ("qstat", "pbsdsh", "sinfo", "tool"):
        (folder / name).write_text("#!/bin/sh\nexit 42\n")
        (folder / name).chmod(0o755)
    return folder


def test_a_path_has_the_commands_of_one_scheduler_and_all_others_of_the_machine(other: Path, tmp_path: Path) -> None:
    own = tmp_path / "bin"
    path = path_with_only(own, f"{other}{os.pathsep}/bin", tmp_path / "links")
    assert path.startswith(f"{own}{os.pathsep}")
    assert [shutil.which(name, path=path) for name in ("qstat", "pbsdsh", "sinfo")] == [None] * 3
    assert shutil.which("tool", path=path)
    assert shutil.which("sh", path=path)
    assert path_with_only(own, path, tmp_path / "links") == path


def test_variables_of_other_schedulers_and_launchers_are_forgotten() -> None:
    kept = {"PATH": "/bin", "HPC_DET_LAB": "/lab", "HOME": "/root", "PIP_CERT": "x"}
    others = {"SLURM_CONF": "x", "SBATCH_PARTITION": "x", "PBS_CONF_FILE": "x", "HPC_DET_ROOT": "x", "RANK": "1"}
    env = kept | others | {"XDG_CONFIG_HOME": "x"}
    forget_other_schedulers(env, keep_pbs=False)
    assert env == kept


def test_a_login_shell_of_the_stand_in_undoes_what_the_machines_profile_sets(
    pbs_lab: PbsLab, other: Path, tmp_path: Path
) -> None:
    """/etc/profile is the machine's: a login shell that has read one with a PBS in it then reads the stand-in's
    profile.
    """
    script = PROFILE.format(folder=other) + f'. "{pbs_lab.home}/.bash_profile"\ncommand -v pbsdsh; env'
    given = {"HOME": str(pbs_lab.home), "PATH": "/bin:/usr/bin", "PBS_JOBID": "7.pbshead"}
    done = subprocess.run(["bash", "-c", script], env=given, capture_output=True, text=True, check=True)
    found, *variables = done.stdout.splitlines()
    assert found == str(pbs_lab.site.bin / "pbsdsh")
    assert "PBS_JOBID=7.pbshead" in variables
    assert not {name for line in variables if (name := line.partition("=")[0]) in ("PBS_CONF_FILE", "PBS_EXEC", "LMOD")}


def test_a_job_of_the_stand_in_finds_its_own_commands(pbs_lab: PbsLab) -> None:
    job = pbs_lab.submit("-j", "oe", "-o", "out", script="command -v pbsdsh qstat\n")
    assert output(pbs_lab, job).splitlines() == [str(pbs_lab.site.bin / name) for name in ("pbsdsh", "qstat")]
