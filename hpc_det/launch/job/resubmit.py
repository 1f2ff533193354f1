"""Putting a job back into the queue, under its own id or as another job after it, and the nodes that it avoids.

With `requeue` the job keeps its id. Otherwise further jobs of the same script follow it, each starting when the one
before has ended. They are submitted when a job starts (`successor`), when it ends (`resubmit`), or all together with
the first job (`chain`). A job that finds nothing to do ends at once, so a superfluous one does no harm.

Jobs avoid nodes that have failed, for a limited time. Each such node is recorded in a small file by the process that
saw the failure:

    ROOT/excluded/CLUSTER/HOST.json             lost, or failed its health checks: for all experiments on the cluster
    ROOT/experiments/12/excluded/HOST.json      matched by a log policy of this experiment: for this experiment only
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hpc_det.errors import HpcDetError, count
from hpc_det.node.files import make_private
from hpc_det.node.json_files import DamagedFile, made, read_json, read_map, write_json
from hpc_det.plan.job_plan import JobArray, JobPlan
from hpc_det.schedulers.scheduler import (
    CommandError,
    JobState,
    NoAnswer,
    Submission,
    patiently,
    run_command,
    scheduler,
    submit_from_job,
)
from hpc_det.store.attempt import failures
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from hpc_det.store.log_lines import say


class Resubmission:
    """Puts one job back into the queue: `begin` at its start, and at its end either `submit` or `leave`."""

    def __init__(self, experiment: ExperimentFolder, script: int) -> None:
        self._experiment = experiment
        self._plan = JobPlan.of(experiment)
        self._scheduler = scheduler(self._plan.scheduler)
        self._script = str(experiment.script(script))
        self._array = JobArray.of(experiment, script)
        self._index = self._scheduler.array_index(os.environ)
        self._file = experiment.next_jobs(script, self._index)
        self._job_id = self._scheduler.job_id(os.environ)
        self._begun: threading.Thread | None = None

    def begin(self, exclude: Sequence[str] = ()) -> None:
        """Submit the job's successor, which avoids the hosts `exclude`, if the plan resumes with successors."""
        if self._plan.resume == "successor":
            # In a thread, so that the start of the training does not wait for the scheduler.
            self._begun = threading.Thread(target=self._try_to_submit, args=(exclude,))
            self._begun.start()

    def settle(self) -> None:
        """Wait until the submission that `begin` has started has ended."""
        if self._begun and self._begun is not threading.current_thread():
            self._begun.join()

    def submit(self, exclude: Sequence[str] = ()) -> str:
        """Put the work back into the queue, away from the hosts `exclude`; return the id of the job that resumes it.

        Waits while the scheduler does not answer. Raises CommandError if no job can resume the work.
        """
        # A job that the scheduler ends during this wait is requeued by the scheduler itself.
        return patiently(lambda: self._next_job(exclude), say)

    def leave(self) -> None:
        """Cancel the jobs that wait for this one, because nothing is left to do."""
        try:
            waiting = self._waiting()
        except HpcDetError as error:
            say(f"looking up the jobs that wait for this one failed: {error}; such a job exits when it starts")
            return
        for job in waiting:
            try:
                self._scheduler.cancel(job, run_command)
            except CommandError as error:
                say(f"cancelling job {job}, which waits for this one, failed: {error}; it exits when it starts")

    def _next_job(self, exclude: Sequence[str]) -> str:
        """Return the job that resumes the work: this one, one that waits for it, or a new one."""
        if self._plan.resume == "requeue":
            return self._requeue(exclude)
        waiting = self._still_there(self._waiting())
        for job in waiting:
            self._avoid(job, exclude)
        if waiting:
            return waiting[0]
        if self._plan.resume == "chain":
            raise CommandError(f"the chain of {count(self._plan.chain_length, 'job')} is used up: none waits any more")
        return self._submit(exclude)

    def _requeue(self, exclude: Sequence[str]) -> str:
        """Requeue this job and return its id; if the site refuses, return another job's id."""
        try:
            self._scheduler.requeue(self._job_id, os.environ, run_command)
        except NoAnswer:
            raise
        except CommandError as refused:
            say(f"requeueing failed, so another job is submitted: {refused}")
            try:
                # A site may forbid requeueing and still accept a new job.
                waiting = self._still_there(self._waiting())  # an earlier try may have worked without an answer
                return waiting[0] if waiting else self._submit(exclude)
            except NoAnswer:
                raise
            except CommandError:
                raise refused from None
        self._avoid(self._job_id, exclude)  # only a queued job can be changed
        return self._job_id

    def _avoid(self, job: str, hosts: Sequence[str]) -> None:
        """Exclude `hosts` from the job; log a failure."""
        try:
            self._scheduler.avoid(job, hosts, run_command)
        except CommandError as error:
            # A job on a bad node is better than none.
            say(f"job {job} may run on an excluded node: {error}")

    def _waiting(self) -> list[str]:
        """Return the jobs that wait for this one, in the order in which they will start.

        Raises CommandError if they are not recorded and the scheduler does not answer.
        """
        self.settle()
        noted = read_json(self._file) or {"jobs": []}
        queued: list[str] = noted["jobs"]
        if noted.get("submitting"):  # the submitting job was killed or had no answer, so the new id is not recorded
            from hpc_det.schedulers.own_jobs import found_successor

            queued += found_successor(self._experiment, self._plan.scheduler, self._file)
            self._note({"jobs": queued})
        return queued[queued.index(self._job_id) + 1 :] if self._job_id in queued else []

    def _still_there(self, jobs: list[str]) -> list[str]:
        """Return those of `jobs` that have not ended; a job without an answer from the scheduler counts as waiting."""
        # A user may have cancelled a waiting job.
        statuses = self._scheduler.status(jobs, run_command) if jobs else {}
        return [job for job in jobs if statuses[job].state is not JobState.ENDED]

    def _try_to_submit(self, exclude: Sequence[str]) -> None:
        """Submit a successor unless there is one; ignore errors."""
        with suppress(HpcDetError):  # the end of the job tries again and reports the error
            if not self._waiting():  # a requeued job may already have one
                self._submit(exclude)

    def _submit(self, exclude: Sequence[str]) -> str:
        """Submit a new job after this one and return its id."""
        try:
            return self._submit_after(self._job_id, exclude)
        except NoAnswer:
            raise
        except CommandError as refused:
            if not self._is_forgotten():
                raise
            say(f"the scheduler no longer lists this job, so the next job does not wait for it: {refused}")
            return self._submit_after(None, exclude)

    def _is_forgotten(self) -> bool:
        """Return whether the scheduler has lost this job, although it runs."""
        # slurmctld saves its state every few seconds; after a crash it does not know jobs that it had started just
        # before (measured).
        status = self._scheduler.status([self._job_id], run_command)[self._job_id]
        return status.state is JobState.ENDED

    def _submit_after(self, job: str | None, exclude: Sequence[str]) -> str:
        """Submit a new job, to start after `job` unless that is None, and return its id."""
        submission = Submission(
            script=self._script, array=self._array, index=self._index, after=job, exclude=tuple(exclude)
        )
        # Recorded first: if this process is killed in the submission, the next command finds the job
        # (hpc_det.view.interrupted).
        self._note({"jobs": [self._job_id], "submitting": True})
        try:
            queued = self._queue(submission)
        except CommandError as error:
            if not (isinstance(error, NoAnswer) and error.may_have_acted):
                self._note({"jobs": [self._job_id]})
            raise
        self._note({"jobs": [self._job_id, queued]})
        with suppress(CommandError):
            self._scheduler.replaced(self._job_id, run_command)
        return queued

    def _queue(self, submission: Submission) -> str:
        element = self._index if self._array.count > 1 else None
        parse = partial(self._scheduler.parse_submit, element=element)
        return submit_from_job(self._scheduler.submit_command(submission), parse, os.environ, self._plan.python)

    def _note(self, jobs: dict[str, Any]) -> None:
        """Record the jobs that wait for this one."""
        try:
            write_json(self._file, jobs)
        except OSError as error:  # the disk may be full; the job is in the queue all the same
            say(f"recording the jobs that wait for this one failed: {error}")


@dataclass(frozen=True, kw_only=True)
class ExcludedNode:
    """A node that jobs avoid until a certain time."""

    host: str
    """The name that the scheduler uses."""
    why: str
    since: float
    """Seconds since the epoch."""
    until: float
    """Seconds since the epoch."""


def excluded_nodes(experiment: ExperimentFolder) -> list[ExcludedNode]:
    """Return the nodes that a job of `experiment` avoids now, ordered by host. Deletes expired records."""
    nodes = {node.host: node for folder in _folders(experiment) for node in _standing(folder)}
    return [nodes[host] for host in sorted(nodes)]


def excluded_hosts(experiment: ExperimentFolder) -> tuple[str, ...]:
    """Return the hosts that a job of `experiment` avoids now, for `Submission.exclude`."""
    return tuple(node.host for node in excluded_nodes(experiment))


class Exclusions:
    """Excludes nodes at the end of an attempt, for as long as the plan says."""

    def __init__(self, trial: TrialFolder, plan: JobPlan) -> None:
        self._trial = trial
        self._experiment = trial.experiment()
        self._plan = plan

    def of_ill_nodes(self, attempt: int) -> None:
        """Exclude the nodes that failed their health checks or were lost, for all jobs on the cluster."""
        found = failures(self._trial, attempt)
        ill = {failure.host: failure.message for failure in found if failure.unhealthy or failure.node_lost}
        # A problem of more than half of the gang is not the fault of single nodes.
        if self._plan.nodes == 1 or len(ill) <= self._plan.nodes / 2:
            for host, why in ill.items():
                self._exclude(_of_cluster(self._experiment), host, why)

    def of_node_with_log(self, attempt: int, log: Path, why: str) -> None:
        """Exclude the node of the rank that wrote `log`, for this experiment; do nothing for other logs."""
        rank = log.stem.removeprefix("rank-")
        hosts = read_json(self._trial.nodes(attempt)) or []
        if rank.isdecimal() and int(rank) < len(hosts) * self._plan.ranks_per_node:
            self._exclude(_of_experiment(self._experiment), hosts[int(rank) // self._plan.ranks_per_node], why)

    def _exclude(self, folder: Path, host: str, why: str) -> None:
        if self._plan.exclude_nodes_for_min:
            make_private(folder)
            now = time.time()
            node = ExcludedNode(host=host, why=why, since=now, until=now + 60 * self._plan.exclude_nodes_for_min)
            write_json(folder / f"{quote(host, safe='')}.json", asdict(node))


def _folders(experiment: ExperimentFolder) -> tuple[Path, Path]:
    return _of_cluster(experiment), _of_experiment(experiment)


def _of_cluster(experiment: ExperimentFolder) -> Path:
    """Return the folder of the nodes excluded on the experiment's cluster."""
    # Clusters may share a home folder, and a scheduler refuses host names of another cluster.
    profile = read_map(experiment.cluster) or {}
    return experiment.root() / "excluded" / quote(profile.get("name", "unnamed"), safe="")


def _of_experiment(experiment: ExperimentFolder) -> Path:
    return experiment.path / "excluded"


def _standing(folder: Path) -> Iterator[ExcludedNode]:
    """Yield the records in `folder` that have not expired; delete the others."""
    for path in sorted(folder.glob("*.json")):
        try:
            data = read_json(path)
            node = made(ExcludedNode, data, path) if data else None
        except DamagedFile:  # must not keep a job from starting
            continue
        if node is None:  # another process has just deleted it
            continue
        if node.until > time.time():
            yield node
        else:  # this may delete a record that was renewed just now, at the price of one more failed health check
            path.unlink(missing_ok=True)
