"""Detection of a PBS site, from answers recorded on OpenPBS 23.06."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hpc_det.schedulers.pbs.detect import detect, parse_scheduler, site_of
from hpc_det.schedulers.scheduler import CommandError
from hpc_det.schedulers.site import FoundPool, Site
from tests.facts import refused
from tests.schedulers.recorded_sites import PBS, replay, said

FOLDER = "pbs-23.06"


def site(sched: str | None = None, **queue: Any) -> Site:
    """Return the recorded site, with these attributes of the queue `low`."""
    queues = json.loads(said(FOLDER, "queues.json"))
    queues["Queue"]["low"] |= queue
    scheduler = parse_scheduler(said(FOLDER, "sched.txt") if sched is None else sched)
    return site_of(json.loads(said(FOLDER, "nodes.json")), queues, json.loads(said(FOLDER, "server.json")), scheduler)


def low(found: Site) -> FoundPool:
    return next(pool for pool in found.pools if pool.name == "low")


def test_queues_nodes_and_limits() -> None:
    found = detect(replay(FOLDER, PBS))
    assert (found.scheduler, found.name, found.version) == ("pbs", "pbshead", "PBS 23.06.06")
    assert found.max_array_size == 10000
    nodes: dict[str, Any] = {"slots_per_node": 4, "slot_type": "gpu", "cpus_per_slot": 1, "max_nodes": 3}
    nodes |= {"max_cpus_per_node": 4, "max_memory_per_node": "8G"}
    assert found.pools == (
        FoundPool(name="workq", default=True, preempt_mode="requeue", grace_time_s=10, **nodes),
        FoundPool(name="low", preempt_mode="requeue", grace_time_s=20, **nodes),
        FoundPool(name="high", preempt_mode="off", grace_time_s=20, **nodes),
    )


def test_what_a_queue_grants_at_most() -> None:
    found = low(site(resources_max={"walltime": "24:00:00", "nodect": 2}))
    assert (found.max_time_limit, found.max_nodes) == ("24:00:00", 2)


@pytest.mark.parametrize("attributes", [{"enabled": "False"}, {"started": "False"}, {"queue_type": "Route"}])
def test_a_queue_that_takes_no_jobs_is_no_pool(attributes: dict[str, str]) -> None:
    assert [pool.name for pool in site(**attributes).pools] == ["workq", "high"]


@pytest.mark.parametrize(
    ("order", "mode"),
    [("SCR", "suspend"), ("R", "requeue"), ("D", "cancel"), ("CR", "requeue"), ("R 70 SC", "requeue")],
)
def test_the_first_way_to_preempt_is_the_mode(order: str, mode: str) -> None:
    assert low(site(f"Sched default\n    preempt_order = {order}\n")).preempt_mode == mode


def test_a_scheduler_that_may_not_be_asked_leaves_the_mode_open() -> None:
    assert low(site("")).preempt_mode is None
    assert low(detect(replay(FOLDER, {command: file for command, file in PBS.items() if file != "sched.txt"})))


def test_an_answer_that_is_no_json_is_an_error() -> None:
    with refused(CommandError, "PBS Pro", "OpenPBS"):
        detect(replay(FOLDER, PBS, pbsnodes="<Data></Data>"))
