"""The node agent: one process per node, started by srun, by pbsdsh or as a child of the job process.

    python3 -m hpc_det.launch.agent TRIAL_FOLDER ATTEMPT WORKER

It runs this attempt (hpc_det.launch.attempt_on_node), and then those that the job orders (hpc_det.launch.orders). It
exits with the code of its last attempt.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from hpc_det.errors import HpcDetError, UsageError
from hpc_det.launch.attempt_on_node import AttemptOnNode, Kept
from hpc_det.launch.entrypoint import Starter
from hpc_det.launch.mounted_image import until_the_end
from hpc_det.launch.node_folders import BadFolder, NodeFolders, empty, node_folders
from hpc_det.launch.orders import Order, ToJob
from hpc_det.launch.watch.supervisor import UnhealthyNode
from hpc_det.node.environment_archive import shared_python
from hpc_det.node.files import take_umask_of
from hpc_det.node.network import limit_look_ups
from hpc_det.node.process import STOP_SIGNALS, SignalPipe, adopt_orphans, outlives_parent
from hpc_det.node.suspension import guarded
from hpc_det.plan.job_plan import JobPlan
from hpc_det.schedulers.scheduler import scheduler
from hpc_det.store.attempt import failure_now, note_failure
from hpc_det.store.folders import TrialFolder
from hpc_det.store.log_lines import printed_to


class Agent:
    """The process of an agent, which runs one attempt after another."""

    def __init__(self, plan: JobPlan, folders: NodeFolders, job: ToJob | None) -> None:
        self._plan = plan
        self._kept = Kept(folders, SignalPipe((*STOP_SIGNALS, signal.SIGCHLD)), Starter(), os.getppid(), job)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # hpc_det.launch.staged blocks them
        # The parent's end must not kill this process before it has ended the ranks; the agent checks for it.
        outlives_parent()

    def run(self, order: Order) -> int:
        """Run this attempt, and those that the job orders; return the code of the last."""
        first = order.trial
        while True:
            code = self._attempt(order, None if order.trial == first else TrialFolder(Path(order.trial)).job_log)
            next_order = self._kept.job.next(order, code, self._kept.signals) if self._kept.job else None
            if next_order is None:
                self._kept.starter.close()
                return code
            order = next_order
            empty(self._kept.folders)

    def _attempt(self, order: Order, log: Path | None) -> int:
        """Run one attempt and return its code.

        `log`: the file to print to; None: this process's own output, which is the log of its first trial.
        """
        with printed_to(log) if log else nullcontext(), _noted(order):
            return AttemptOnNode(order, self._plan, self._kept, log).run()
        return 1


@contextmanager
def _noted(order: Order) -> Iterator[None]:
    """Note an error in this block as a failure of the attempt."""
    trial, number = TrialFolder(Path(order.trial)), order.attempt
    try:
        yield
    except UnhealthyNode:
        pass
    except BadFolder as error:
        note_failure(trial, number, failure_now(None, str(error), unhealthy=True))
    except HpcDetError as error:
        note_failure(trial, number, failure_now(None, str(error), user_error=isinstance(error, UsageError)))
        print(f"hpc-det: {error}", file=sys.stderr, flush=True)


def main(argv: list[str]) -> int:
    order = Order.of(argv)
    trial = TrialFolder(Path(order.trial))
    take_umask_of(trial.path)
    with _noted(order):
        return _run(order, with_own_python(JobPlan.of(trial.experiment())))
    return 1


def _run(order: Order, plan: JobPlan) -> int:
    own_scheduler = scheduler(plan.scheduler)
    adopt_orphans()
    limit_look_ups(os.environ)
    job = ToJob.connected(os.environ, own_scheduler.node_rank(os.environ))
    # Only schedulers suspend jobs, so without one no guardian is needed.
    guard = guarded() if own_scheduler.has_queue else nullcontext()
    with until_the_end(), guard, node_folders(plan) as folders:
        return Agent(plan, folders, job).run(order)


def with_own_python(plan: JobPlan) -> JobPlan:
    """Return the plan for an agent that may run in a local copy of the Python environment (hpc_det.launch.staged)."""
    if shared_python() == sys.executable:
        return plan
    first, *rest = plan.entrypoint
    # Of the bundle, a venv uses Python's own modules, of which there is no copy.
    bundle = "" if os.__file__.startswith(sys.prefix) else plan.bundle
    return replace(plan, entrypoint=(sys.executable if first == plan.python else first, *rest), bundle=bundle)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
