"""The job's first process, on its first node: it starts all tasks and does what PBS does not.

- PBS gives no warning before the time limit, and its SIGTERM reaches only the processes of the first node, in the same
  way for a preemption, `qdel` and the limit. Task 0 gets submitit's own signal instead, after it has installed a
  handler.
- A job cannot requeue itself: if task 0 asks for it, and PBS will not rerun the job, a new job is submitted.
- When this process ends, PBS kills the rest of the job on every node.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from submitit.core.job_environment import JobEnvironment
from submitit.core.logger import get_logger

from hpc_det.errors import count
from hpc_det.node.files import write_atomic
from hpc_det.schedulers.pbs.answers import SCHEDULER, ended_by, from_pbs, shown_or_nothing, submitted_id, to_pbs
from hpc_det.schedulers.pbs.hosts import STARTERS, HostFolder, hosts_in, of_no_machine, start_on_host, starter_on_path
from hpc_det.schedulers.scheduler import CommandError, NoAnswer, patiently, run_command, submit_from_job
from hpc_det.submit.submitit_pbs.on_node import first_failure, start_tasks
from hpc_det.submit.submitit_pbs.paths import PbsJobPaths, Reason

Process = subprocess.Popen[bytes]

POLL_S = 0.2
"""Seconds between two polls of the tasks and the clock."""
SUSPENDED_S = 5.0
"""Seconds between two readings of the clock of which no more count: in a longer pause, the job was suspended."""
SHOWN_S = 60.0
"""Longest time in seconds until a file of another node becomes visible: nfs(5), acdirmax."""
END_S = 10.0
"""Seconds for task 0 to end after it has saved."""


class Clock:
    """The running time of the job. While PBS suspends it, its walltime does not advance."""

    def __init__(self, used_s: float) -> None:
        self.used_s = used_s
        self._looked = time.monotonic()

    def look(self) -> float:
        """Return the seconds of walltime that are used. Must be called more often than every SUSPENDED_S."""
        now = time.monotonic()
        self.used_s += min(now - self._looked, SUSPENDED_S)
        self._looked = now
        return self.used_s


class RemoteTasks:
    """The tasks of another node, with the interface of a process."""

    def __init__(self, folder: HostFolder, rank: int, starter: Process) -> None:
        self._folder = folder
        self._rank = rank
        self._starter = starter
        self._ended: float | None = None

    def poll(self) -> int | None:
        """Return the exit code of the first failed task, or 0; that of the starter if there is none."""
        said = self._starter.poll()
        code = self._folder.exit_code(self._rank)
        if code is not None or said is None:
            return code
        self._ended = self._ended or time.monotonic()
        return said or (1 if time.monotonic() > self._ended + SHOWN_S else None)

    def kill(self) -> None:
        self._starter.kill()

    def wait(self, timeout: float | None = None) -> int:
        return self._starter.wait(timeout)


class FirstProcess:
    """The first process of the job that `asked` describes: see `main`."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self._asked = asked
        self._paths = PbsJobPaths(asked.folder, job_id=os.environ["SUBMITIT_PBS_JOB_ID"])
        self._own_id = from_pbs(os.environ["PBS_JOBID"])
        self._clock = Clock(asked.used_s)
        self._terminated = False
        """True once PBS has sent SIGTERM."""
        self._reason: Reason | None = None
        """Why task 0 must save and stop; None as long as it need not."""
        self._is_signalled = False
        """True once task 0 was sent submitit's signal."""
        self._nodes: Path | None = None
        """Folder that is shared with the other nodes."""

    def run(self) -> int:
        """Run the job and return its exit code."""
        nodes = hosts_in(os.environ["PBS_NODEFILE"])
        if len(nodes) != self._asked.nodes:
            print(
                f"requested {count(self._asked.nodes, 'node')}, but PBS allocated {', '.join(nodes)}; check whether "
                "`select` was changed",
                file=sys.stderr,
            )
            return 1
        if self._own_id in self._paths.chain()[:-1]:
            get_logger().info(f"PBS job {self._paths.chain()[-1]} continues this one already.")
            return 0
        starter = starter_on_path(os.environ)
        if starter is None and len(nodes) > 1:
            print(f"none of {', '.join(STARTERS)} is on PATH to start the tasks of other nodes", file=sys.stderr)
            return 1
        signal.signal(signal.SIGTERM, self._on_term)
        self._clear()
        tasks = self._start_tasks()
        processes: list[Process | RemoteTasks] = [*tasks, *self._start_nodes(starter, nodes)]
        try:
            while self._goes_on(tasks[0], processes):
                time.sleep(POLL_S)
            return first_failure([process.poll() or 0 for process in processes])
        finally:
            for process in processes:
                process.kill()
                process.wait()
            if self._nodes:
                shutil.rmtree(self._nodes, ignore_errors=True)
            if self._paths.chain()[-1] == self._own_id:  # else the job that goes on may have such files by now
                self._clear()

    def _on_term(self, signum: int, frame: object) -> None:
        self._terminated = True

    def _clear(self) -> None:
        """Delete the remains of a killed run: an incomplete file would keep submitit from writing it again."""
        for path in (self._paths.ready, self._paths.stop, self._paths.requeue):
            path.unlink(missing_ok=True)
        for folder in self._paths.folders_of_nodes():
            shutil.rmtree(folder, ignore_errors=True)
        for whole in (self._paths.submitted_pickle, self._paths.result_pickle):
            whole.with_name(f"{whole.name}.save_tmp").unlink(missing_ok=True)

    def _start_tasks(self) -> list[Process]:
        os.environ["SUBMITIT_PBS_NNODES"] = str(self._asked.nodes)
        os.environ["SUBMITIT_PBS_NTASKS"] = str(self._asked.nodes * self._asked.tasks_per_node)
        join = self._asked.stderr_to_stdout
        return start_tasks(self._asked.folder, self._asked.command, 0, stderr_to_stdout=join)

    def _start_nodes(self, starter: str | None, nodes: list[str]) -> Iterator[RemoteTasks]:
        if starter is None or len(nodes) == 1:
            return
        self._nodes = self._paths.new_folder_of_nodes()
        folder = HostFolder.made(self._nodes)
        ours = {name: value for name, value in os.environ.items() if name.startswith("SUBMITIT_")}
        join = ["--stderr-to-stdout"] if self._asked.stderr_to_stdout else []
        tasks = [sys.executable, "-m", "hpc_det.submit.submitit_pbs.on_node", *join]
        command = [*tasks, self._asked.folder, self._asked.command]
        script = folder.write_script(command, {**of_no_machine(os.environ), **ours}, cwd=os.getcwd())
        for rank, host in enumerate(nodes[1:], start=1):
            yield RemoteTasks(folder, rank, start_on_host(starter, host, rank, script))

    def _goes_on(self, first: Process, processes: list[Process | RemoteTasks]) -> bool:
        """Return whether there is still something to wait for."""
        if self._reason is None and (reason := self._why_stop()):
            write_atomic(self._paths.stop, reason.value)
            self._reason = reason
        if self._reason is None:
            return any(process.poll() is None for process in processes)
        if self._paths.cancelled.exists():
            return False
        if not self._is_signalled and first.poll() is not None:  # no other task takes the signal
            return any(process.poll() is None for process in processes)
        return self._stops(first, self._reason)

    def _why_stop(self) -> Reason | None:
        used_s = self._clock.look()
        if used_s >= self._asked.walltime_s - self._asked.warning_s:
            return Reason.TIME_LIMIT
        return Reason.PREEMPTED if self._terminated else None

    def _stops(self, first: Process, reason: Reason) -> bool:
        """Stop task 0 and return after it has saved and ended. The other tasks take no part."""
        self._signal(first)
        if not self._paths.requeue.exists():
            return first.poll() is None
        self._resubmit(reason)
        with suppress(subprocess.TimeoutExpired):
            first.wait(END_S)
        return False

    def _signal(self, first: Process) -> None:
        """Send the signal once, after task 0 has installed its handler, since the signal would kill it before."""
        if self._is_signalled or not self._paths.ready.exists():
            return
        self._is_signalled = True
        signum = JobEnvironment._usr_sig()
        if signum != signal.SIGTERM or not self._terminated:  # which it has had from PBS
            with suppress(ProcessLookupError):
                os.kill(int(self._paths.ready.read_text()), signum)

    def _resubmit(self, reason: Reason) -> None:
        if reason is Reason.PREEMPTED and not _deleted_by_scheduler():
            get_logger().info("PBS reruns this job, or it was deleted.")
            return
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which may come at any moment; qsub ignores it then, too
        try:
            new = from_pbs(patiently(self._submit_next, get_logger().info))
        except CommandError as refused:
            print(f"The work is saved, but PBS refused the job to continue it: {refused}", file=sys.stderr)
            return
        write_atomic(self._paths.next, "".join(f"{job_id}\n" for job_id in [*self._paths.chain()[1:], new]))
        get_logger().info(f"PBS job {new} continues {self._paths.job_id}.")
        if self._paths.cancelled.exists():  # meanwhile
            subprocess.run(["qdel", to_pbs(new)], check=False)

    def _submit_next(self) -> str:
        """Submit the next job and return its id. Raises NoAnswer if it can be retried, since PBS cannot have it yet."""
        goes_on_for = f"SUBMITIT_PBS_JOB_ID={self._paths.job_id}"  # digits, which -v does not break
        command = ["qsub", "-v", goes_on_for, "-o", self._asked.output, str(self._paths.submission_file)]
        try:
            return submit_from_job(command, submitted_id, os.environ)
        except NoAnswer as error:
            if error.may_have_acted:
                raise CommandError(str(error)) from None
            raise


def _deleted_by_scheduler() -> bool:
    """Return whether this job is preempted by deletion, after which it is not rerun."""
    return ended_by(shown_or_nothing(os.environ["PBS_JOBID"], run_command)) == SCHEDULER


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("command", help="a shell command, for each task")
    parser.add_argument("--output", required=True, help="where PBS writes output before the job's own logs exist")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--tasks-per-node", type=int, required=True)
    parser.add_argument("--walltime-s", type=float, required=True)
    parser.add_argument("--warning-s", type=float, required=True)
    parser.add_argument("--used-s", type=float, required=True, help="the part of the walltime that is over")
    parser.add_argument("--stderr-to-stdout", action="store_true")
    sys.exit(FirstProcess(parser.parse_args()).run())


if __name__ == "__main__":
    main()
