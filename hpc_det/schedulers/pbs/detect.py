"""Detection of a PBS site, after pbsnodes(8B), qstat(1B) and the attributes of OpenPBS 23.06."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpc_det.schedulers.pbs.hosts import NODES, amount
from hpc_det.schedulers.scheduler import CommandError, Run, reading
from hpc_det.schedulers.site import FoundPool, Site

QUEUES = ("qstat", "-Q", "-f", "-F", "json")
SERVER = ("qstat", "-B", "-f", "-F", "json")
SCHEDULER = ("qmgr", "-c", "list sched")

KILL_DELAY_S = 10
"""Seconds between TERM and KILL for a queue that sets no kill_delay (pbs_queue_attributes(7B))."""
# The scheduler's preempt_order: PBS tries the methods in order, so the first one counts. C, checkpointing, needs
# scripts of the site; such jobs are requeued as well.
_PREEMPT_ORDERS = {"S": "suspend", "C": "requeue", "R": "requeue", "D": "cancel"}


@reading("pbsnodes, qstat or qmgr")
def detect(run: Run) -> Site:
    """Query PBS and return its site. Raises CommandError if PBS does not answer or no queue is usable."""
    site = site_of(answer(run, NODES), answer(run, QUEUES), answer(run, SERVER), parse_scheduler(_or_empty(run)))
    if not site.pools:
        raise CommandError("qstat: found no execution queue that is enabled and started")
    return site


def parse_scheduler(output: str) -> dict[str, str]:
    """Return the attributes of the first scheduler in the output of `qmgr -c "list sched"`."""
    return dict(re.findall(r"^ +(\w+) = (.*)$", output, re.MULTILINE))


def site_of(
    nodes: Mapping[str, Any], queues: Mapping[str, Any], server: Mapping[str, Any], scheduler: Mapping[str, str]
) -> Site:
    """Return the site that the parsed answers of pbsnodes, qstat and qmgr describe."""
    ((name, attributes),) = server.get("Server", {"pbs": {}}).items()
    shapes = Counter(_shape(node["resources_available"]) for node in nodes.get("nodes", {}).values())
    default = attributes.get("default_queue")
    usable = {
        queue: said
        for queue, said in queues.get("Queue", {}).items()
        if (said.get("queue_type"), said.get("enabled"), said.get("started")) == ("Execution", "True", "True")
    }
    size = attributes.get("max_array_size")
    return Site(
        scheduler="pbs",
        version=f"PBS {server.get('pbs_version', '')}".strip(),
        name=str(name),
        pools=tuple(
            replace(_pool(queue, said, shapes, queue == default, scheduler), max_memory_per_node=_memory(nodes))
            for queue, said in usable.items()
        ),
        max_array_size=int(size) if size is not None else None,
    )


def _shape(resources: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of GPUs and CPUs of a node."""
    # ngpus is not a built-in resource of PBS: sites define it.
    return int(resources.get("ngpus", 0)), int(resources.get("ncpus", 1))


def _memory(nodes: Mapping[str, Any]) -> str | None:
    """Return the memory of the largest node in GiB, rounded down; None if no node reports it."""
    sizes = (amount(node["resources_available"].get("mem", 0)) for node in nodes.get("nodes", {}).values())
    gib = int(max(sizes, default=0)) >> 30
    return f"{gib}G" if gib else None


def _pool(
    name: str, queue: Mapping[str, Any], shapes: Counter[tuple[int, int]], default: bool, scheduler: Mapping[str, str]
) -> FoundPool:
    """Return the pool of a queue, with the usual node of the whole site: one with GPUs if there are any, of the
    commonest shape.
    """
    gpus, cpus = max(shapes, key=lambda shape: (bool(shape[0]), shapes[shape]), default=(0, 1))
    most = queue.get("resources_max", {})
    alike = sum(count for shape, count in shapes.items() if shape[0] >= gpus and shape[1] >= cpus)
    return FoundPool(
        name=name,
        default=default,
        slots_per_node=gpus or cpus,
        slot_type="gpu" if gpus else "cpu",
        cpus_per_slot=max(cpus // gpus, 1) if gpus else 1,
        max_cpus_per_node=max((shape[1] for shape in shapes if shape[0] >= gpus), default=None),
        max_nodes=min(alike, int(most.get("nodect", alike))) or None,
        max_time_limit=most.get("walltime"),
        preempt_mode=_preempt_mode(int(queue.get("Priority", 0)), scheduler),
        grace_time_s=int(queue.get("kill_delay", KILL_DELAY_S)),
        remark="" if len(shapes) < 2 else f"the site's nodes differ; most nodes with GPUs have {gpus}",
    )


def _preempt_mode(priority: int, scheduler: Mapping[str, str]) -> str | None:
    """Return how jobs of a queue with this priority are preempted; None if the scheduler could not be queried."""
    order = scheduler.get("preempt_order", "")
    if not order:
        return None
    # Jobs of such a queue preempt others and are not preempted themselves.
    if priority >= int(scheduler.get("preempt_queue_prio", 150)):
        return "off"
    return _PREEMPT_ORDERS.get(order[0])


def priority_note(server: Mapping[str, Any]) -> str:
    """Return why priorities may not affect the order of jobs; "" if they do. `server`: the answer to SERVER."""
    # A site orders jobs with the server's job_sort_formula, or with a job_sort_key in a file that users cannot read.
    formulas = [said["job_sort_formula"] for said in server.get("Server", {}).values() if "job_sort_formula" in said]
    if any("job_priority" in formula for formula in formulas):
        return ""
    if formulas:
        return f"PBS orders jobs by its job_sort_formula {formulas[0]!r}, which does not contain job_priority"
    return (
        "this PBS server has no job_sort_formula: priorities do not change the order of jobs, unless the site sorts "
        "them by a job_sort_key, which users cannot see"
    )


def answer(run: Run, command: tuple[str, ...]) -> dict[str, Any]:
    """Run `command` and return the JSON object that it prints. Raises CommandError if it prints something else."""
    try:
        said: dict[str, Any] = json.loads(run(command))
    except ValueError as error:
        raise CommandError(f"{command[0]}: its answer is not JSON ({error}); is this PBS Pro or OpenPBS?") from None
    return said


def _or_empty(run: Run) -> str:
    """Return the attributes of the scheduler as text; "" if the site allows only managers to query them."""
    try:
        return run(SCHEDULER)
    except CommandError:
        return ""
