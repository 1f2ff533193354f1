"""The jobs of an experiment: planning them, writing their scripts, and queueing them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_det.config.secrets import masked_lines, masked_variables
from hpc_det.errors import HpcDetError, UsageError
from hpc_det.launch.job.resubmit import excluded_hosts
from hpc_det.node.environment_archive import shared_python
from hpc_det.node.files import write_atomic
from hpc_det.node.json_files import write_json
from hpc_det.plan.job_plan import JobArray, JobPlan
from hpc_det.plan.planner import placement, plan_jobs
from hpc_det.schedulers.own_jobs import unknown_jobs
from hpc_det.schedulers.scheduler import NoAnswer, Submission, run_command, scheduler
from hpc_det.search.journal import SearchJournal
from hpc_det.store.attempt import HOOK
from hpc_det.store.experiment_config import write_secrets
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.submitting import Unsettled, note_call, record_job
from hpc_det.submit import stage
from hpc_det.submit.bundle import bundle_path, make_current
from hpc_det.submit.render import render

if TYPE_CHECKING:
    from hpc_det.plan.effective import Effective


@dataclass(frozen=True)
class Jobs:
    """Planned jobs that are neither written nor queued yet."""

    plan: JobPlan
    arrays: dict[int, JobArray]
    """The job arrays, by the number of their script."""
    scripts: dict[int, str]
    """The texts of the scripts, by number."""


def prepare_jobs(
    effective: Effective,
    folder: ExperimentFolder,
    trials: int,
    *,
    worker: int = 0,
    script: int = 1,
    startup_hook: bool = False,
) -> Jobs:
    """Return the jobs for this number of trials. Workers are numbered from `worker`, scripts from `script`.

    `startup_hook`: the code has a startup hook.

    Uses neither scheduler nor disk. Raises UsageError if no such job is possible.
    """
    check_path("HPC_DET_ROOT", str(folder.path))
    python = shared_python()
    check_path("the Python that runs hpc-det", python)
    experiment, cluster = effective.experiment, effective.cluster
    if startup_hook and not cluster.startup_hook:
        raise UsageError(
            f"{HOOK}: cluster {cluster.name!r} allows no startup hooks (startup_hook: false in its profile), so jobs "
            f"would run without it; name the file in .detignore, and install what it installs into the environment or "
            f"environment.image, or ask the site for `setup` lines in the profile"
        )
    place = placement(experiment, cluster, trials, worker)
    bundle, kind = str(bundle_path(folder.root())), experiment.environment.stage
    archive = "" if kind == "none" else str(stage.archive_path(folder.root(), kind))
    plan = plan_jobs(
        experiment, cluster, folder, place, python=python, startup_hook=startup_hook, bundle=bundle, stage=archive
    )
    arrays = dict(enumerate(place.arrays, start=script))
    return Jobs(plan, arrays, {n: render(plan, array, folder.script(n)) for n, array in arrays.items()})


def write_jobs(jobs: Jobs, folder: ExperimentFolder) -> None:
    """Write the plan, the scripts and the arrays to the experiment's folder. A copy of the plan has masked secrets.

    If the plan has a bundle or an archive of the environment, it is made current.
    """
    shown = replace(
        jobs.plan,
        environment=tuple(masked_variables(jobs.plan.environment)),
        setup=tuple(masked_lines(jobs.plan.setup)),
    )
    write_secrets(folder.plan, asdict(jobs.plan), asdict(shown))
    for number, script in jobs.scripts.items():
        write_atomic(folder.script(number), script, private=True)
        write_json(folder.array(number), asdict(jobs.arrays[number]))
    if jobs.plan.bundle:
        make_current(Path(jobs.plan.bundle))
    if jobs.plan.stage:
        stage.make_current(Path(jobs.plan.stage))


def queue_jobs(jobs: Jobs, folder: ExperimentFolder, search: SearchJournal, queued: list[str]) -> None:
    """Submit each array with one call of the scheduler. Must be called within `submitting`.

    If the number of concurrent jobs is limited, each array waits for the one before. If an array is refused, the others
    are cancelled, and HpcDetError is raised. `queued` receives the job ids, and is cleared if they were cancelled;
    after any exception, even one of a signal, it shows whether jobs are queued.
    """
    arrays, exclude = list(jobs.arrays.values()), excluded_hosts(folder)
    search.submitted(arrays[0].first, sum(array.workers for array in arrays), stay=arrays[0].is_shared)
    with _cancelled_on_failure(folder, jobs.plan.scheduler, queued):
        for number, array in jobs.arrays.items():
            before = len(queued)
            after = queued[-1] if queued and array.at_once else None
            submission = Submission(script=str(folder.script(number)), array=array, after=after, exclude=exclude)
            queued.append(_queue(jobs.plan, folder, submission))
            record_job(folder, number, queued[-1], jobs.plan.scheduler, first=array.first, workers=array.workers)
            if jobs.plan.resume == "chain":
                _queue_chain(jobs.plan, folder, submission, queued)
                write_json(folder.next_jobs(number, 0), {"jobs": queued[before:]})
        if source := search.state().cancelled:
            raise UsageError(f"experiment {folder.id}: was cancelled by {source} while its jobs were being submitted")


def _queue(plan: JobPlan, folder: ExperimentFolder, submission: Submission) -> str:
    from hpc_det.submit.executor import GangExecutor  # imported for a real submission only

    note_call(folder)
    return GangExecutor(folder.submitit, plan.scheduler, submission).submit_script()


def _queue_chain(plan: JobPlan, folder: ExperimentFolder, first: Submission, queued: list[str]) -> None:
    """Submit jobs of the same script, each of which starts after the one before has ended."""
    for _ in range(plan.chain_length):
        queued.append(_queue(plan, folder, replace(first, after=queued[-1])))


@contextmanager
def _cancelled_on_failure(folder: ExperimentFolder, scheduler_name: str, queued: list[str]) -> Iterator[None]:
    """Cancel the queued jobs if this block fails.

    Raises Unsettled if that fails too, or is interrupted by a signal: jobs may then be queued.
    """
    try:
        yield
    except BaseException as error:
        try:
            for job_id in [*queued, *_found_after(error, folder, scheduler_name)]:
                scheduler(scheduler_name).cancel(job_id, run_command)
            queued.clear()
        except BaseException as another:
            raise Unsettled(_unsettled(folder, error, another)) from error
        raise


def _found_after(error: BaseException, folder: ExperimentFolder, scheduler_name: str) -> list[str]:
    """Return jobs that the scheduler may have queued although its call failed. Raises CommandError."""
    is_known = isinstance(error, HpcDetError) and not (isinstance(error, NoAnswer) and error.may_have_acted)
    return [] if is_known else unknown_jobs(folder, scheduler_name)


def _unsettled(folder: ExperimentFolder, error: BaseException, another: BaseException) -> list[str]:
    """Return the message for a failed submission whose jobs could not be cancelled."""
    said, said_then = (f"{type(each).__name__} {each}" if _is_signal(each) else str(each) for each in (error, another))
    return [
        f"experiment {folder.id}: submitting its jobs failed: {said}",
        f"the scheduler may have queued jobs nevertheless, and cancelling them failed: {said_then}",
        f"experiment {folder.id} is kept: when the scheduler answers again, `hpc-det experiment describe {folder.id}` "
        f"finds its jobs, or pauses it if there are none; `hpc-det experiment kill {folder.id}` ends it",
    ]


def _is_signal(error: BaseException) -> bool:
    """Return whether the exception was raised by a signal, such as KeyboardInterrupt."""
    return not isinstance(error, Exception)


def check_path(what: str, path: str) -> None:
    """Raise UsageError if the path cannot be written in a job script or passed to submitit."""
    # Control characters would end a line of the script; submitit replaces %j, %A, %a and %t.
    if found := re.search("%[jAat]|[\\x00-\\x1f\\x7f-\\x9f\\u2028\\u2029]", path):
        raise UsageError(
            f"{what}: {path!r} contains {found[0]!r}, which a job script cannot contain; choose another folder"
        )
