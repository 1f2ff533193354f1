"""Checks of PBS Pro and OpenPBS, after qstat(1B), pbs_queue_attributes(7B) and recordings of OpenPBS 23.06."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from hpc_det.config.cluster_choice import Which
from hpc_det.doctor import Finding
from hpc_det.errors import count
from hpc_det.schedulers.pbs.detect import QUEUES, SCHEDULER, SERVER, answer, parse_scheduler, priority_note
from hpc_det.schedulers.pbs.hosts import NODES, STARTERS
from hpc_det.schedulers.scheduler import CommandError, Run
from hpc_det.schedulers.site import Site, starters, why_not_mpiexec

SUBJECT = "PBS"
VERSION = ("qstat", "--version")
COMMANDS = (VERSION, NODES, QUEUES, SERVER, SCHEDULER)
_NEEDED = ("qsub", "qstat", "qdel", "qalter", "qselect")
_WAYS = {
    "S": "suspend: jobs keep their GPUs' memory and cannot save",
    "C": "checkpoint: without effect, unless the site has scripts for it",
    "R": "requeue: jobs save and run again later",
    "D": "delete: jobs save, and another job resumes",
}
"""The letters of preempt_order, and what they mean for jobs."""

_finding = partial(Finding, SUBJECT)
_ok = partial(_finding, "ok")
_note = partial(_finding, "note")
_problem = partial(_finding, "problem")


def findings(site: Site, ask: Run, which: Which) -> Iterator[Finding]:
    """Yield the findings for PBS. Raises CommandError if a command fails."""
    yield _ok(f"{site.version}, server {site.name}, queues {', '.join(pool.name for pool in site.pools)}")
    yield from _commands(ask, which)
    ((_name, server),) = answer(ask, SERVER)["Server"].items()
    yield _history(server)
    yield _priorities(ask)
    yield from _queues(site)
    yield from _preemption(ask)
    yield _ok(
        f"arrays of up to {count(site.max_array_size, 'job')}" if site.max_array_size else "max_array_size is not set"
    )


def _commands(ask: Run, which: Which) -> Iterator[Finding]:
    if missing := [name for name in _NEEDED if not which(name)]:
        yield _problem(f"not on PATH: {', '.join(missing)}", "add the folder with the commands of PBS to PATH")
    if found := starters(ask, which):
        yield _ok(f"agents can be started on nodes with {', '.join(found)}")
    else:
        why_not = f" ({why_not_mpiexec(ask, which)})" if which("mpiexec") else ""
        yield _note(
            f"jobs of several nodes need a command that starts agents, and none of {', '.join(STARTERS)} on this PATH "
            f"can{why_not}",
            "search for one on a compute node, and set start_agents_with in the profile to it",
        )


def _history(server: Mapping[str, Any]) -> Finding:
    if server.get("job_history_enable") == "True":
        # 336:00:00 is PBS' default
        return _ok(f"PBS keeps a history of ended jobs for {server.get('job_history_duration', '336:00:00')}")
    return _ok("PBS keeps no history of ended jobs; hpc_det records their ends in its own files")


def _priorities(ask: Run) -> Finding:
    if why_not := priority_note(answer(ask, SERVER)):
        return _note(why_not, "ask the site; `hpc-det job update --ahead-of` changes the order without priorities")
    return _ok("the site's job_sort_formula takes priorities into account")


def _queues(site: Site) -> Iterator[Finding]:
    for pool in site.pools:
        message = f"queue {pool.name}: {pool.grace_time_s} s lie between TERM and KILL (kill_delay)"
        if pool.grace_time_s:
            yield _ok(message)
        else:
            yield _note(
                f"{message}: a job may end before it has saved",
                "set grace_time_s: 0 for the profile's pool, which enables checkpoint_interval: auto",
            )


def _preemption(ask: Run) -> Iterator[Finding]:
    try:
        order = parse_scheduler(ask(SCHEDULER)).get("preempt_order", "")
    except CommandError as error:
        yield _note(
            f"PBS does not report its preemption order: {error}", "ask the site; set preempt_mode in the profile"
        )
        return
    # PBS tries the methods in the order of the letters. A site may have several orders, by the time that a job has
    # left: only the first is shown.
    letters = [letter for letter in dict.fromkeys(order.split()[0] if order else "") if letter in _WAYS]
    ways = "; ".join(_WAYS[letter] for letter in letters)
    if letters and letters[0] == "S":
        yield _note(f"preempt_order {order}: {ways}", "ask the site for R or D in queues with GPUs")
    elif letters and letters[0] == "C":
        yield _note(f"preempt_order {order}: {ways}", "ask the site for R or D before C")
    else:
        yield _ok(f"preempt_order {order}: {ways}" if letters else "PBS reports no preempt_order")
