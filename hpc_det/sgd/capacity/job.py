"""Jobs of node agents that the driver submits through submitit: one job for the gang, or a pool of one-node jobs.

The jobs are submitted with a copy of the user's executor that has one task per node, and keeps a job when it loses a
node.
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

from hpc_det.errors import HpcDetError, UsageError, count
from hpc_det.launch.log_tail import last_line, size_of
from hpc_det.node.process import uninterrupted_commands
from hpc_det.schedulers import shared_answers
from hpc_det.schedulers.pbs.answers import element_statuses, from_pbs, to_pbs
from hpc_det.schedulers.pbs.scheduler import Pbs
from hpc_det.schedulers.scheduler import CommandError, JobState, JobStatus, Run, array_of, run_command
from hpc_det.schedulers.shared_answers import SharedAnswers
from hpc_det.schedulers.slurm.scheduler import Slurm
from hpc_det.sgd.capacity.driver_address import driver_address
from hpc_det.sgd.capacity.starters import LEAVE_S, STEP_FLAGS
from hpc_det.sgd.elastic import agents
from hpc_det.sgd.elastic.agents import AgentTask, BackOff
from hpc_det.sgd.elastic.check_in import failed
from hpc_det.sgd.elastic.wait_report import WaitReport
from hpc_det.store.experiments import state_root
from hpc_det.store.run_folder import RunFolder

if TYPE_CHECKING:
    from submitit.core.core import Executor, Job

SCHEDULERS = ("slurm", "pbs")
GONE_S = 40.0
"""Seconds for cancelled jobs to leave the queue. Slurm may need KillWait (30 s by default) to end a job."""
POLL_S = 0.2
"""Seconds between two checks whether jobs have left the queue."""
NO_NEWS = JobStatus(JobState.UNKNOWN, "state not requested yet")
"""The state of a job before the scheduler's first answer about it."""
_run = partial(run_command, timeout_s=10.0)
"""Runs a scheduler's command with a short timeout, because the driver is blocked until it ends."""
NAME = "hpc-det-sgd"
"""Default name of the jobs."""
_GPUS = ("gpus_per_node", "gpus_per_task", "num_gpus", "gres")
"""Parameters of submitit's executors that request GPUs."""
_COUNT = re.compile(r"(?:gpu:)?(?:[\w.-]+:)?(\d+)")
"""Values of these parameters, with the number of GPUs as a group: "4", "a100:4", "gpu:4" and "gpu:a100:4"."""


class Jobs:
    """A number of equal jobs that are kept queued or running: a job that ends is submitted again."""

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
            raise UsageError(f"executor {cluster!r}: expected an executor for {' or '.join(SCHEDULERS)}")
        self._executor = executor_of(executor, nodes, parameters)
        gpus, cpus = gpus_of(self._executor), cpus_of(self._executor)
        self.has_gpus = gpus > 0
        self._slots_per_node = slots_per_node or gpus or cpus // cpus_per_worker
        if not self._slots_per_node:
            raise UsageError(
                f"the job has {count(cpus, 'CPU')} on a node, but a worker takes {cpus_per_worker}; set cpus_per_task "
                "to at least that"
            )
        self.slots = jobs * nodes_of(self._executor) * self._slots_per_node
        self.host = driver_address(cluster, self._executor.parameters.get("partition"), interface)
        self._wanted_jobs = jobs
        self._queue = Queue(self._executor.name())
        self._jobs: list[Job[Any]] = []
        """The submitted jobs that have not ended, as of the last answer of the scheduler."""
        self._again = BackOff(most_s=300.0, lasted_s=600.0)
        self._task = AgentTask("", ())
        self._trouble = ""
        """Why the scheduler rejected the last submission; empty if it did not."""
        self._ended: Job[Any] | None = None
        """The job that has ended last."""

    def start(self, run: Path, wanted: int) -> None:
        """Submit the jobs. Raises CommandError if the scheduler rejects them."""
        from hpc_det.submit.jobs import check_path

        check_path("the run folder", str(run))
        self._executor.folder = run / "jobs"
        self._task = AgentTask(str(run), agents.arguments(run, self._slots_per_node))
        self._submit(self._wanted_jobs)

    def renew(self, missing_hosts: Collection[str]) -> bool:
        self._forget_ended()
        missing = self._wanted_jobs - len(self._jobs)
        if not (missing and self._again.is_due()):
            return False
        try:
            self._submit(missing)
            self._trouble = ""
        except HpcDetError as refused:  # tried again later: a limit or an outage may be temporary
            self._trouble = str(refused)
        return not self._trouble

    def has_ended(self) -> bool:
        self._forget_ended()
        return not self._jobs

    def state(self) -> str:
        statuses = self._queue.status(self._jobs)
        groups = Counter(_words(status) for status in statuses.values())
        if len(self._jobs) == 1:
            said = [f"job {self._jobs[0].job_id} is {words}" for words in groups]
        else:
            jobs = count(len(self._jobs), "job")
            said = [f"{some} of {jobs} {'is' if some == 1 else 'are'} {words}" for words, some in groups.items()]
        ended = [f"job {self._ended.job_id} has ended{self._last_words(self._ended)}"] if self._ended else []
        more = [*(ended if len(self._jobs) < self._wanted_jobs else []), *([self._trouble] if self._trouble else [])]
        return "; ".join([*(said or ["no job is in the queue"]), *more])

    def is_suspended(self, job: str) -> bool:
        status = self._queue.status(self._jobs).get(self._queue.id_of(job))
        return status is not None and status.is_suspended

    def stop(self) -> None:
        """Withdraw queued jobs, and cancel jobs that still run after LEAVE_S seconds.

        Raises HpcDetError if some are still in the queue after GONE_S more seconds.
        """
        # The driver has asked the agents to exit, so that the running jobs end by themselves.
        if not self._jobs:
            return
        with uninterrupted_commands():
            self._queue.withdraw(self._jobs)
        are_gone = False
        try:
            are_gone = self._all_gone(LEAVE_S)
        finally:  # also after a Ctrl-C
            if not are_gone:
                with uninterrupted_commands():
                    self._queue.end(self._jobs)
        if not are_gone and not self._all_gone(GONE_S):
            raise HpcDetError(f"jobs are left {GONE_S:g} s after they were cancelled: {self.state()}; cancel them")

    def _submit(self, count: int) -> None:
        from hpc_det.submit.executor import submission

        self._again.begin()
        with uninterrupted_commands():  # a Ctrl-C in between would leave jobs that are never cancelled
            with submission(), self._executor.batch():
                jobs = [self._executor.submit(self._task) for _ in range(count)]
            self._jobs += jobs

    def _forget_ended(self) -> None:
        """Remove the jobs that the scheduler reports as ended."""
        statuses = self._queue.status(self._jobs)
        ended = [job for job in self._jobs if statuses[job.job_id].state is JobState.ENDED]
        self._jobs = [job for job in self._jobs if job not in ended]
        self._ended = ended[-1] if ended else self._ended

    def _last_words(self, job: Job[Any]) -> str:
        """Return the last line in the logs of the job and its agents as ": LINE (LOG)"; "" if there is none, or if the
        agents have reported why they failed.
        """
        run = RunFolder(Path(self._task.run))
        logs = [] if failed(run) else [log for log in (*run.logs.glob("node-*.log"), job.paths.stderr) if size_of(log)]
        newest = max(logs, key=lambda log: log.stat().st_mtime, default=None)
        return f": {last_line(newest, 0)!r} ({newest})" if newest else ""

    def _all_gone(self, within_s: float) -> bool:
        """Wait up to `within_s` seconds until all jobs have ended; return whether they have."""
        end = time.monotonic() + within_s
        report = WaitReport(lambda: f"the jobs of this run have to leave the queue; {self.state()}")
        while True:
            self._forget_ended()
            if not self._jobs or time.monotonic() > end:
                return not self._jobs
            time.sleep(POLL_S)
            report.look()


def _words(status: JobStatus) -> str:
    """Return the state of a job as text, with the scheduler's reason if it is not running."""
    # PBS comments on running jobs as well, but only with the place and time of their start.
    is_news = status.state is not JobState.RUNNING and status.reason not in ("", "None")
    return status.state.value + (f" ({status.reason})" if is_news else "")


class GangJob(Jobs):
    """A capacity of one job with all nodes. If it loses nodes, it gets new ones only with the next job, after its end.

    Args:
        executor: "slurm" or "pbs", or an executor of submitit, which is not changed.
        nodes: Number of nodes. None: the number that the executor has.
        slots_per_node: Ranks on each node. None: one per GPU of the job, or, without GPUs, one per `cpus_per_worker`
            CPUs.
        cpus_per_worker: CPUs that a rank takes if the job has no GPUs.
        interface: Name of the network interface on which the driver listens. None: the one with the route to the
            cluster's nodes.
        **parameters: Parameters of submitit's AutoExecutor, such as `timeout_min`, `gpus_per_node` or
            `slurm_partition`.

    Raises:
        UsageError: `nodes` is below 1, submitit rejects a parameter, the job has too few CPUs for a rank, or this host
            lacks the interface.
    """

    def __init__(self, executor: Executor | str, nodes: int | None = None, **options: Any) -> None:
        if nodes is not None and nodes < 1:
            raise UsageError(f"GangJob(nodes={nodes}): nodes must be at least 1")
        super().__init__(executor, jobs=1, nodes=nodes, **options)


class Pool(Jobs):
    """A capacity of one-node jobs: the gang grows and shrinks with the number of jobs that run.

    Args:
        executor: "slurm" or "pbs", or an executor of submitit, which is not changed.
        nodes: `(MIN, MAX)`: MAX jobs are kept queued or running, and training waits while fewer than MIN run.
        **options: The other arguments of GangJob.

    Raises:
        UsageError: As for GangJob, and unless 1 <= MIN <= MAX.
    """

    def __init__(self, executor: Executor | str, nodes: tuple[int, int], **options: Any) -> None:
        fewest, most = nodes
        if not 1 <= fewest <= most:
            raise UsageError(f"Pool(nodes=({fewest}, {most})): expected (MIN, MAX) with 1 <= MIN <= MAX")
        super().__init__(executor, jobs=most, nodes=1, **options)
        self.min_slots = fewest * self._slots_per_node


class PbsById(Pbs):
    """PBS with the job ids of submitit: `12`, and `12_3` for an element of an array."""

    def status(self, job_ids: Sequence[str], run: Run) -> dict[str, JobStatus]:
        return element_statuses(job_ids, run)


class Queue:
    """The scheduler's queue: it returns the states of jobs, and cancels jobs."""

    def __init__(self, name: str) -> None:
        """`name`: "slurm" or "pbs"."""
        self._is_slurm = name == "slurm"
        self._answers = SharedAnswers(state_root(os.environ), Slurm() if self._is_slurm else PbsById())
        self._known: dict[str, JobStatus] = {}

    def status(self, jobs: Iterable[Job[Any]]) -> dict[str, JobStatus]:
        """Return the last known state of each job by its id; the scheduler is asked at most every 2 s."""
        ids = [job.job_id for job in jobs]
        if ids and (news := self._answers.news(ids, _run, shared_answers.ASK_S)) is not None:
            self._known = {job_id: self._known.get(job_id, NO_NEWS) for job_id in ids} | news
        return {job_id: self._known.get(job_id, NO_NEWS) for job_id in ids}

    def id_of(self, job: str) -> str:
        """Return submitit's id of a job; `job`: its id in the environment of its processes."""
        return job if self._is_slurm else from_pbs(job)

    def withdraw(self, jobs: Collection[Job[Any]]) -> None:
        """Cancel the jobs that have not started yet."""
        for job_id in sorted({self._array_id(job.job_id) for job in jobs}):
            with suppress(CommandError):
                (Slurm() if self._is_slurm else Pbs()).withdraw(job_id, _run)

    def end(self, jobs: Collection[Job[Any]]) -> None:
        """Cancel the jobs, killing running ones at once."""
        # Without SIGTERM, which node agents would report as a preemption. For a job, scancel sends SIGTERM first even
        # with --signal=KILL, and SIGKILL only after KillWait; for a step it does not (measured). So kill step 0 first.
        if not self._is_slurm:
            for job in jobs:
                job.cancel(check=False)
            return
        ids = [job.job_id for job in jobs]
        for command in (["--signal=KILL", *(f"{job_id}.0" for job_id in ids)], ids):
            with suppress(CommandError):
                _run(["scancel", "--quiet", *command])

    def _array_id(self, job_id: str) -> str:
        """Return the id of the array that a job is an element of, as the scheduler's commands take it."""
        return array_of(job_id if self._is_slurm else to_pbs(job_id))


def executor_of(given: Executor | str, nodes: int | None, parameters: Mapping[str, Any]) -> Executor:
    """Return an executor for jobs of `nodes` nodes; None: of as many as its parameters say.

    `given`: "slurm" or "pbs", with `parameters` of submitit's AutoExecutor, or an executor, which is copied. Raises
    UsageError for parameters that submitit rejects.
    """
    try:
        made = _named(given, parameters) if isinstance(given, str) else _copied(given, parameters)
        _shape(made, nodes)
    except (NameError, ValueError, AssertionError, RuntimeError) as refused:
        raise UsageError(f"executor {shown_executor(given)}: {refused}") from None
    return made


def cluster_of(given: Executor | str) -> str:
    """Return submitit's name for the kind of the executor, such as "slurm", "pbs" or "local"."""
    return given if isinstance(given, str) else inner_executor(given).name()


def shown_executor(given: object) -> str:
    """Return the executor as a message shows it: its name, or its type."""
    return repr(given) if isinstance(given, str) else type(given).__name__


def gpus_of(executor: Executor) -> int:
    """Return the number of GPUs that a job of the executor has on each node; 0 if none is requested."""
    given = next((executor.parameters[name] for name in _GPUS if executor.parameters.get(name)), 0)
    found = _COUNT.fullmatch(str(given))
    return int(found[1]) if found else 0


def cpus_of(executor: Executor) -> int:
    """Return the number of CPUs that a job of the executor has on each node."""
    return int(executor.parameters.get("cpus_per_task") or 1)  # one task per node


def nodes_of(executor: Executor) -> int:
    """Return the number of nodes of a job of the executor."""
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
    """Return the executor inside an AutoExecutor, whose parameters have the cluster's names, or `executor` itself."""
    found: Executor = getattr(executor, "_executor", executor)
    return found


def _shape(executor: Executor, nodes: int | None) -> None:
    """Set one task per node, the number of nodes, and the flags with which a job survives the loss of a node.

    `nodes`: None leaves the executor's number. Raises ValueError for PBS without a time limit.
    """
    generic = {"tasks_per_node": 1, **({"nodes": nodes} if nodes else {})}
    executor.update_parameters(**executor._convert_parameters(generic))
    if executor.name() == "pbs" and not executor.parameters.get("timeout_min"):
        raise ValueError("timeout_min: no time limit is set, and jobs that submitit submits to PBS need one; set it")
    if executor.name() == "slurm":
        executor.parameters.setdefault("time", None)  # the site's default, instead of submitit's five minutes
        # No requeue: if Slurm starts a requeued job while a node still runs its previous start, it drains that node
        # ("Duplicate jobid", measured). The driver submits a new job instead.
        more = {"no-kill": True, "no-requeue": True, **(executor.parameters.get("additional_parameters") or {})}
        srun_args = [*(executor.parameters.get("srun_args") or []), *STEP_FLAGS]
        executor.update_parameters(additional_parameters=more, srun_args=srun_args)
