from __future__ import annotations

from typing import Any

import pytest

from hpc_det.submit.submitit_pbs.executor import Parameters
from tests.facts import refused
from tests.labs.pbs_lab import PbsLab


def test_a_job_of_nothing_special() -> None:
    assert Parameters().directives() == [
        "-N submitit",
        "-l select=1:ncpus=1:mpiprocs=1:ompthreads=1",
        "-l place=scatter",
        "-l walltime=00:05:00",
        "-r y",
        "-j oe",
        "-k oed",
    ]


def test_all_that_may_be_asked_for() -> None:
    asked = Parameters(
        name="train",
        timeout_min=1501,
        nodes=2,
        tasks_per_node=4,
        cpus_per_task=3,
        gpus_per_node=4,
        mem_gb=1.5,
        queue="low",
        account="physics",
        additional_parameters={"l": ["filesystems=home", "place=excl"], "-m": "ae", "z": True},
    )
    assert asked.directives() == [
        "-N train",
        "-l select=2:ncpus=12:mpiprocs=4:ompthreads=3:ngpus=4:mem=1536mb",
        "-l place=scatter",
        "-l walltime=25:01:00",
        "-r y",
        "-j oe",
        "-k oed",
        "-q low",
        "-A physics",
        "-l filesystems=home",
        "-l place=excl",
        "-m ae",
        "-z",
    ]


NAMES = {
    "train(lr=0.1)": "train_lr_0.1_",
    "a,b": "a_b",
    "a:b": "a_b",
    "ünïcode": "_n_code",
    "two words": "two_words",
    "a/b": "a_b",
    "x\n#PBS -V": "x__PBS_-V",
    "-V": "_V",
    ".hidden": "_hidden",
    "2-layers": "2-layers",
    "x" * 300: "x" * 230,
}


def test_a_name_that_pbs_refuses_is_replaced(pbs_lab: PbsLab) -> None:
    for name, in_pbs in NAMES.items():
        directive = Parameters(name=name).directives()[0]
        assert directive == f"-N {in_pbs}"
        job = pbs_lab.submit(script=f"#PBS {directive}\n#PBS -h\ntrue\n")
        assert pbs_lab.job(job)["Job_Name"] == in_pbs


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"name": ""}, ["name", "''"]),
        ({"queue": ""}, ["pbs_queue", "''"]),
        ({"account": "it's"}, ["pbs_account", "it's"]),
        ({"account": "-V"}, ["pbs_account", "-V"]),
        ({"nodes": 0}, ["nodes", 0]),
        ({"array_parallelism": 0}, ["array_parallelism", 0]),
        ({"gpus_per_node": -1}, ["gpus_per_node", -1, 0]),
        ({"setup": "module load x"}, ["pbs_setup", "'module load x'"]),
        ({"additional_parameters": {"V": True}}, ["'V'"]),
        ({"additional_parameters": {"-J": "0-3"}}, ["map_array"]),
        ({"additional_parameters": {"mail": "x"}}, ["mail", "qsub"]),
        ({"additional_parameters": {"W": "x=1\n#PBS -V"}}, ["W", "qsub"]),
        ({"partition": "x"}, ["['partition']", "'account'"]),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], facts: list[object]) -> None:
    with refused(ValueError, *facts):
        Parameters.of(given)


def test_every_problem_is_said_at_once() -> None:
    with refused(ValueError, "nodes", 0, "pbs_queue", "'a b'"):
        Parameters(nodes=0, queue="a b")


def test_none_is_the_default() -> None:
    assert Parameters.of({"queue": None, "mem_gb": None, "name": None}) == Parameters()


@pytest.mark.parametrize(("minutes", "delay_s", "warning_s"), [(60, 90, 90), (1, 90, 30), (0.05, 90, 1.5), (60, 0, 0)])
def test_a_warning_takes_at_most_half_of_the_time(minutes: float, delay_s: int, warning_s: float) -> None:
    assert Parameters(timeout_min=minutes, signal_delay_s=delay_s).warning_s == warning_s
