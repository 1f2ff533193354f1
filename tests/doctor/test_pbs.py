"""What doctor tells of a PBS."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_det.doctor import Finding
from hpc_det.doctor.pbs import findings
from hpc_det.schedulers.pbs.detect import detect
from hpc_det.schedulers.site import Which
from tests.doctor.sites import everything, on_path, one, pbs_site, verdicts


def told_of(which: Which = everything, sched: str | None = None, **server: Any) -> list[Finding]:
    run = pbs_site(sched, **server)
    return list(findings(detect(run), run, which))


def test_the_recorded_site_has_no_problem() -> None:
    found = told_of(job_sort_formula="10*job_priority+ncpus")
    assert set(verdicts(found)) == {"ok"}
    assert one(found, "server").message == "PBS 23.06.06, server pbshead, queues workq, low, high"
    assert "10 s lie between TERM and KILL" in one(found, "queue workq").message
    assert "20 s lie between TERM and KILL" in one(found, "queue low").message
    assert one(found, "preempt_order").message == "preempt_order R: requeue: jobs save and come back"
    assert one(found, "ended jobs").message == "ended jobs are known for 24:00:00"
    assert one(found, "arrays").message == "arrays of up to 10000 jobs"


def test_without_a_history_our_own_files_tell() -> None:
    assert one(told_of(job_history_enable=None), "no job history").verdict == "ok"


@pytest.mark.parametrize(
    ("order", "verdict", "told"),
    [
        ("S", "note", "jobs keep their GPUs' memory"),
        ("SCR", "note", "checkpoint: without effect"),
        ("CR", "note", "checkpoint: without effect"),
        ("D", "ok", "delete: jobs save, and another job goes on"),
        ("RD 50 D", "ok", "requeue: jobs save and come back; delete"),
    ],
)
def test_each_way_to_preempt(order: str, verdict: str, told: str) -> None:
    found = one(told_of(sched=f"Sched default\n    preempt_order = {order}\n"), f"preempt_order {order}")
    assert found.verdict == verdict
    assert told in found.message


@pytest.mark.parametrize("formula", [None, "ncpus*walltime"])
def test_priorities_that_do_not_count(formula: str | None) -> None:
    found = one(told_of(job_sort_formula=formula), "job_sort_formula")
    assert (found.verdict, "--ahead-of" in found.remedy) == ("note", True)


def test_agents_need_a_way_to_the_nodes() -> None:
    needed = ("qsub", "qstat", "qdel", "qalter", "qselect")
    assert "pbs_tmrsh" in one(told_of(on_path(*needed, "pbs_tmrsh")), "agents can be started").message
    assert "start_agents_with" in one(told_of(on_path(*needed)), "on this PATH").remedy
    not_for_pbs = one(told_of(on_path(*needed, "mpiexec")), "on this PATH")
    assert "/usr/bin/mpiexec" in not_for_pbs.message


def test_commands_that_are_missing() -> None:
    assert one(told_of(on_path("qstat", "qdel", "pbsdsh")), "not on PATH").verdict == "problem"
