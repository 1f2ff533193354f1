"""hpc-det doctor, with executables that give recorded or bad answers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from hpc_det.doctor import examination, launchers
from hpc_det.node import mounts
from hpc_det.schedulers.scheduler import run_command
from tests.cli.conftest import Command
from tests.facts import each_names, unnamed
from tests.labs.pbs_lab import PbsLab
from tests.schedulers.recorded_sites import HERE
from tests.wait import DEADLINE_S

pytestmark = pytest.mark.integration

Make = Callable[[str, str], None]
SLURM = {
    "sinfo": f"/bin/cat {HERE}/slurm-22.05/sinfo.txt",
    "scontrol": f"[ $2 = config ] && f=config || f=partitions; /bin/cat {HERE}/slurm-22.05/$f.txt",
    "srun": "echo pmix",
    "sbatch": "[ $1 = --test-only ]",
    "squeue": "",
    "scancel": "",
}
PBS = {
    "pbsnodes": f"/bin/cat {HERE}/pbs-23.06/nodes.json",
    "qmgr": f"/bin/cat {HERE}/pbs-23.06/sched.txt",
    "qstat": f"""case $1 in
--version) echo pbs_version = 23.06.06;;
-Q) /bin/cat {HERE}/pbs-23.06/queues.json;;
*) /bin/cat {HERE}/pbs-23.06/server.json;;
esac""",
    **dict.fromkeys(("qsub", "qdel", "qalter", "qselect", "pbsdsh"), ""),
}

GARBAGE = "printf '\\377|a|b|c\\n= = =\\n'"


@pytest.fixture(autouse=True)
def shared_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine whose folders are all shared and which has an address; it may be slow."""
    monkeypatch.setattr(examination, "TIMEOUT_S", DEADLINE_S)
    (tmp_path / "mounts").write_text("server:/ / nfs4 rw 0 0\n")
    monkeypatch.setattr(mounts, "MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(launchers, "own_address", lambda nodes, wanted: ("10.0.0.7", None))


def commands(make: Make, answers: dict[str, str]) -> None:
    for name, text in answers.items():
        make(name, text)


def test_a_healthy_slurm(hpc_det: Command, slurm_commands: Make) -> None:
    commands(slurm_commands, SLURM)
    result = hpc_det("doctor")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("this machine\n  ok       Python ")
    assert "\nSlurm\n  ok       Slurm 22.05.8, cluster lab, partitions low, high\n" in result.out
    assert "  ok       resume: auto takes successor" in result.out
    assert not unnamed(result.out, "sbatch --test-only")
    assert result.out.splitlines()[-1].startswith("0 problems, ")


def test_a_healthy_pbs(hpc_det: Command, slurm_commands: Make) -> None:
    commands(slurm_commands, PBS)
    result = hpc_det("doctor")
    assert (result.code, result.err) == (0, "")
    assert "\nPBS\n  ok       PBS 23.06.06, server pbshead, queues workq, low, high\n" in result.out
    assert "  ok       resume: auto takes successor" in result.out


def test_of_two_schedulers_that_of_the_named_profile_is_examined(hpc_det: Command, slurm_commands: Make) -> None:
    commands(slurm_commands, SLURM | PBS)
    for cluster, subject in (("pbs", "PBS"), ("slurm", "Slurm")):
        out = hpc_det("doctor", "--cluster", cluster).out
        assert [name for name in ("PBS", "Slurm") if f"\n{name}\n" in out] == [subject]


def test_an_account_that_is_refused_is_the_exit_code(hpc_det: Command, slurm_commands: Make) -> None:
    commands(slurm_commands, SLURM | {"sbatch": "echo allocation failure: Invalid account >&2; exit 1"})
    result = hpc_det("doctor")
    assert result.code == 1
    assert "Invalid account" in result.out
    assert result.out.splitlines()[-1].startswith("1 problem, ")


def test_every_line_that_is_not_well_has_a_remedy(hpc_det: Command, slurm_commands: Make) -> None:
    slurm_commands("nothing", "")
    result = hpc_det("doctor", "--json")
    found = json.loads(result.out)
    assert all(each["told"] == each["message"] for each in found), "its former name"
    assert {"subject", "verdict", "message", "remedy", "told"} == set(found[0])
    assert all(finding["remedy"] for finding in found if finding["verdict"] != "ok")
    each_names([finding["message"] for finding in found if finding["subject"] == "scheduler"], ["Slurm", "PBS", "PATH"])


def test_a_mistake_in_the_sites_configuration_hides_nothing_else(
    hpc_det: Command, slurm_commands: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands(slurm_commands, SLURM)
    monkeypatch.setenv("HPC_DET_SITE_CONF", str(tmp_path / "gone"))
    result = hpc_det("doctor")
    assert result.code == 1
    assert unnamed(result.out, "HPC_DET_SITE_CONF", tmp_path / "gone") == []
    assert "\nSlurm\n  ok       Slurm 22.05.8" in result.out
    assert "Traceback" not in result.err


def test_a_named_profile_of_this_machine_asks_no_scheduler(hpc_det: Command, slurm_commands: Make) -> None:
    slurm_commands("sinfo", "exit 1")
    result = hpc_det("doctor", "--cluster", "local")
    assert result.code == 0
    assert "profile local\n  ok       valid, for this machine" in result.out
    assert "\nSlurm\n" not in result.out


def test_an_unknown_profile_is_the_users_error(hpc_det: Command) -> None:
    refused = hpc_det("doctor", "--cluster", "atlas")
    assert (refused.code, refused.out) == (2, "")
    assert not unnamed(refused.err, "'atlas'")


@pytest.mark.parametrize("site", [SLURM, PBS], ids=["slurm", "pbs"])
@pytest.mark.parametrize(
    "answer",
    ["exit 1", "echo '{}'", "echo '[]'", "echo '{\"Server\": 7}'", GARBAGE, "exec /bin/sleep 60"],
    ids=["refused", "nothing", "list", "number", "garbage", "silence"],
)
def test_whatever_a_site_answers_is_told(
    answer: str, site: dict[str, str], hpc_det: Command, slurm_commands: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "TIMEOUT_S", 0.3)
    commands(slurm_commands, dict.fromkeys(site, answer))
    result = hpc_det("doctor")
    assert (result.code, result.err) == (1, "")
    assert "\nlaunchers\n" in result.out  # the other subjects are reported nevertheless


@pytest.mark.parametrize("bad", [*SLURM])
def test_one_command_that_never_answers_hides_nothing_else(
    bad: str, hpc_det: Command, slurm_commands: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(command: Sequence[str], env: Mapping[str, str], timeout_s: float) -> str:
        return run_command(command, env, 0.3 if bad in command else timeout_s)

    monkeypatch.setattr(examination, "run_command", answer)
    commands(slurm_commands, SLURM | {bad: "exec /bin/sleep 600"})
    result = hpc_det("doctor")
    assert result.err == ""
    assert "\nlaunchers\n" in result.out
    assert (bad in ("sinfo", "scontrol", "sbatch")) == bool(result.code)


def test_torque_is_named_and_refused(hpc_det: Command, slurm_commands: Make) -> None:
    commands(slurm_commands, PBS | {"qstat": "echo Version: 6.1.3 >&2; echo Version: 6.1.3"})
    result = hpc_det("doctor")
    assert result.code == 1
    assert not unnamed(result.out, "'Version: 6.1.3'", "PBS Pro", "OpenPBS")


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from hpc_det.cli.main import main; main(['doctor', '--cluster', 'local']);"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "hydra", "rich", "mpi4py"} & set(done.stderr.split())


def test_the_stand_in_pbs(pbs_lab: PbsLab, hpc_det: Command, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the commands of a whole site, whose settings a manager changes."""
    monkeypatch.setenv("PATH", str(pbs_lab.site.bin))  # hides a Slurm of this machine
    (root / "conf" / "cluster").mkdir(parents=True)
    profile = "name: lab\nscheduler: pbs\nslots_per_node: 4\nslot_type: gpu\nresource_pool: low\n"
    (root / "conf" / "cluster" / "lab.yaml").write_text(profile)
    root.chmod(0o700)
    pbs_lab.set_kill_delay("low", 0)
    result = hpc_det("doctor", "--cluster", "lab")
    assert (result.code, result.err) == (0, "")
    assert not unnamed(result.out, "pbsdsh, pbs_tmrsh")
    assert "  note     queue low: 0 s lie between TERM and KILL (kill_delay)" in result.out
    assert "  ok       pool low: the profile takes 4 GPUs of a node, and nodes have 4" in result.out
    assert "  note     pool low preempts by requeue, and the profile says nothing" in result.out
    pbs_lab.stop_server()
    down = hpc_det("doctor", "--cluster", "lab")
    assert down.code == 1
    assert "cannot connect to server" in down.out
    pbs_lab.start_server()
