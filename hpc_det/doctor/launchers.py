"""What can start ranks, and what ranks need. Nothing is imported: torch alone would take seconds."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from hpc_det.doctor import Finding
from hpc_det.launch.mpi import vendor
from hpc_det.node.network import own_address
from hpc_det.schedulers.scheduler import CommandError, Run
from hpc_det.schedulers.site import Which

SUBJECT = "launchers"
RUNTIMES = ("apptainer", "podman")
OPTIONAL = {
    "mpi4py": "for hpc_det.launch.mpi: pip install 'hpc_det[mpi]'",
    "deepspeed": "for hpc_det.launch.deepspeed: pip install 'hpc_det[deepspeed]'",
    "horovod": "for hpc_det.launch.horovod: pip install horovod",
}
_MODULES = {"openmpi": "Open MPI", "mpich": "MPICH"}
"""The modules of mpi4py's wheel, one for each ABI."""

_finding = partial(Finding, SUBJECT)
_ok = partial(_finding, "ok")
_note = partial(_finding, "note")


class Mpirun(NamedTuple):
    path: str
    vendor: str | None
    """None: neither Open MPI nor MPICH."""
    said: str


def version_command(launcher: str, which: Which) -> tuple[str, str] | None:
    """Jobs look beside their Python first. None: there is no such command."""
    path = which(str(Path(sys.executable).with_name(launcher))) or which(launcher)
    return (path, "--version") if path else None


def findings(mpi_launchers: Iterable[str], ask: Run, which: Which) -> Iterator[Finding]:
    yield _torch()
    for launcher in mpi_launchers:
        yield from _mpi(launcher, ask, which)
    yield from (_package(name, remedy) for name, remedy in OPTIONAL.items())
    found = [runtime for runtime in RUNTIMES if which(runtime)]
    if found:
        yield _ok(f"containers: {', '.join(found)}")
    else:
        yield _note(f"no {' or '.join(RUNTIMES)} on PATH", "experiments that name an image need one, or Slurm's pyxis")
    yield _network()


def _version(package: str) -> str | None:
    """None: not there. The package itself is looked for, too: metadata may outlive it."""
    try:
        return version(package) if find_spec(package) else None
    except (PackageNotFoundError, ValueError):
        return "of an unknown version"


def _torch() -> Finding:
    found = _version("torch")
    if found is None:
        return _finding("problem", f"torch is not there for {sys.executable}", "pip install hpc_det, with all it needs")
    return _ok(f"torch {found}: hpc_det.launch.direct and torch_distributed")


def _package(name: str, remedy: str) -> Finding:
    found = _version(name)
    return _ok(f"{name} {found}") if found else _note(f"no {name}", f"if you want it {remedy}")


def _mpi(launcher: str, ask: Run, which: Which) -> Iterator[Finding]:
    command = version_command(launcher, which)
    if command is None:
        yield _note(
            f"no {launcher} on PATH",
            "if you want MPI ranks: name the site's MPI in `modules` of the profile, or pip install "
            "'hpc_det[mpi,mpi-runtime]'",
        )
        return
    if Path(launcher).name == "srun":
        yield _ok(f"MPI ranks are started by {command[0]}")
        return
    try:
        mpirun = parse_version(command[0], ask(command))
    except CommandError as error:
        yield _note(f"{launcher} does not tell its version: {error}", "load the MPI that it belongs to")
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
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["nothing"]
    said = next((" ".join(line.split()) for line in lines if line.startswith("Version:")), lines[0])
    return Mpirun(path, vendor(output), said)


def _fits(mpirun: Mpirun) -> Iterator[Finding]:
    """Whether ranks find each other: a library that is not mpirun's never hears of the others."""
    spec = find_spec("mpi4py")
    if spec is None:
        return
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if (takes := vendors([file.name for folder in folders for file in folder.glob("MPI.*.so")])) is None:
        yield _note(
            "mpi4py was built for one MPI, and does not tell which",
            "python -c 'from mpi4py import MPI; print(MPI.Get_library_version())'",
        )
    elif mpirun.vendor in takes:
        yield _ok(f"mpi4py is a wheel for {' and '.join(sorted(takes))}: it takes the library of {mpirun.path}")
    else:
        yield _note(
            f"mpi4py is for {' and '.join(sorted(takes))}: each MPI rank would be a world of one",
            f"if you want MPI ranks: install an mpi4py for {mpirun.vendor}, such as its wheel",
        )


def vendors(modules: Iterable[str]) -> set[str] | None:
    """Whose libraries mpi4py's extension modules take, such as MPI.mpich.cpython-311-x86_64-linux-gnu.so."""
    return {whose for abi, whose in _MODULES.items() for name in modules if name.split(".")[1] == abi} or None


def _network() -> Finding:
    names = [name for _, name in socket.if_nameindex() if name != "lo"]
    address, interface = own_address(nodes=2, wanted=None)
    message = (
        f"nodes would meet at addresses like {address}; interfaces here: {', '.join(names) or 'none but loopback'}"
    )
    if address.startswith("127."):
        return _note(message, "if compute nodes are the same, set dtrain_network_interface in the profile")
    if interface:
        return _ok(f"{message}; gloo is told of {interface}, since the host's name leads to loopback")
    return _ok(message)
