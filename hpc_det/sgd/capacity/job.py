"""Jobs of node agents, submitted by the driver: one for the gang, or a pool of single nodes."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_det.errors import HpcDetError, UsageError
from hpc_det.node.network import address_towards, own_address
from hpc_det.schedulers.scheduler import CommandError, JobState, JobStatus, run_command, whole_lines
from hpc_det.sgd.capacity.executors import cluster_of, cpus_of, executor_of, gpus_of, nodes_of
from hpc_det.sgd.capacity.processes import LEAVE_S
from hpc_det.sgd.capacity.queue import Queue
from hpc_det.sgd.elastic import agents
from hpc_det.sgd.elastic.agents import AgentTask, BackOff

if TYPE_CHECKING:
    from submitit.core.core import Executor, Job

SCHEDULERS = ("slurm", "pbs")
GONE_S = 40.0
"""For cancelled jobs to leave the queue. Slurm may take KillWait for one, 30 s by default."""
POLL_S = 0.2
SOME_NODES = 3
"""One that is known by its name alone may have no address here."""
ASK_S = 10.0


class Jobs:
    """Some equal jobs, of which as many are kept queued or running as the driver wants."""

    min_slots = 1
    has_queue = True

    def __init__(
        self,
        executor: Executor | str,
        *,
        jobs: int,
        nodes: int | None,
        slots_per_node: int | None = None,
        cpus_per_worker: int = 1,
        interface: str | None = None,
        **parameters: Any,
    ) -> None:
        if (cluster := cluster_of(executor)) not in SCHEDULERS:
            raise UsageError(f"executor {cluster!r}: expected one with a queue, for {' or '.join(SCHEDULERS)}")
        self._executor = executor_of(executor, nodes, parameters)
        gpus, cpus = gpus_of(self._executor), cpus_of(self._executor)
        self.has_gpus = gpus > 0
        self._slots_per_node = slots_per_node or gpus or cpus // cpus_per_worker
        if not self._slots_per_node:
            raise UsageError(
                f"the job has {cpus} CPUs on a node, and a worker takes {cpus_per_worker}; set cpus_per_task"
            )
        self.slots = jobs * nodes_of(self._executor) * self._slots_per_node
        self.host = _address(cluster, interface)
        self._wanted_jobs = jobs
        self._queue = Queue(self._executor.name())
        self._jobs: list[Job[Any]] = []
        """Those that have not ended, as far as is known."""
        self._again = BackOff(most_s=300.0, lasted_s=600.0)
        self._task = AgentTask("", ())
        self._trouble = ""

    def start(self, run: Path, wanted: int) -> None:
        """Raises CommandError where the scheduler refuses the job."""
        from hpc_det.submit.jobs import check_path

        check_path("the run folder", str(run))
        self._executor.folder = run / "jobs"
        self._task = AgentTask(str(run), agents.arguments(run, self._slots_per_node))
        self._submit(self._wanted_jobs)

    def renew(self, missing_hosts: Collection[str]) -> None:
        self._forget_ended()
        missing = self._wanted_jobs - len(self._jobs)
        if missing and self._again.is_due():
            try:
                self._submit(missing)
                self._trouble = ""
            except HpcDetError as refused:  # it may be a matter of time
                self._trouble = str(refused)

    def state(self) -> str:
        told = self._queue.status(self._jobs)
        groups = Counter(_words(status) for status in told.values())
        if len(self._jobs) == 1:
            said = [f"job {self._jobs[0].job_id} is {words}" for words in groups]
        else:
            said = [f"{count} of {len(self._jobs)} jobs are {words}" for words, count in groups.items()]
        return "; ".join([*(said or ["no job is in the queue"]), *([self._trouble] if self._trouble else [])])

    def is_suspended(self, job: str) -> bool:
        told = self._queue.status(self._jobs).get(self._queue.id_of(job))
        return told is not None and told.is_suspended

    def stop(self) -> None:
        """Agents leave when the driver hangs up, and their jobs end with them."""
        if not self._jobs:
            return
        self._queue.withdraw(self._jobs)
        if not self._all_gone(LEAVE_S):
            self._queue.end(self._jobs)
            if not self._all_gone(GONE_S):
                raise HpcDetError(f"after {GONE_S:g} s, {self.state()}; cancel what is left by hand")

    def _submit(self, count: int) -> None:
        from hpc_det.submit.executor import submission

        self._again.begin()
        with submission(), self._executor.batch():
            jobs = [self._executor.submit(self._task) for _ in range(count)]
        self._jobs += jobs

    def _forget_ended(self) -> None:
        told = self._queue.status(self._jobs)
        self._jobs = [job for job in self._jobs if told[job.job_id].state is not JobState.ENDED]

    def _all_gone(self, within_s: float) -> bool:
        end = time.monotonic() + within_s
        while True:
            self._forget_ended()
            if not self._jobs or time.monotonic() > end:
                return not self._jobs
            time.sleep(POLL_S)


def _address(cluster: str, interface: str | None) -> str:
    """Of this host, on the network of the cluster's nodes."""
    known = None if interface else address_towards(_nodes(cluster))
    return known or own_address(2, interface, "interface")[0]


def _nodes(cluster: str) -> list[str]:
    """Some addresses of nodes, or their names; none where the scheduler does not say."""
    try:
        if cluster == "slurm":
            answer = run_command(["sinfo", "--noheader", "--Node", "--format=%o"], timeout_s=ASK_S)
            found = [line.strip() for line in whole_lines(answer)]
        else:
            found = re.findall(r"(?m)^\s+Mom = (\S+)", run_command(["pbsnodes", "-a"], timeout_s=ASK_S))
    except CommandError:
        return []
    return list(dict.fromkeys(found))[:SOME_NODES]


def _words(status: JobStatus) -> str:
    """PBS has a comment on what runs, too, where and since when."""
    is_news = status.state is not JobState.RUNNING and status.reason not in ("", "None")
    return status.state.value + (f" ({status.reason})" if is_news else "")


class GangJob(Jobs):
    """One job with all nodes. It may shrink, and grows again with the next job only, after its end.

    `executor`: "slurm" or "pbs", with the `parameters` that submitit's AutoExecutor takes for it (timeout_min,
    gpus_per_node, slurm_partition, ...), or an executor of submitit's, which stays as it is. `nodes`: None for as many
    as that says. `slots_per_node`: None for a rank on each GPU of a job, otherwise on each `cpus_per_worker` CPUs.
    `interface`: of the network on which the driver listens; None: the one that leads to the cluster's nodes.
    Raises UsageError for what submitit or this host does not have.
    """

    def __init__(self, executor: Executor | str, nodes: int | None = None, **options: Any) -> None:
        if nodes is not None and nodes < 1:
            raise UsageError(f"GangJob(nodes={nodes}): a job has 1 node or more")
        super().__init__(executor, jobs=1, nodes=nodes, **options)
