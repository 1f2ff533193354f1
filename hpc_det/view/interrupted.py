"""Settles interrupted submissions: the submitting process was killed, or the scheduler did not answer it.

Settling finds out which jobs are in the queue and records their ids. Workers whose jobs were never queued are recorded
as lost. If no job was queued at all, the experiment is paused, so that its owner can activate it.

`hpc_det.schedulers.own_jobs` finds a job whose id was not recorded. A job that has started records its id itself
(`hpc_det.launch.job`).
"""

from __future__ import annotations

import time
from pathlib import Path

from hpc_det.node.files import age_s
from hpc_det.node.json_files import read_json, write_json
from hpc_det.plan.job_plan import JobArray, JobPlan
from hpc_det.schedulers import own_jobs
from hpc_det.schedulers.own_jobs import found_successor, jobs_of_script, script_numbers, unknown_jobs
from hpc_det.schedulers.scheduler import JobState, run_command, scheduler
from hpc_det.search.journal import SearchJournal
from hpc_det.store.experiments import is_in_sight
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.submitting import Submitter, is_gone, record_job, settling, submitter_of

PAUSED_BY = "an interrupted submission"
OTHERS_S = 30.0
"""Seconds to wait for another process that looks for the same successors."""
POLL_S = 0.1
"""Seconds between two checks while waiting for that process."""
BARE_FOR_S = 3600.0
"""Seconds after which a folder without a submitter counts as left by a killed `create`."""


def settle(experiment: ExperimentFolder) -> bool:
    """Settle the submission of an experiment if the submitting process has exited.

    Returns whether this process has settled it. Raises CommandError if the scheduler does not answer; then nothing
    changes.
    """
    submitter = submitter_of(experiment) if experiment.is_own() else None
    if submitter is None or not is_gone(experiment, submitter):
        return False
    with settling(experiment) as is_alone:
        # if it differs, another process has settled this submission, and a new one may have begun
        if not is_alone or submitter_of(experiment) != submitter:
            return False
        if is_in_sight(experiment):
            # the sbatch or qsub of a killed submitter may still queue a job
            time.sleep(max(0.0, own_jobs.SETTLES_S - age_s(experiment.submitting)))
            _settle(experiment, submitter)
            experiment.submitting.unlink(missing_ok=True)
        else:  # killed before the experiment was complete, so before the first call of the scheduler
            experiment.remove()
    return True


def remove_unsubmitted(experiment: ExperimentFolder) -> None:
    """Remove what a `create` left behind that was killed before its experiment was complete; it has no jobs."""
    if experiment.is_own() and not settle(experiment):
        is_old = time.time() - experiment.path.stat().st_mtime > BARE_FOR_S
        if is_old and _is_bare(experiment):
            experiment.remove()


def _is_bare(experiment: ExperimentFolder) -> bool:
    """Return whether the folder contains nothing but, at most, an incomplete record of the submitter."""
    begins = f".{experiment.submitting.name}."
    return all(entry.name.startswith(begins) for entry in experiment.path.iterdir())


def _settle(experiment: ExperimentFolder, submitter: Submitter) -> None:
    plan, search = JobPlan.of(experiment), SearchJournal(experiment)
    found = unknown_jobs(experiment, plan.scheduler)
    scripts = [script for script in script_numbers(experiment) if script >= submitter.first_script]
    _adopt(experiment, plan, scripts, found)
    ended = _ended(experiment, plan, scripts)
    now = search.state()  # read after the query, so that workers that have started meanwhile count as started
    if now.submissions == submitter.before > 0:
        # `activate` and `continue` change the search before they record their submission: without jobs, pause it again
        if not (now.paused or now.finished):
            search.pause(PAUSED_BY)
        return
    never_begun = {script for script in ended if all(map(now.waiting.__contains__, _workers(experiment, script)))}
    missing = [script for script in scripts if script in never_begun or not experiment.job(script).exists()]
    for script in missing:
        for worker in sorted(filter(_workers(experiment, script).__contains__, now.waiting)):
            search.lose(worker, "")  # "": it had no job. No other worker relies on it from now on.
    if missing == scripts:
        search.pause(PAUSED_BY)


def _ended(experiment: ExperimentFolder, plan: JobPlan, scripts: list[int]) -> list[int]:
    """Return the scripts all of whose jobs have ended; a submitter cancels them, for instance, after an error."""
    jobs = {script: jobs_of_script(experiment, script) for script in scripts if experiment.job(script).exists()}
    ids = sorted({job_id for found in jobs.values() for job_id in found})
    states = scheduler(plan.scheduler).status(ids, run_command) if ids else {}
    return [script for script, found in jobs.items() if all(states[id_].state is JobState.ENDED for id_ in found)]


def _workers(experiment: ExperimentFolder, script: int) -> range:
    """Return the numbers of the workers in the jobs of a script."""
    array = JobArray.of(experiment, script)
    return range(array.first, array.first + array.workers)


def _adopt(experiment: ExperimentFolder, plan: JobPlan, scripts: list[int], job_ids: list[str]) -> None:
    """Record queued jobs whose ids no file contains, oldest first.

    Scripts are submitted in order, and each id is recorded before the next submission. So the first job belongs to the
    first script without a recorded job. With `resume: chain`, the others are its successors.
    """
    if not scripts or not job_ids:
        return
    if missing := [script for script in scripts if not experiment.job(script).exists()]:
        array = JobArray.of(experiment, missing[0])
        record_job(experiment, missing[0], job_ids[0], plan.scheduler, first=array.first, workers=array.workers)
    if plan.resume == "chain":
        first = (read_json(experiment.job(scripts[0])) or {})["job_id"]
        write_json(experiment.next_jobs(scripts[0], 0), {"jobs": list(dict.fromkeys([first, *job_ids]))})


def find_successors(experiment: ExperimentFolder) -> bool:
    """Record successors whose ids are in no file, because the job that submitted them was killed.

    Returns False if no successor was being submitted. Waits for another process that does the same. Raises
    CommandError.
    """
    if not _half_made(experiment):
        return False
    with settling(experiment) as is_alone:
        if half_made := _half_made(experiment) if is_alone else {}:
            name = JobPlan.of(experiment).scheduler
            for path, jobs in half_made.items():
                write_json(path, {"jobs": [*jobs, *found_successor(experiment, name, path)]})
    end = time.monotonic() + OTHERS_S
    while not is_alone and _half_made(experiment) and time.monotonic() < end:
        time.sleep(POLL_S)
    return True


def _half_made(experiment: ExperimentFolder) -> dict[Path, list[str]]:
    """Return each file of successors to which a job was about to add one, with the ids that it contains."""
    paths = [path for script in script_numbers(experiment) for path in experiment.all_next_jobs(script)]
    return {path: known["jobs"] for path in paths if (known := read_json(path) or {}).get("submitting")}
