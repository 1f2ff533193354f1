"""Findings about a PBS site."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_det.config.cluster_choice import Which
from hpc_det.doctor import Finding
from hpc_det.doctor.pbs import findings
from hpc_det.schedulers.pbs.detect import detect
from tests.doctor.sites import everything, on_path, one, pbs_site, verdicts
from tests.facts import golden, unnamed


def told_of(which: Which = everything, sched: str | None = None, **server: Any) -> list[Finding]:
    run = pbs_site(sched, **server)
    return list(findings(detect(run), run, which))


def test_the_recorded_site_has_no_problem() -> None:
    found = told_of(job_sort_formula="10*job_priority+ncpus")
    assert set(verdicts(found)) == {"ok"}
    assert one(found, "23.06.06", "pbshead", "workq, low, high")
    assert one(found, "workq", "10 s", "TERM", "KILL")
    assert one(found, "low", "20 s", "TERM", "KILL")
    assert one(found, "preempt_order R", "requeue")
    assert one(found, "24:00:00")
    assert one(found, 10000)
    assert [finding.message for finding in found] == golden(__file__, "pbs.txt")


def test_without_a_history_our_own_files_tell() -> None:
    assert one(told_of(job_history_enable=None), "history").verdict == "ok"


@pytest.mark.parametrize(
    ("order", "verdict", "facts"),
    [
        ("S", "note", ["suspend", "GPUs"]),
        ("SCR", "note", ["checkpoint"]),
        ("CR", "note", ["checkpoint"]),
        ("D", "ok", ["delete"]),
        ("RD 50 D", "ok", ["requeue", "delete"]),
    ],
)
def test_each_way_to_preempt(order: str, verdict: str, facts: list[str]) -> None:
    found = one(told_of(sched=f"Sched default\n    preempt_order = {order}\n"), f"preempt_order {order}")
    assert found.verdict == verdict
    assert not unnamed(found.message, *facts)


@pytest.mark.parametrize("formula", [None, "ncpus*walltime"])
def test_priorities_that_do_not_count(formula: str | None) -> None:
    found = one(told_of(job_sort_formula=formula), "job_sort_formula")
    assert (found.verdict, "--ahead-of" in found.remedy) == ("note", True)


def test_agents_need_a_way_to_the_nodes() -> None:
    needed = ("qsub", "qstat", "qdel", "qalter", "qselect")
    assert one(told_of(on_path(*needed, "pbs_tmrsh")), "pbs_tmrsh").verdict == "ok"
    assert "start_agents_with" in one(told_of(on_path(*needed)), "pbsdsh").remedy
    assert one(told_of(on_path(*needed, "mpiexec")), "/usr/bin/mpiexec").verdict == "note"


def test_commands_that_are_missing() -> None:
    assert one(told_of(on_path("qstat", "qdel", "pbsdsh")), "PATH", "qsub").verdict == "problem"
