"""The commands that start agents on the hosts of an allocation; stubs replace the commands."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hpc_det.errors import UsageError
from hpc_det.sgd.capacity import Allocation
from hpc_det.sgd.capacity.starters import Mpiexec, Srun, cpus_per_node, starter_of
from tests.facts import refused, unnamed
from tests.sgd.capacity.driver import Run, renew_until
from tests.stub import Stub
from tests.wait import wait_for

JOB = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NODELIST": "node[1-3]",
    "SLURM_JOB_CPUS_PER_NODE": "4(x2),8",
    "SLURM_JOB_NAME": "mine",
    "SLURM_NTASKS": "12",
    "SLURM_GPUS_PER_TASK": "1",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
    "SLURM_CONF": "/etc/slurm.conf",
    "SLURMD_NODENAME": "node1",
    "HOME": "/home/me",
}


def no_scontrol(command: object) -> str:
    raise AssertionError(command)


def test_one_srun_starts_the_agents_with_as_many_slots_and_no_agent_ends_another() -> None:
    srun = Srun(JOB, no_scontrol)
    slots = {"node1": 2, "node2": 2, "node3": 4}
    (hosts, command), (other, _) = srun.commands(Path("/run"), slots)
    assert (hosts, other) == (("node1", "node2"), ("node3",))
    assert command == [
        *("srun", "--jobid=12", "--overlap", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1"),
        *("--nodelist=node1,node2", "--export=ALL", "--no-kill", "--kill-on-bad-exit=0", "--wait=0"),
        *("--cpu-bind=none", "--mpi=none"),
        *("/bin/sh", "-c", 'exec "$@" >>"$0/node-$(uname -n).log" 2>&1', "/run/logs"),
        *(sys.executable, "-m", "hpc_det.sgd.elastic.node", "/run", "2"),
    ]


def test_what_the_job_says_of_its_own_tasks_is_not_for_the_agents() -> None:
    kept = {"SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_NODELIST", "SLURM_JOB_CPUS_PER_NODE"}
    assert Srun(JOB, no_scontrol).environment().keys() == {*kept, "SLURMD_NODENAME", "HOME"}


@pytest.mark.parametrize(("text", "cpus"), [("4", [4]), ("4(x2),8", [4, 4, 8]), ("128(x3)", [128] * 3)])
def test_cpus_of_nodes_are_in_slurms_short_form(text: str, cpus: list[int]) -> None:
    assert cpus_per_node(text) == cpus


def test_gpus_are_known_on_a_node_and_asked_for_on_a_login_node() -> None:
    assert Srun({**JOB, "SLURM_GPUS_ON_NODE": "4"}, no_scontrol).gpus == 4
    shell_of_salloc = {name: value for name, value in JOB.items() if name != "SLURMD_NODENAME"}
    assert Srun(shell_of_salloc, lambda command: "JobId=12 TRES=cpu=24,node=3,gres/gpu=6\n").gpus == 2
    assert Srun(shell_of_salloc, lambda command: "JobId=12 TRES=cpu=24,node=3\n").gpus == 0


def test_slots_are_gpus_or_as_many_cpus_as_a_worker_takes() -> None:
    with_gpus = {**JOB, "SLURM_GPUS_ON_NODE": "2"}
    assert Allocation(env=with_gpus).slots == 6
    assert Allocation(env=with_gpus, use_gpu=False).slots == 16
    assert Allocation(env=JOB, cpus_per_worker=3).slots == 1 + 1 + 2
    with refused(UsageError, "job 12", "4 CPUs", 5, "num_cpus_per_worker"):
        Allocation(env=JOB, cpus_per_worker=5)


def test_outside_of_any_allocation_the_error_says_what_was_looked_for() -> None:
    with refused(UsageError, "'allocation'", "SLURM_JOB_ID", "PBS_NODEFILE", "HYDRA_HOST_FILE", "'local'"):
        starter_of({"HOME": "/home/me"})


@pytest.mark.parametrize(
    "text",
    [
        "n1\nn2\n",
        "n1:4\nn2:4\n",
        "n1 slots=4\n# a comment\n\nn2\n",
        "n1 4 all.q@n1 <NULL>\nn2 4 all.q@n2\n",
        "n1\nn1\nn2",
    ],
)
def test_host_files_of_all_kinds_name_each_host_once(tmp_path: Path, stub: Stub, text: str) -> None:
    stub("mpiexec", "")
    (tmp_path / "hosts").write_text(text)
    assert Mpiexec({"PATH": str(tmp_path / "stubs")}, tmp_path / "hosts").hosts == ["n1", "n2"]


@pytest.mark.integration
@pytest.mark.usefixtures("stand_in")
def test_mpiexec_starts_an_agent_on_each_host_and_once_more_where_it_has_ended(
    run: Run, stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each host has a separate mpiexec, which does not pass the environment."""
    stub("mpiexec", f'echo "mpiexec $*" >>{tmp_path}/calls; shift 4; exec env -i "$@"')
    (tmp_path / "hosts").write_text("n1\nn2\n")
    monkeypatch.setenv("HYDRA_HOST_FILE", str(tmp_path / "hosts"))
    monkeypatch.setenv("PMI_RANK", "0")
    allocation = Allocation(cpus_per_worker=1)
    allocation.start(run.path, 2)
    first, _ = run.wait_for_agents(2)
    on_each = [line.split()[1:5] for line in (tmp_path / "calls").read_text().splitlines()]
    assert sorted(on_each) == [["-n", "1", "-host", "n1"], ["-n", "1", "-host", "n2"]]
    assert "PMI_RANK" not in Path(f"/proc/{first['pid']}/environ").read_text()
    assert unnamed(allocation.state(), tmp_path / "hosts", "n1", "n2") == []
    run.end(first)
    renew_until(lambda: len(run.agents()) == 3, allocation, run)
    run.hang_up()
    allocation.stop()
    assert not list(run.path.glob(".nodes-*"))


@pytest.mark.integration
@pytest.mark.usefixtures("stand_in")
def test_agents_that_do_not_leave_are_ended_by_their_steps_end(
    run: Run, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpc_det.sgd.capacity.allocation.LEAVE_S", 0.1)
    stub("srun", 'until [[ $1 == /bin/sh ]]; do shift; done; trap "kill -KILL \\$!; exit 1" TERM; "$@" & wait; wait')
    stub("squeue", "echo node1")
    env = {**JOB, "SLURM_JOB_NODELIST": "node1", "SLURM_JOB_CPUS_PER_NODE": "1"}
    allocation = Allocation(env={**os.environ, **env})
    allocation.start(run.path, 1)
    (note,) = run.wait_for_agents(1)
    allocation.stop()
    wait_for(lambda: not Path(f"/proc/{note['pid']}").exists())


@pytest.mark.integration
def test_a_step_that_ends_at_once_says_why(run: Run, stub: Stub) -> None:
    stub("srun", "echo 'srun: error: Unable to create step for job 12: Requested nodes are busy' >&2; exit 1")
    stub("squeue", "echo node[1,3]")
    allocation = Allocation(env={**os.environ, **JOB})
    allocation.start(run.path, 1)
    why = (
        "job 12 has node1, node3; it has lost node2; no agent runs on node1, node3: srun: error: Unable to create step "
        "for job 12: Requested nodes are busy"
    )
    wait_for(lambda: allocation.state() == why, otherwise=allocation.state)  # each host's step ends when its agent ends
    allocation.stop()
