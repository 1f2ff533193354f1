from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hpc_det.submit.submitit_pbs.environment import write_environment
from tests.submit.hostile import VALUES


@pytest.mark.parametrize("value", [*VALUES, "", "two\nlines", "a,b", "007", "\udcff"])
def test_a_value_arrives_as_it_is(value: str, tmp_path: Path) -> None:
    write_environment(tmp_path / "env", {"ODD": value})
    said = subprocess.run(
        ["bash", "-c", '. "$1"; printf %s "$ODD"', "bash", tmp_path / "env"], stdout=subprocess.PIPE, env={}, check=True
    )
    assert said.stdout == value.encode(errors="surrogateescape")
    assert not (tmp_path / "X").exists()


@pytest.mark.parametrize(
    "name",
    ["PBS_JOBID", "NCPUS", "TMPDIR", "HOME", "SUBMITIT_EXECUTOR", "SUBMITIT_PBS_JOB_ID", "BASH_FUNC_ml%%", "a b"],
)
def test_what_belongs_to_a_machine_or_a_job_stays_there(name: str, tmp_path: Path) -> None:
    write_environment(tmp_path / "env", {name: "x", "MINE": "1", "SUBMITIT_LOG_LEVEL": "INFO"})
    assert (tmp_path / "env").read_text() == "export MINE=1\nexport SUBMITIT_LOG_LEVEL=INFO\n"


def test_nobody_else_reads_it(tmp_path: Path) -> None:
    write_environment(tmp_path / "env", {"TOKEN": "secret"})
    assert (tmp_path / "env").stat().st_mode & 0o777 == 0o600
