"""hpc-det install-det: `det` as the second name of the command."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import Command
from tests.facts import unnamed


@pytest.mark.integration
def test_det_is_hpc_det_under_its_name(hpc_det: Command, tmp_path: Path) -> None:
    script = tmp_path / "bin" / "det"
    assert hpc_det("install-det", "--folder", script.parent).succeeds(script)
    listed = subprocess.check_output([script, "e", "ls"], text=True)
    assert listed.startswith("ID  NAME")
    assert subprocess.check_output([script, "--help"], text=True).startswith("Usage: det ")
    assert "_DET_COMPLETE=" in subprocess.check_output([script, "completion", "bash"], text=True)


def test_it_is_installed_again_and_removed(hpc_det: Command, tmp_path: Path) -> None:
    script = tmp_path / "det"
    for _ in range(2):
        assert hpc_det("install-det", "--folder", tmp_path).code == 0
    assert hpc_det("install-det", "--folder", tmp_path, "--remove").succeeds(script)
    assert not script.exists()
    answer = hpc_det("install-det", "--folder", tmp_path, "--remove")
    assert answer.fails(2, script, "--folder")


def test_determineds_own_det_stays(hpc_det: Command, tmp_path: Path) -> None:
    script = tmp_path / "det"
    script.write_text("#!/bin/sh\n")
    for flags in ((), ("--remove",)):
        answer = hpc_det("install-det", "--folder", tmp_path, *flags)
        assert answer.code == 2
        assert not unnamed(answer.err, "another program")
    assert script.read_text() == "#!/bin/sh\n"
