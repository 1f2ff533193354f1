"""How a job comes back into the queue, under its own id or as another job behind it, and which nodes it avoids.

`requeue` keeps the id. Otherwise jobs of the same script come after it, each when the one before has ended. They are
submitted when a job begins (successor) or ends (resubmit), or several with the first (chain). A job that finds nothing
to do ends at once, so one too many does no harm.

Jobs keep away for a while from nodes that failed: a small file for each, written by whoever saw the node fail.

    ROOT/excluded/CLUSTER/HOST.json             it was lost, or failed its checks: for all experiments there
    ROOT/experiments/12/excluded/HOST.json      a log policy of this experiment named it: for this one alone
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

from hpc_det.errors import HpcDetError
from hpc_det.node.files import make_private
from hpc_det.node.json_files import DamagedFile, made, read_json, read_map, write_json
from hpc_det.plan.job_plan import JobArray, JobPlan
from hpc_det.schedulers.own_jobs import found_successor
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
    """Of one job: `begin` when it begins, and at its end either `submit` or `leave`."""

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
        """Submit the successor, away from the hosts `exclude`, beside what the job does: it costs the start no time."""
        if self._plan.resume == "successor":
            self._begun = threading.Thread(target=self._try_to_submit, args=(exclude,))
            self._begun.start()

    def submit(self, exclude: Sequence[str] = ()) -> str:
        """The id of the job that goes on, away from the hosts `exclude`. Raises CommandError where none can.

        Waits for a scheduler that does not answer. What it ends meanwhile it puts back itself.
        """
        return patiently(lambda: self._next_job(exclude), say)

    def leave(self) -> None:
        """Nothing is left to do: nothing needs to wait any more."""
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
        if self._plan.resume == "requeue":
            return self._requeue(exclude)
        waiting = self._still_there(self._waiting())
        for job in waiting:
            self._avoid(job, exclude)
        if waiting:
            return waiting[0]
        if self._plan.resume == "chain":
            raise CommandError(f"none is left of the {self._plan.chain_length} jobs that waited behind the first")
        return self._submit(exclude)

    def _requeue(self, exclude: Sequence[str]) -> str:
        """Where the site allows that to none of its nodes, another job may still be allowed."""
        try:
            self._scheduler.requeue(self._job_id, os.environ, run_command)
        except NoAnswer:
            raise
        except CommandError as refused:
            say(f"could not requeue, so another job is submitted: {refused}")
            try:
                waiting = self._still_there(self._waiting())  # an earlier try may have had no answer
                return waiting[0] if waiting else self._submit(exclude)
            except NoAnswer:
                raise
            except CommandError:
                raise refused from None
        self._avoid(self._job_id, exclude)  # only a job that waits in the queue can be told
        return self._job_id

    def _avoid(self, job: str, hosts: Sequence[str]) -> None:
        """Better on a bad node than not at all."""
        try:
            self._scheduler.avoid(job, hosts, run_command)
        except CommandError as error:
            say(f"job {job} may come to a node that is excluded: {error}")

    def _waiting(self) -> list[str]:
        """The jobs behind this one, in their order. Raises CommandError where only the scheduler knows them, and does
        not answer.
        """
        if self._begun and self._begun is not threading.current_thread():
            self._begun.join()
        noted = read_json(self._file) or {"jobs": []}
        queued: list[str] = noted["jobs"]
        if noted.get("submitting"):  # by a job that was killed, or had no answer
            queued += found_successor(self._experiment, self._plan.scheduler, self._file)
            self._note({"jobs": queued})
        return queued[queued.index(self._job_id) + 1 :] if self._job_id in queued else []

    def _still_there(self, jobs: list[str]) -> list[str]:
        """Somebody may have cancelled a job that only seemed to wait. One of which there is no news is there."""
        statuses = self._scheduler.status(jobs, run_command) if jobs else {}
        return [job for job in jobs if statuses[job].state is not JobState.ENDED]

    def _try_to_submit(self, exclude: Sequence[str]) -> None:
        """What is wrong will be said where the successor is wanted: then it is tried again."""
        with suppress(HpcDetError):
            if not self._waiting():  # a job that was requeued may have one
                self._submit(exclude)

    def _submit(self, exclude: Sequence[str]) -> str:
        try:
            return self._submit_after(self._job_id, exclude)
        except NoAnswer:
            raise
        except CommandError as refused:
            if not self._is_forgotten():
                raise
            say(f"the scheduler does not know this job any more, so the next one does not wait for it: {refused}")
            return self._submit_after(None, exclude)

    def _is_forgotten(self) -> bool:
        """Whether the scheduler has lost this job, which runs. slurmctld writes its state every few seconds, and what
        it had started just before a crash is unknown to it afterwards (measured).
        """
        status = self._scheduler.status([self._job_id], run_command)[self._job_id]
        return status.state is JobState.ENDED

    def _submit_after(self, job: str | None, exclude: Sequence[str]) -> str:
        submission = Submission(
            script=self._script, array=self._array, index=self._index, after=job, exclude=tuple(exclude)
        )
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
        """After a KILL in the submission the next command finds the job by it (hpc_det.view.interrupted)."""
        try:
            write_json(self._file, jobs)
        except OSError as error:  # a full disk; the job is in the queue all the same
            say(f"which jobs wait behind this one could not be noted: {error}")


@dataclass(frozen=True, kw_only=True)
class ExcludedNode:
    host: str
    """As the scheduler calls it."""
    why: str
    since: float
    until: float
    """Seconds since the epoch."""


def excluded_nodes(experiment: ExperimentFolder) -> list[ExcludedNode]:
    """Those that a job of `experiment` keeps away from now, by host. What has expired is removed."""
    nodes = {node.host: node for folder in _folders(experiment) for node in _standing(folder)}
    return [nodes[host] for host in sorted(nodes)]


def excluded_hosts(experiment: ExperimentFolder) -> tuple[str, ...]:
    """For `Submission.exclude`."""
    return tuple(node.host for node in excluded_nodes(experiment))


class Exclusions:
    """What the end of an attempt excludes, for as long as the plan says."""

    def __init__(self, trial: TrialFolder, plan: JobPlan) -> None:
        self._trial = trial
        self._experiment = trial.experiment()
        self._plan = plan

    def of_ill_nodes(self, attempt: int) -> None:
        """For all jobs on the cluster: the nodes that failed their checks, or were lost.

        What more than half of a gang complains of is no matter of single nodes, and nobody is excluded for it.
        """
        found = failures(self._trial, attempt)
        ill = {failure.host: failure.message for failure in found if failure.unhealthy or failure.node_lost}
        if self._plan.nodes == 1 or len(ill) <= self._plan.nodes / 2:
            for host, why in ill.items():
                self._exclude(_of_cluster(self._experiment), host, why)

    def of_node_with_log(self, attempt: int, log: Path, why: str) -> None:
        """For this experiment: the node of the rank whose log this is. Other logs are of no single node."""
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
    """Clusters may share a home folder, and refuse each other's host names."""
    profile = read_map(experiment.cluster) or {}
    return experiment.root() / "excluded" / quote(profile.get("name", "unnamed"), safe="")


def _of_experiment(experiment: ExperimentFolder) -> Path:
    return experiment.path / "excluded"


def _standing(folder: Path) -> Iterator[ExcludedNode]:
    for path in sorted(folder.glob("*.json")):
        try:
            data = read_json(path)
            node = made(ExcludedNode, data, path) if data else None
        except DamagedFile:  # no reason to start no job
            continue
        if node is None:  # removed by another just now
            continue
        if node.until > time.time():
            yield node
        else:  # one that was renewed just now is forgotten with it, at the price of one more failed check
            path.unlink(missing_ok=True)
