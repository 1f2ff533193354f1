"""The MPIs that tests use: MPICH from PyPI, next to this Python, and Open MPI from Debian."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MPICH = str(Path(sys.executable).with_name("mpiexec.hydra"))


@functools.cache
def open_mpi() -> str:
    """Return the command, installed if needed and possible, as the Slurm lab does; otherwise skip the test."""
    if not shutil.which("mpirun.openmpi"):
        if os.geteuid() != 0 or not Path("/etc/debian_version").exists():
            pytest.skip("mpirun.openmpi is missing, and installing it needs root on Debian")
        quietly = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for words in ("update -q", "install -qy --no-install-recommends openmpi-bin"):
            subprocess.run(["apt-get", *words.split()], env=quietly, check=True, stdout=subprocess.DEVNULL)
    return "mpirun.openmpi"


def mpirun(vendor: str) -> str:
    return MPICH if vendor == "mpich" else open_mpi()
