"""The hosts of a job of PBS: those that it has, and those for one that keeps away from some.

`select` knows no "not", so all the others are named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_det.schedulers.scheduler import CommandError, Run, reading

# pbs_node_attributes(7B), state: what a node can be in that takes jobs now or later.
_ALIVE = {"free", "busy", "job-busy", "job-exclusive", "job-sharing", "resv-exclusive"}
_COUNTED = ("ncpus", "ngpus", "mem")
_UNITS = {"kb": 1, "mb": 2, "gb": 3, "tb": 4}


class TooFewHosts(CommandError):
    """Fewer hosts than a job needs are left without those that it avoids."""


def hosts_in(nodefile: str) -> list[str]:
    """Each once: PBS_NODEFILE, which every host has, names one for every process that a chunk asks for (mpiprocs)."""
    return list(dict.fromkeys(Path(nodefile).read_text(encoding="utf-8").split()))


@reading("pbsnodes")
def named_hosts(wanted: tuple[str, str | None], exclude: Collection[str], run: Run) -> str:
    """`wanted`, a `select` of one kind of chunk and its queue, as one chunk for each of so many hosts.

    Those that are free come first. Raises TooFewHosts where too few are left.
    """
    select, queue = wanted
    count, _, chunk = select.partition(":")
    nodes = json.loads(run(["pbsnodes", "-av", "-F", "json"])).get("nodes", {})
    excluded = {_short(name) for name in exclude}
    able = {
        host: _is_free(node, chunk)
        for name, node in nodes.items()
        if _can_run(node, chunk, queue)
        and _short(host := node["resources_available"].get("host", name)) not in excluded
    }
    chosen = sorted(able, key=lambda host: not able[host])[: int(count)]
    if len(chosen) < int(count):
        raise TooFewHosts(
            f"qsub: {count} nodes are needed, and {len(chosen)} are left without {', '.join(sorted(exclude))}, which "
            "were lost or failed the checks; mend them, or shorten exclude_nodes_for in the cluster profile"
        )
    return "+".join(f"1:{chunk}:host={host}" for host in chosen)


@reading("pbsnodes")
def down_hosts(hosts: Sequence[str], run: Run) -> list[str]:
    """Those of `hosts` whose MoM the server does not reach. Raises CommandError."""
    nodes = json.loads(run(["pbsnodes", "-av", "-F", "json"])).get("nodes", {})
    down = {
        _short(node.get("resources_available", {}).get("host", name))
        for name, node in nodes.items()
        if "down" in node["state"].split(",")
    }
    return [host for host in hosts if _short(host) in down]


def _can_run(node: Mapping[str, Any], chunk: str, queue: str | None) -> bool:
    is_open = queue is None or node.get("queue", queue) == queue
    return is_open and set(node["state"].split(",")) <= _ALIVE and _holds(node["resources_available"], {}, chunk)


def _is_free(node: Mapping[str, Any], chunk: str) -> bool:
    return bool(node["state"] == "free") and _holds(
        node["resources_available"], node.get("resources_assigned", {}), chunk
    )


def _holds(available: Mapping[str, Any], assigned: Mapping[str, Any], chunk: str) -> bool:
    needs = dict(item.split("=", 1) for item in chunk.split(":"))
    return all(
        _amount(available.get(name, 0)) - _amount(assigned.get(name, 0)) >= _amount(needs[name])
        for name in _COUNTED
        if name in needs
    )


def _amount(value: str | int) -> float:
    """A count, or a size in bytes."""
    found = re.fullmatch(r"(\d+)([kmgt]b)?", str(value))
    return int(found[1]) * 1024.0 ** _UNITS.get(found[2] or "", 0) if found else 0.0


def _short(host: str) -> str:
    """Nodes are named with their domain in one place and without it in another."""
    return host.partition(".")[0]
