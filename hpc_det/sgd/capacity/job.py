"""Jobs of node agents, submitted by the driver through submitit: one for the gang, or a pool of single nodes.

The executor that submits them is an own copy: one task a node, and a job that outlives a lost node.
"""

from __future__ import annotations

import copy
import os
import re
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_det.errors import HpcDetError, UsageError
from hpc_det.node.network import address_towards, own_address
from hpc_det.schedulers import shared_answers
from hpc_det.schedulers.pbs.answers import element_statuses, from_pbs, to_pbs
from hpc_det.schedulers.pbs.scheduler import Pbs
from hpc_det.schedulers.scheduler import CommandError, JobState, JobStatus, Run, array_of, run_command, whole_lines
from hpc_det.schedulers.shared_answers import SharedAnswers
from hpc_det.schedulers.slurm.scheduler import Slurm
from hpc_det.sgd.capacity.starters import LEAVE_S, STEP_FLAGS
from hpc_det.sgd.elastic import agents
from hpc_det.sgd.elastic.agents import AgentTask, BackOff
from hpc_det.store.experiments import state_root

if TYPE_CHECKING:
    from submitit.core.core import Executor, Job

SCHEDULERS = ("slurm", "pbs")
GONE_S = 40.0
"""For cancelled jobs to leave the queue. Slurm may take KillWait for one, 30 s by default."""
POLL_S = 0.2
SOME_NODES = 3
"""One that is known by its name alone may have no address here."""
ASK_S = 10.0
NO_NEWS = JobStatus(JobState.UNKNOWN, "not asked about yet")
_run = partial(run_command, timeout_s=10.0)
"""The driver waits for the answer."""
NAME = "hpc-det-sgd"
_GPUS = ("gpus_per_node", "gpus_per_task", "num_gpus", "gres")
_COUNT = re.compile(r"(?:gpu:)?(?:[\w.-]+:)?(\d+)")


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
        statuses = self._queue.status(self._jobs)
        groups = Counter(_words(status) for status in statuses.values())
        if len(self._jobs) == 1:
            said = [f"job {self._jobs[0].job_id} is {words}" for words in groups]
        else:
            said = [f"{count} of {len(self._jobs)} jobs are {words}" for words, count in groups.items()]
        return "; ".join([*(said or ["no job is in the queue"]), *([self._trouble] if self._trouble else [])])

    def is_suspended(self, job: str) -> bool:
        status = self._queue.status(self._jobs).get(self._queue.id_of(job))
        return status is not None and status.is_suspended

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
        statuses = self._queue.status(self._jobs)
        self._jobs = [job for job in self._jobs if statuses[job.job_id].state is not JobState.ENDED]

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


class Pool(Jobs):
    """`nodes`: (MIN, MAX). MAX jobs are kept queued or running; fewer than MIN nodes are not worth a start.

    All else is as with GangJob.
    """

    def __init__(self, executor: Executor | str, nodes: tuple[int, int], **options: Any) -> None:
        fewest, most = nodes
        if not 1 <= fewest <= most:
            raise UsageError(f"Pool(nodes=({fewest}, {most})): expected (MIN, MAX) with 1 <= MIN <= MAX")
        super().__init__(executor, jobs=most, nodes=1, **options)
        self.min_slots = fewest * self._slots_per_node


class PbsById(Pbs):
    """Jobs by submitit's ids: `12` and `12_3`."""

    def status(self, job_ids: Sequence[str], run: Run) -> dict[str, JobStatus]:
        return element_statuses(job_ids, run)


class Queue:
    """`name`: submitit's of the cluster, "slurm" or "pbs"."""

    def __init__(self, name: str) -> None:
        self._is_slurm = name == "slurm"
        self._answers = SharedAnswers(state_root(os.environ), Slurm() if self._is_slurm else PbsById())
        self._known: dict[str, JobStatus] = {}

    def status(self, jobs: Iterable[Job[Any]]) -> dict[str, JobStatus]:
        """By id, what the scheduler has said at last; it is asked no more often than every 2 s."""
        ids = [job.job_id for job in jobs]
        if ids and (news := self._answers.news(ids, _run, shared_answers.ASK_S)) is not None:
            self._known = {job_id: self._known.get(job_id, NO_NEWS) for job_id in ids} | news
        return {job_id: self._known.get(job_id, NO_NEWS) for job_id in ids}

    def id_of(self, job: str) -> str:
        """submitit's, of the job that calls itself this in its environment."""
        return job if self._is_slurm else from_pbs(job)

    def withdraw(self, jobs: Collection[Job[Any]]) -> None:
        """What waits for its start."""
        for job_id in sorted({self._array_id(job.job_id) for job in jobs}):
            with suppress(CommandError):
                (Slurm() if self._is_slurm else Pbs()).withdraw(job_id, _run)

    def end(self, jobs: Collection[Job[Any]]) -> None:
        """At once: node agents would take a TERM for the notice of a preemption, which comes some time before.

        For a job, `scancel --signal=KILL` is a TERM too, with KillWait behind it; for a step it is none (measured).
        """
        if not self._is_slurm:
            for job in jobs:
                job.cancel(check=False)
            return
        ids = [job.job_id for job in jobs]
        for command in (["--signal=KILL", *(f"{job_id}.0" for job_id in ids)], ids):
            with suppress(CommandError):
                _run(["scancel", "--quiet", *command])

    def _array_id(self, job_id: str) -> str:
        return array_of(job_id if self._is_slurm else to_pbs(job_id))


def executor_of(given: Executor | str, nodes: int | None, parameters: Mapping[str, Any]) -> Executor:
    """For jobs of so many nodes; None: as many as it says itself.

    `given`: submitit's name of a cluster, "slurm" or "pbs", with the `parameters` that its AutoExecutor takes, or an
    executor, which is not changed. Raises UsageError for what submitit refuses.
    """
    try:
        made = _named(given, parameters) if isinstance(given, str) else _copied(given, parameters)
        _shape(made, nodes)
    except (NameError, ValueError, AssertionError, RuntimeError) as refused:
        raise UsageError(f"executor {shown_executor(given)}: {refused}") from None
    return made


def cluster_of(given: Executor | str) -> str:
    """By submitit's name."""
    return given if isinstance(given, str) else inner_executor(given).name()


def shown_executor(given: object) -> str:
    return repr(given) if isinstance(given, str) else type(given).__name__


def gpus_of(executor: Executor) -> int:
    """That its jobs have on each node."""
    given = next((executor.parameters[name] for name in _GPUS if executor.parameters.get(name)), 0)
    found = _COUNT.fullmatch(str(given))
    return int(found[1]) if found else 0


def cpus_of(executor: Executor) -> int:
    return int(executor.parameters.get("cpus_per_task") or 1)


def nodes_of(executor: Executor) -> int:
    return int(executor.parameters.get("nodes") or 1)


def _named(cluster: str, parameters: Mapping[str, Any]) -> Executor:
    from submitit import AutoExecutor

    auto = AutoExecutor(NAME, cluster=cluster)
    auto.update_parameters(**{"name": NAME, **parameters})
    return inner_executor(auto)


def _copied(given: Executor, parameters: Mapping[str, Any]) -> Executor:
    own = copy.deepcopy(given)
    if parameters:
        own.update_parameters(**parameters)
    return inner_executor(own)


def inner_executor(executor: Any) -> Executor:
    """Return the executor of the cluster, whose parameters go by their own names: AutoExecutor keeps one."""
    found: Executor = getattr(executor, "_executor", executor)
    return found


def _shape(executor: Executor, nodes: int | None) -> None:
    generic = {"tasks_per_node": 1, **({"nodes": nodes} if nodes else {})}
    executor.update_parameters(**executor._convert_parameters(generic))
    if executor.name() == "pbs" and not executor.parameters.get("timeout_min"):
        raise ValueError("timeout_min: no time limit is set, and a job of submitit's on PBS has one")
    if executor.name() == "slurm":
        executor.parameters.setdefault("time", None)  # the site's default, instead of submitit's five minutes
        # A job that Slurm requeues and starts again while a node still runs its former self has that node drained
        # ("Duplicate jobid", measured): the driver submits another one instead.
        more = {"no-kill": True, "no-requeue": True, **(executor.parameters.get("additional_parameters") or {})}
        srun_args = [*(executor.parameters.get("srun_args") or []), *STEP_FLAGS]
        executor.update_parameters(additional_parameters=more, srun_args=srun_args)
