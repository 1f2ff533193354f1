"""Checks of launchers, and of the packages and the network that ranks need.

Packages are found without importing them, because importing torch alone would take seconds.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from hpc_det.config.cluster_choice import Which
from hpc_det.doctor import Finding
from hpc_det.errors import pip_install
from hpc_det.launch.mpi import vendor
from hpc_det.node.network import own_address
from hpc_det.schedulers.scheduler import CommandError, Run

SUBJECT = "launchers"
RUNTIMES = ("apptainer", "podman")
"""Container runtimes that are commands. pyxis is a plugin of srun, and is checked in slurm.py."""
# Packages that only some users need: what needs them, and what to install.
OPTIONAL = {
    "mpi4py": ("hpc_det.launch.mpi", "hpc_det[mpi]"),
    "deepspeed": ("hpc_det.launch.deepspeed", "hpc_det[deepspeed]"),
    "horovod": ("hpc_det.launch.horovod", "horovod"),
}
_MODULES = {"openmpi": "Open MPI", "mpich": "MPICH"}
"""ABI, as in the file names of the extension modules in mpi4py's wheel -> name of the MPI."""

_finding = partial(Finding, SUBJECT)
_ok = partial(_finding, "ok")
_note = partial(_finding, "note")


class Mpirun(NamedTuple):
    """An MPI launcher."""

    path: str
    vendor: str | None
    """None: neither Open MPI nor MPICH."""
    said: str
    """The line of its output with the version."""


def version_command(launcher: str, which: Which) -> tuple[str, str] | None:
    """Return the command that prints the version of a launcher; None: the launcher was not found."""
    # beside Python first, as in jobs
    path = which(str(Path(sys.executable).with_name(launcher))) or which(launcher)
    return (path, "--version") if path else None


def findings(mpi_launchers: Iterable[str], ask: Run, which: Which) -> Iterator[Finding]:
    """Yield the findings for torch, MPI launchers, optional packages, container runtimes and the network."""
    yield _torch()
    for launcher in mpi_launchers:
        yield from _mpi(launcher, ask, which)
    yield from (_package(name, *needed) for name, needed in OPTIONAL.items())
    found = [runtime for runtime in RUNTIMES if which(runtime)]
    if found:
        yield _ok(f"containers: {', '.join(found)}")
    else:
        yield _note(f"no {' or '.join(RUNTIMES)} on PATH", "experiments that name an image need one, or Slurm's pyxis")
    yield _network()


def _version(package: str) -> str | None:
    """Return the version of an installed package, or None if it is not installed."""
    try:
        # find_spec, because the metadata may remain after the package was deleted
        return version(package) if find_spec(package) else None
    except (PackageNotFoundError, ValueError):
        return "(unknown version)"


def _torch() -> Finding:
    found = _version("torch")
    if found is None:
        return _finding("problem", f"torch is not installed for {sys.executable}", f"run {pip_install('torch')}")
    return _ok(f"torch {found}: hpc_det.launch.direct and torch_distributed")


def _package(name: str, user: str, requirement: str) -> Finding:
    found = _version(name)
    return _ok(f"{name} {found}") if found else _note(f"no {name}", f"if you want {user}: {pip_install(requirement)}")


def _mpi(launcher: str, ask: Run, which: Which) -> Iterator[Finding]:
    command = version_command(launcher, which)
    if command is None:
        yield _note(
            f"no {launcher} on PATH",
            f"if you want MPI ranks: name the site's MPI in `modules` of the profile, or run "
            f"{pip_install('hpc_det[mpi,mpich]')}",
        )
        return
    if Path(launcher).name == "srun":  # its MPI plugins are checked in slurm.py
        yield _ok(f"MPI ranks are started by {command[0]}")
        return
    try:
        mpirun = parse_version(command[0], ask(command))
    except CommandError as error:
        yield _note(f"getting the version of {launcher} failed: {error}", "load the MPI that it belongs to")
        return
    if mpirun.vendor is None:
        yield _note(
            f"{mpirun.path} is neither Open MPI's nor MPICH's: {mpirun.said}",
            "name one of these as mpi_launcher in the profile, or srun with its --mpi flag",
        )
        return
    yield _ok(f"{mpirun.path}: {mpirun.vendor} ({mpirun.said})")
    yield from _fits(mpirun)


def parse_version(path: str, output: str) -> Mpirun:
    """Return the launcher `path`, given the output of its `--version`."""
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["nothing"]
    # MPICH prints a line "Version:", Open MPI has the version in the first line
    said = next((" ".join(line.split()) for line in lines if line.startswith("Version:")), lines[0])
    return Mpirun(path, vendor(output), said)


def _fits(mpirun: Mpirun) -> Iterator[Finding]:
    """Yield a finding on whether mpi4py uses the MPI library of mpirun, without which ranks do not find each other."""
    spec = find_spec("mpi4py")
    if spec is None:
        return
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if (takes := vendors([file.name for folder in folders for file in folder.glob("MPI.*.so")])) is None:
        yield _note(
            "mpi4py was built for one MPI, but its files do not show for which",
            "python -c 'from mpi4py import MPI; print(MPI.Get_library_version())'",
        )
    elif mpirun.vendor in takes:
        yield _ok(f"mpi4py is a wheel for {' and '.join(sorted(takes))}: it uses the library of {mpirun.path}")
    else:
        yield _note(
            f"mpi4py is for {' and '.join(sorted(takes))}: each MPI rank would have a world size of 1",
            f"if you want MPI ranks: install an mpi4py for {mpirun.vendor}, such as its wheel",
        )


def vendors(modules: Iterable[str]) -> set[str] | None:
    """Return the MPIs whose libraries mpi4py can use, given its extension modules; None: not known.

    An example of a module is MPI.mpich.cpython-311-x86_64-linux-gnu.so.
    """
    return {whose for abi, whose in _MODULES.items() for name in modules if name.split(".")[1] == abi} or None


def _network() -> Finding:
    names = [name for _, name in socket.if_nameindex() if name != "lo"]
    address, interface = own_address(nodes=2, wanted=None)
    message = f"nodes would connect to addresses like {address}; interfaces: {', '.join(names) or 'none but loopback'}"
    if address.startswith("127."):
        return _note(message, "if compute nodes are the same, set dtrain_network_interface in the profile")
    if interface:
        return _ok(f"{message}; gloo uses {interface}, since the host name resolves to a loopback address")
    return _ok(message)
