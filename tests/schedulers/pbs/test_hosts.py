"""Processes on the hosts of a job, and their environment; tests/launch/test_on_nodes.py starts real ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpc_det.schedulers.pbs.hosts import ORDERS, HostFolder, exports, of_no_machine, start_command, start_commands
from hpc_det.schedulers.pbs.on_host import host_environment
from tests.submit.hostile import VALUES


@pytest.mark.integration
@pytest.mark.parametrize("value", [*VALUES, "", "two\nlines", "a,b", "007", "\udcff"])
def test_a_value_arrives_as_it_is(value: str, tmp_path: Path) -> None:
    (tmp_path / "env").write_bytes(exports({"ODD": value}))
    said = subprocess.run(
        ["bash", "-c", '. "$1"; printf %s "$ODD"', "bash", tmp_path / "env"], stdout=subprocess.PIPE, env={}, check=True
    )
    assert said.stdout == value.encode(errors="surrogateescape")
    assert not (tmp_path / "X").exists()


@pytest.mark.parametrize(
    "name",
    [
        "PBS_JOBID",
        "NCPUS",
        "TMPDIR",
        "HOME",
        "SUBMITIT_EXECUTOR",
        "SUBMITIT_PBS_JOB_ID",
        "HPC_DET_SLOTS",
        "BASH_FUNC_ml%%",
        "a b",
    ],
)
def test_what_belongs_to_a_machine_or_a_job_stays_there(name: str) -> None:
    variables = {name: "x", "MINE": "1", "SUBMITIT_LOG_LEVEL": "INFO"}
    assert exports(of_no_machine(variables)) == b"export MINE=1\nexport SUBMITIT_LOG_LEVEL=INFO\n"


@pytest.mark.integration
@pytest.mark.parametrize("name", ["PBS_JOBID", "HOSTNAME", "CUDA_VISIBLE_DEVICES"])
def test_what_a_host_sets_itself_counts_there(name: str) -> None:
    said = ["sh", "-c", exports({name: "the job's"}).decode() + f'printf %s "${name}"']
    assert subprocess.check_output(said, env={}, text=True) == "the job's"
    assert subprocess.check_output(said, env={name: "the host's"}, text=True) == "the host's"


@pytest.mark.integration
@pytest.mark.parametrize("name", ["UID", "EUID", "PPID", "SHELLOPTS", "BASHOPTS"])
def test_what_the_shell_lets_nobody_set_ends_no_script(name: str) -> None:
    """On many systems /bin/sh is bash in POSIX mode, in which setting a read-only variable ends the script."""
    script = exports({name: "5", "ZEBRA": "set"}).decode() + "printf %s $ZEBRA"
    assert subprocess.check_output(["bash", "--posix", "-c", script], env={}, text=True) == "set"


LINES = ["n1", "n1", "n2", "n3"]


@pytest.mark.parametrize(
    ("starter", "words"),
    [
        ("pbsdsh", ["pbsdsh", "-n", "2", "--"]),
        ("pbs_tmrsh", ["pbs_tmrsh", "n2"]),
        ("mpiexec", ["mpiexec", "-n", "1", "-host", "n2"]),
    ],
)
def test_each_starter_runs_a_script_on_one_host(starter: str, words: list[str]) -> None:
    assert start_command(starter, LINES, "n2", 1, "/start") == [*words, "/bin/sh", "/start", "1"]


def test_mpiexec_is_told_of_the_hosts_where_others_share_the_job() -> None:
    ((ranks, command),) = start_commands("mpiexec", LINES, ["n2", "n3"], "/start")
    assert (ranks, command) == (range(2), ["mpiexec", "-n", "2", "-host", "n2,n3", "/bin/sh", "/start"])


@pytest.mark.parametrize(("visible", "gpus"), [(None, "2,3"), ("GPU-a,GPU-b,GPU-c,GPU-d", "GPU-c,GPU-d")])
def test_a_gang_that_shares_a_host_has_gpus_of_its_own(visible: str | None, gpus: str) -> None:
    env = {"HPC_DET_SLOTS": "2,3"} | ({"CUDA_VISIBLE_DEVICES": visible} if visible else {})
    assert host_environment("0", env)["CUDA_VISIBLE_DEVICES"] == gpus


@pytest.mark.integration
def test_orders_that_cannot_be_read_for_now_end_nothing(tmp_path: Path) -> None:
    """This happens while a file server is restarted."""
    (tmp_path / ORDERS).mkdir()
    on_host = [sys.executable, "-m", "hpc_det.schedulers.pbs.on_host", str(tmp_path), "3"]
    subprocess.run([*on_host, "sh", "-c", "sleep 0.1; exit 7"], check=True)
    assert HostFolder(tmp_path).exit_code(3) == 7


def test_functions_of_the_shell_are_no_variables() -> None:
    assert exports({"BASH_FUNC_module%%": "() { :; }", "A": "1"}) == b"export A=1\n"


def test_only_the_owner_reads_the_environment(tmp_path: Path) -> None:
    HostFolder.made(tmp_path / "nodes").write_script(["true"], {"TOKEN": "secret"})
    assert (tmp_path / "nodes").stat().st_mode & 0o777 == 0o700
