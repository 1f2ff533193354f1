"""`pbsdsh` and `pbs_tmrsh`: start more processes of a running job, on any of its nodes, through the moms."""

from __future__ import annotations

import getopt
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from tests.labs.pbs import client
from tests.labs.pbs.client import Connection
from tests.labs.pbs.resources import Refused
from tests.labs.pbs.site import Site

NOT_IN_JOB = 255


@dataclass
class Spawned:
    """The tasks of one pbsdsh, which forwards TERM to them on all nodes, and exits without waiting."""

    site: Site
    job: str
    tasks: list[str] = field(default_factory=list)

    def forward(self, number: int, frame: FrameType | None) -> None:
        with Connection(self.site.mom_socket) as moms:
            moms.send(do="signal-task", id=self.job, tasks=self.tasks, signal=number)
        os._exit(1)  # recorded as the Exit_status of a job that consisted of a pbsdsh


def pbsdsh(site: Site, arguments: list[str]) -> int:
    options, argv = getopt.getopt(arguments, "c:n:osv")
    given = dict(options)
    job = os.environ["PBS_JOBID"]
    nodes = Path(os.environ["PBS_NODEFILE"]).read_text().split()
    if "-n" in given:
        nodes = [nodes[int(given["-n"])]]
    with Connection(site.mom_socket) as moms:
        spawned = Spawned(site, job)
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, spawned.forward)
        if "-s" in given:
            for node in nodes:
                _run(moms, spawned, [node], argv)
        else:
            _run(moms, spawned, nodes, argv, waits="-o" not in given)
    return 0


def _run(moms: Connection, spawned: Spawned, nodes: list[str], argv: list[str], waits: bool = True) -> None:
    """Start all at once; print a line for each task that fails, when it ends."""
    for node in nodes:
        moms.send(do="spawn", id=spawned.job, node=node, argv=argv)
    order: list[str] = []
    ended = 0
    while len(order) < len(nodes) or (waits and ended < len(nodes)):
        answer = moms.receive()
        if "exit" not in answer:
            order.append(answer["task"])
            spawned.tasks.append(answer["task"])
            continue
        ended += 1
        if answer["exit"]:
            number = order.index(answer["task"])
            print(f"pbsdsh: task 0x{number:08x} exit status {answer['exit']}", file=sys.stderr)


def pbs_tmrsh(site: Site, arguments: list[str]) -> int:
    """Run a program on a node, and return its exit code; a signal ends only this command, and the program continues."""
    host, *argv = arguments
    job = os.environ["PBS_JOBID"]
    if host not in client.ask(site.mom_socket, do="job-nodes", id=job)["nodes"]:
        raise Refused(NOT_IN_JOB, f'host "{host}" is not a node in job <{job}>')
    with Connection(site.mom_socket) as moms:
        moms.send(do="spawn", id=job, node=host, argv=argv)
        answer = moms.receive()
        while "exit" not in answer:
            answer = moms.receive()
    status: int = answer["exit"]
    return status
