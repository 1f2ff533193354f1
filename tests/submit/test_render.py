"""Whole scripts, and the strictness of their templates. Golden files are changed by hand."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hpc_det.plan.job_plan import JobArray
from hpc_det.schedulers.scheduler import scheduler
from hpc_det.submit.render import render, render_template, script_variables
from tests.facts import refused
from tests.plan.plans import job_plan

GOLDEN = Path(__file__).parents[1] / "golden"
PLANS = {
    "slurm_gpus_per_node.sh": job_plan(),
    "slurm_gres_everything.sh": job_plan(
        name='Größe 1/2; it\'s "new"',
        gpu_flag="gres",
        gpu_type="a100",
        time_limit_min=90,
        signal_lead_s=120,
        partition="low",
        account="physics",
        qos="normal",
        constraint="[rack1|rack2]&nvlink",
        priority=60,
        mem_per_node="16G",
        submit_args=("--exclusive", "--comment=two words"),
        srun_args=("--mpi=none",),
        modules=("gcc/12", "cuda/12.4"),
        setup=("ulimit -n 4096", "export NCCL_DEBUG=WARN"),
    ),
    "slurm_cpu_one_node.sh": job_plan(slot_type="cpu", nodes=1, ranks_per_node=2, job_nodes=1, job_slots_per_node=2),
    "slurm_array.sh": job_plan(nodes=1, job_nodes=1),
    "slurm_shared.sh": job_plan(nodes=1, ranks_per_node=1, gpu_type="a100", srun_args=("--mpi=none",)),
    "pbs_gpus.sh": job_plan(scheduler="pbs"),
    "pbs_everything.sh": job_plan(
        scheduler="pbs",
        name='Größe 1/2; it\'s "new"',
        gpu_type="a100",
        time_limit_min=1530,
        partition="low",
        account="physics",
        qos="high",
        qos_resource="qos",
        constraint="nvlink&cpu_type=milan",
        priority=60,
        mem_per_node="16G",
        submit_args=("-P proj", "-W", "group_list=two words", "-l place=scatter:excl"),
        start_agents_with="pbs_tmrsh",
        modules=("gcc/12", "cuda/12.4"),
        setup=("ulimit -n 4096", "export NCCL_DEBUG=WARN"),
        folder="/home/a b/experiments/12",
    ),
    "pbs_array.sh": job_plan(scheduler="pbs", nodes=1, job_nodes=1),
    "pbs_shared.sh": job_plan(scheduler="pbs", nodes=1, ranks_per_node=1, slot_type="cpu", start_agents_with="mpiexec"),
    "local.sh": job_plan(scheduler="local", slot_type="cpu", nodes=1, ranks_per_node=2, cpus_per_rank=1),
    "local_with_setup.sh": job_plan(
        scheduler="local", nodes=1, modules=("cuda/12.4",), setup=("ulimit -n 4096",), folder="/home/a b/experiments/12"
    ),
}
ARRAYS = {
    "slurm_array.sh": JobArray(first=1000, count=64, at_once=16),
    "slurm_shared.sh": JobArray(first=0, count=1, workers_each=8),
    "pbs_array.sh": JobArray(first=1000, count=64, at_once=16),
    "pbs_shared.sh": JobArray(first=0, count=1, workers_each=8),
}


def script(name: str) -> str:
    plan = PLANS[name]
    return render(plan, ARRAYS.get(name, JobArray(first=0, count=1)), Path(plan.folder) / "jobs" / "1.sh")


def variables(scheduler_name: str) -> dict[str, object]:
    array = JobArray(first=0, count=1)
    return script_variables(job_plan(scheduler=scheduler_name), array, Path("/jobs/1.sh"))


@pytest.mark.parametrize("name", PLANS)
def test_script(name: str) -> None:
    assert script(name) == (GOLDEN / name).read_text(encoding="utf-8")


def test_every_golden_is_compared() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == set(PLANS)


@pytest.mark.integration
@pytest.mark.parametrize("name", PLANS)
def test_the_shell_can_read_the_script(name: str) -> None:
    subprocess.run(["bash", "-n"], input=script(name), text=True, check=True)


@pytest.mark.parametrize("name", ["slurm", "pbs", "local"])
def test_a_variable_that_the_template_lacks_is_an_error(name: str) -> None:
    with refused(ValueError, "[]", "['surplus']"):
        render_template(scheduler(name).template, {**variables(name), "surplus": 1})


@pytest.mark.parametrize("name", ["slurm", "pbs", "local"])
def test_a_variable_that_only_the_template_knows_is_an_error(name: str) -> None:
    everything = variables(name)
    for left_out in everything:
        rest = {name: value for name, value in everything.items() if name != left_out}
        with refused(ValueError, f"['{left_out}']", "[]"):
            render_template(scheduler(name).template, rest)


def test_the_error_names_the_template() -> None:
    with refused(ValueError, "slurm_templates/local.sh.j2"):
        render_template("local.sh.j2", {})
