"""Findings about the commands and packages that start ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpc_det.doctor import Finding, launchers
from hpc_det.doctor.launchers import findings, parse_version, vendors
from tests.doctor.sites import on_path, one

OPEN_MPI = "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n"
HYDRA = "HYDRA build details:\n    Version:                                 5.0.2\n    CC:   gcc\n"
INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 20231005\n"


def told_of(*commands: str, said: str = "", launcher: str = "mpirun") -> list[Finding]:
    return list(findings([launcher], lambda command: said, on_path(*commands)))


def package(folder: Path, name: str, *modules: str) -> None:
    (folder / name).mkdir()
    for module in ("__init__.py", *modules):
        (folder / name / module).touch()


@pytest.mark.parametrize(
    ("said", "vendor", "version"),
    [
        (OPEN_MPI, "Open MPI", "mpirun (Open MPI) 4.1.4"),
        (HYDRA, "MPICH", "Version: 5.0.2"),
        (INTEL, None, INTEL.strip()),
        ("", None, "nothing"),
    ],
)
def test_whose_mpirun_it_is(said: str, vendor: str | None, version: str) -> None:
    assert parse_version("/bin/mpirun", said) == ("/bin/mpirun", vendor, version)


@pytest.mark.parametrize(
    ("modules", "found"),
    [
        (["MPI.mpich.cpython-311-x86_64-linux-gnu.so", "MPI.openmpi.cpython-311-x86_64-linux-gnu.so"], 2),
        (["MPI.mpich.abi3.so"], 1),
        (["MPI.cpython-311-x86_64-linux-gnu.so"], None),
        ([], None),
    ],
)
def test_whose_library_mpi4py_takes(modules: list[str], found: int | None) -> None:
    takes = vendors(modules)
    assert (takes and len(takes)) == found


@pytest.mark.parametrize(
    ("modules", "said", "verdict", "facts"),
    [
        (("MPI.mpich.abi3.so", "MPI.openmpi.abi3.so"), OPEN_MPI, "ok", ["mpi4py", "/usr/bin/mpirun"]),
        (("MPI.mpich.abi3.so",), OPEN_MPI, "note", ["mpi4py", "MPICH"]),
        (("MPI.abi3.so",), HYDRA, "note", ["mpi4py", "one MPI"]),
    ],
)
def test_whether_mpi4py_fits_mpirun(
    modules: tuple[str, ...], said: str, verdict: str, facts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, "mpi4py", *modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = one(told_of("mpirun", said=said), *facts)
    assert (found.verdict, bool(found.remedy)) == (verdict, verdict != "ok")
    assert "mpi4py" not in sys.modules


def test_an_mpirun_of_a_stranger() -> None:
    assert "mpi_launcher" in one(told_of("mpirun", said=INTEL), "Open MPI", "MPICH").remedy


def test_what_is_missing_says_how_to_get_it() -> None:
    found = told_of()
    assert "hpc_det[mpi,mpich]" in one(found, "mpirun").remedy
    assert "environment" not in one(found, "apptainer").message
    for finding in found:
        assert finding.remedy or finding.verdict == "ok"


def test_srun_as_launcher_of_mpi_is_asked_nothing() -> None:
    assert one(told_of("srun", launcher="srun"), "/usr/bin/srun").verdict == "ok"


def test_torch_is_looked_up_and_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert one(told_of(), "torch_distributed").verdict == "ok"
    monkeypatch.setattr(launchers, "find_spec", lambda name: None)
    assert one(told_of(), "torch").verdict == "problem"


@pytest.mark.parametrize(("address", "verdict"), [("127.0.1.1", "note"), ("10.0.0.7", "ok")])
def test_the_address_under_which_nodes_meet(address: str, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "own_address", lambda nodes, wanted: (address, None))
    assert one(told_of(), address).verdict == verdict
