"""The address on which the driver of a gang job listens: that of its host on the network of the cluster's nodes."""

from __future__ import annotations

import logging
import re

from hpc_det.node.network import address_towards, is_this_host, own_address, shown_interfaces
from hpc_det.schedulers.scheduler import CommandError, run_command, whole_lines

SOME_NODES = 3
"""Number of nodes to which a route is searched: this host may be unable to resolve the name of one of them."""
ASK_S = 10.0
"""Timeout in seconds of commands that list the nodes."""
_log = logging.getLogger("hpc_det.sgd")


def driver_address(cluster: str, partition: str | None, interface: str | None) -> str:
    """Return the address of this host on the route to the nodes, or on `interface` if it is given.

    `cluster`: "slurm" or "pbs"; `partition`: the partition of Slurm in which the jobs run, None for any. Without a
    known route, the address of the host's name or of the default route is returned, with a warning. Raises UsageError
    if this host lacks the interface.
    """
    if interface:
        return own_address(2, interface, "interface")[0]
    nodes = _nodes(cluster, partition) or _nodes(cluster, None)
    if known := address_towards(nodes):
        return known
    address, _ = own_address(2, None)
    if not any(map(is_this_host, nodes)):
        _log.warning(
            "no route from this host to %s is known, so the driver listens on %s; if agents cannot connect, pass "
            "interface=NAME of another one of this host's interfaces: %s",
            ", ".join(nodes) or f"the nodes of {cluster}",
            address,
            shown_interfaces(),
        )
    return address


def _nodes(cluster: str, partition: str | None) -> list[str]:
    """Return addresses or names of up to SOME_NODES nodes; none if the scheduler's command fails."""
    try:
        if cluster == "slurm":
            where = [f"--partition={partition}"] if partition else []
            answer = run_command(["sinfo", "--noheader", "--Node", "--format=%o", *where], timeout_s=ASK_S)
            found = [line.strip() for line in whole_lines(answer)]
        else:
            found = re.findall(r"(?m)^\s+Mom = (\S+)", run_command(["pbsnodes", "-a"], timeout_s=ASK_S))
    except CommandError:
        return []
    return list(dict.fromkeys(found))[:SOME_NODES]
