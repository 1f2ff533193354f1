"""The requests of pbsdsh and pbs_tmrsh to the moms, and of the lab to the whole site, also while the PBS server is
down.
"""

from __future__ import annotations

import os
from typing import Any

from tests.labs.pbs import job_life, job_start, mom
from tests.labs.pbs.resources import Refused
from tests.labs.pbs.state import Pbs

Answer = dict[str, Any]
OK: Answer = {"code": 0}


def spawn(pbs: Pbs, peer: Any, request: Answer) -> Answer:
    """Start another session of a running job."""
    job = pbs.find(request["id"])
    node = job.nodes.index(request["node"])
    if not pbs.nodes[request["node"]].up:
        raise Refused(1, "the node is down")
    task = job_start.spawn(pbs, job, node, request["argv"])
    task.watcher = peer
    return {"code": 0, "task": task.number}


def signal_task(pbs: Pbs, peer: Any, request: Answer) -> None:
    job = pbs.find(request["id"])
    sessions = [task.pid for task in job.tasks if task.number in request["tasks"] and not task.lost]
    mom.signal_sessions(sessions, request["signal"])


def job_nodes(pbs: Pbs, peer: Any, request: Answer) -> Answer:
    return {"code": 0, "nodes": pbs.find(request["id"]).nodes}


def turn_node(pbs: Pbs, peer: Any, request: Answer) -> Answer:
    """Switch a node off or on, for the lab."""
    if request["name"] not in pbs.nodes:
        raise Refused(1, f"{request['name']} is none of the nodes {', '.join(pbs.nodes)}")
    pbs.nodes[request["name"]].turn(request["up"])
    if not request["up"]:
        job_life.lose_node(pbs, request["name"])
    return OK


def turn_server(pbs: Pbs, peer: Any, request: Answer) -> Answer:
    """Stop or start the PBS server, for the lab; jobs keep running."""
    pbs.answers = request["up"]
    return OK


def strays(pbs: Pbs, peer: Any, request: Answer) -> Answer:
    """Return the processes that left the session of their job, which PBS would leave behind, for the lab."""
    ours = mom.members([session for job in pbs.on_nodes() for session in job.sessions()])
    return {"code": 0, "strays": {pid: text for pid, text in mom.descendants(os.getpid()).items() if pid not in ours}}


OF_MOM = {
    "spawn": spawn,
    "signal-task": signal_task,
    "job-nodes": job_nodes,
    "node": turn_node,
    "server": turn_server,
    "strays": strays,
}
