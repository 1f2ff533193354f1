"""The job process, which the batch script starts on the first node: one worker, or several that share the allocation.

    python3 -m hpc_det.launch.job EXPERIMENT_FOLDER SCRIPT -- COMMAND THAT STARTS ONE AGENT PER NODE

SCRIPT is the number of the batch script. A file beside the script defines which workers its jobs are
(`plan.job_plan.JobArray`).
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # until `main`: a tenth of the time of imports is for collections, and imports make no garbage

import os
import selectors
import signal
import subprocess
import sys
from contextlib import nullcontext, suppress
from pathlib import Path

from hpc_det.errors import HpcDetError
from hpc_det.launch.job.resubmit import Resubmission, excluded_hosts
from hpc_det.launch.job.worker import GAVE_UP, OVERTAKEN, WANTS_REQUEUE, Worker
from hpc_det.node.files import take_umask_of
from hpc_det.node.installation import Replaced, start_again
from hpc_det.node.process import STOP_SIGNALS, SignalPipe, adopt_orphans, children, ends_with_parent
from hpc_det.node.suspension import guarded
from hpc_det.plan.job_plan import JobArray, JobPlan
from hpc_det.schedulers.scheduler import array_of, scheduler
from hpc_det.search.journal import SearchJournal
from hpc_det.store.folders import ExperimentFolder, job_log
from hpc_det.store.journal import Journal
from hpc_det.store.log_lines import note_time, say, share_own_log
from hpc_det.store.submitting import record_job

ORPHANS_POLL_S = 0.1
"""Seconds between two checks for processes that killed workers have left."""


class Job:
    """One job of an experiment."""

    def __init__(self, experiment: ExperimentFolder, script: int, start_agents: list[str]) -> None:
        self._experiment = experiment
        self._plan = JobPlan.of(experiment)
        self._scheduler = scheduler(self._plan.scheduler)
        self._resubmission = Resubmission(experiment, script)
        self._script = script
        self._array = array = JobArray.of(experiment, script)
        index = self._scheduler.array_index(os.environ)
        self._log = job_log(experiment.script(script), f"-{index}" if array.count > 1 else "")
        start = array.first + index * array.workers_each
        self._workers = range(start, start + array.workers_each)
        self._start_agents = start_agents
        self._terminated: set[int] = set()
        """Process ids of orphans that were already sent SIGTERM."""
        self._heard: list[signal.Signals] = []
        """Stop signals received; workers that start later receive them, too."""

    def run(self) -> int:
        """Run the workers; return 0 if nothing is left to do or the job was requeued, else 1."""
        note_time(self._log)  # the site's modules and `setup` may have printed to it already
        self._record_itself()
        if self._has_nothing_to_do():
            self._resubmission.leave()
            return 0
        self._resubmission.begin(excluded_hosts(self._experiment))
        codes = [self._run_here(self._workers[0])] if len(self._workers) == 1 else self._run_side_by_side()
        if OVERTAKEN in codes:  # the jobs queued after this one belong to the other job, which may have the same id
            return GAVE_UP
        if WANTS_REQUEUE in codes:
            return self._resubmit()
        self._resubmission.leave()
        return GAVE_UP if any(codes) else 0

    def _run_here(self, number: int) -> int:
        """Run worker `number` in this process; return its exit code. Raises Replaced."""
        try:
            return Worker(self._experiment, number, self._start_agents).run()
        except Replaced:
            self._resubmission.settle()
            raise

    def _record_itself(self) -> None:
        """Record the job's id if no record exists."""
        # The submitting process may have been killed before it recorded the id, or may not have got that far yet.
        if not self._experiment.job(self._script).exists():
            job_id, array = array_of(self._scheduler.job_id(os.environ)), self._array
            with suppress(OSError):  # the disk may be full
                record_job(
                    self._experiment,
                    self._script,
                    job_id,
                    self._plan.scheduler,
                    first=array.first,
                    workers=array.workers,
                )

    def _has_nothing_to_do(self) -> bool:
        """Return whether another job has already done all work of these workers."""
        search = SearchJournal(self._experiment).state()
        return search.rests and not set(self._workers) & search.open.keys()

    def _run_side_by_side(self) -> list[int]:
        """Run each worker in its own process, and forward stop signals to all of them; return their exit codes."""
        signals = SignalPipe((*STOP_SIGNALS, signal.SIGCHLD))
        processes = {number: self._start(number) for number in self._workers}
        import hpc_det.launch.job.late_imports  # noqa: F401

        with selectors.DefaultSelector() as selector:
            selector.register(signals.fd, selectors.EVENT_READ)
            while any(process.poll() is None or process.returncode < 0 for process in processes.values()):
                waits = self._start_killed_again(processes)
                selector.select(timeout=ORPHANS_POLL_S if waits else None)
                for received in set(signals.received()) & set(STOP_SIGNALS):
                    self._heard.append(received)
                    for process in processes.values():
                        process.send_signal(received)
        return [process.returncode for process in processes.values()]

    def _start_killed_again(self, processes: dict[int, subprocess.Popen[bytes]]) -> bool:
        """Restart workers that a signal has killed; return whether one must still wait for its former gang to end."""
        killed = [number for number, process in processes.items() if (process.poll() or 0) < 0]
        orphans = set(children(os.getpid())) - {process.pid for process in processes.values()} if killed else set()
        # The former gang would write to the same trial, so it has to end first.
        for orphan in orphans - self._terminated:
            with suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGTERM)
        self._terminated |= orphans
        for number in killed if not orphans else ():
            processes[number] = self._start(number)
        return bool(orphans)

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        """Start the process of worker `number`."""
        command = [sys.executable, "-m", "hpc_det.launch.job.worker", str(self._experiment.path), str(number), "--"]
        process = subprocess.Popen(
            [*command, *self._start_agents],
            env={**os.environ, **self._scheduler.share(self._plan, number - self._workers.start)},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_begins,
        )
        for heard in self._heard:  # the job is stopping; a restarted worker must stop, too
            process.send_signal(heard)
        return process

    def _resubmit(self) -> int:
        """Put the job back into the queue and record it; return the exit code."""
        try:
            next_job = self._resubmission.submit(excluded_hosts(self._experiment))
        except HpcDetError as error:
            say(f"requeueing failed: {error}")
            self._note(str(error))
            return GAVE_UP
        search = SearchJournal(self._experiment)
        try:
            for number in set(self._workers) & search.state().open.keys():
                search.move(number, next_job)
        except OSError as error:  # the disk may be full; the next job records itself when it starts
            say(f"job {next_job} continues the work, but recording that failed: {error}")
        return 0

    def _note(self, problem: str) -> None:
        """Record the problem in the journals of the trials that would have been resumed."""
        open_work = SearchJournal(self._experiment).state().open
        for number in filter(open_work.__contains__, self._workers):
            journal = Journal(self._experiment.trial(open_work[number].trial).journal)
            journal.problem(journal.last_attempt(), problem)


def _begins() -> None:
    """Prepare the process of a worker."""
    ends_with_parent()
    # A signal that arrives before the worker has installed its handlers would kill it, and it would be started again.
    # `Worker` unblocks the signals.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def main(argv: list[str]) -> int:
    gc.freeze()  # else a collection in an agent that is forked later would copy the memory that it shares with this
    gc.enable()
    try:
        return _run(argv)
    except HpcDetError as error:  # for instance files of another version of hpc_det; no restart could help
        for problem in error.problems:
            say(problem)
        return GAVE_UP
    except Replaced:
        start_again()


def _run(argv: list[str]) -> int:
    folder, script, separator, *start_agents = argv
    experiment = ExperimentFolder(Path(folder))
    if separator != "--":
        raise HpcDetError(
            f"{experiment.path}: a version of hpc_det before November 22, 2026 wrote the script of this job, and this "
            f"one cannot run it; submit its trials again with `hpc-det experiment continue {experiment.id}`"
        )
    take_umask_of(experiment.path)
    share_own_log(experiment.jobs)
    adopt_orphans()
    has_queue = scheduler(JobPlan.of(experiment).scheduler).has_queue
    with guarded() if has_queue else nullcontext():
        return Job(experiment, int(script), start_agents).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
