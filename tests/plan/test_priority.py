"""Determined's priorities as Slurm's nice values and as those of qsub -p."""

from __future__ import annotations

import pytest

from hpc_det.plan.pool import pool_notes
from hpc_det.plan.priority import from_nice, from_pbs_priority, nice_of, pbs_priority_of
from tests.facts import each_names, unnamed
from tests.plan.sites import cluster, experiment


@pytest.mark.parametrize(
    ("priority", "nice", "for_pbs"), [(1, -4100, 410), (42, 0, 0), (43, 100, -10), (99, 5700, -570)]
)
def test_a_priority_has_a_number_of_each_scheduler(priority: int, nice: int, for_pbs: int) -> None:
    assert (nice_of(priority), pbs_priority_of(priority)) == (nice, for_pbs)


def test_every_number_of_a_scheduler_comes_back_whole() -> None:
    assert [nice_of(from_nice(nice)) for nice in (-2147483645, -1, 0, 7, 2147483645)] == [
        -2147483645,
        -1,
        0,
        7,
        2147483645,
    ]
    assert [pbs_priority_of(from_pbs_priority(given)) for given in range(-1024, 1024)] == list(range(-1024, 1024))


@pytest.mark.parametrize(("scheduler", "priority"), [("slurm", 42), ("slurm", 99), ("pbs", 1), ("local", None)])
def test_a_priority_that_jobs_will_have_needs_no_note(scheduler: str, priority: int | None) -> None:
    assert pool_notes(experiment(resources={"priority": priority}), cluster(scheduler=scheduler)) == []


def test_a_priority_ahead_of_the_usual_is_an_operators_to_give_on_slurm() -> None:
    (note,) = pool_notes(experiment(resources={"priority": 10}), cluster(scheduler="slurm"))
    assert not unnamed(note, "resources.priority", 10, 42, "scontrol update JobId=... Nice=-3200")


def test_a_machine_without_a_queue_has_no_priorities() -> None:
    each_names(pool_notes(experiment(resources={"priority": 10}), cluster(scheduler="local")), ["resources.priority"])
