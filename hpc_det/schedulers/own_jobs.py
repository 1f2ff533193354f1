"""The jobs of an experiment that are in the queue although no file has their ids.

Every job names the experiment's folder to its scheduler: as its working folder, in the path of its log, or on its
command line. So a job is found in the queue even if nobody has written down its id.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

from hpc_det.node.json_files import read_json
from hpc_det.plan.job_plan import JobArray
from hpc_det.schedulers import local
from hpc_det.schedulers.queue import queue, this_user
from hpc_det.schedulers.scheduler import array_of, run_command
from hpc_det.store.folders import ExperimentFolder

SETTLES_S = 3.0
"""A killed submitter leaves its call of the scheduler behind, which may queue the job a moment later."""


def unknown_jobs(experiment: ExperimentFolder, scheduler: str) -> list[str]:
    """Jobs and arrays of this experiment in the queue whose ids no file of it has, oldest first.

    Raises CommandError.
    """
    return sorted({array_of(job_id) for job_id in _queued(experiment, scheduler)} - known_jobs(experiment), key=_age)


def unknown_elements(experiment: ExperimentFolder, scheduler: str, index: int) -> list[str]:
    """The same of arrays whose one queued element has this index, as the element's own id. Raises CommandError."""
    known = known_jobs(experiment)
    queued = (job_id for job_id in _queued(experiment, scheduler) if array_of(job_id) not in known)
    return sorted((job_id for job_id in queued if re.search(rf"(?:_|\[){index}\]?(?:\.|$)", job_id)), key=_age)


def found_successor(experiment: ExperimentFolder, scheduler: str, next_jobs: Path) -> list[str]:
    """The job that was queued to go on for the newest one in the file `next_jobs`, and is not in it; none where there
    is none. Raises CommandError.

    A scheduler that stood still answers squeue before it queues a job that it was given earlier (measured).
    """
    script, index = map(int, next_jobs.name.partition(".")[0].split("-"))
    is_array = JobArray.of(experiment, script).count > 1

    def unknown() -> list[str]:
        return unknown_elements(experiment, scheduler, index) if is_array else unknown_jobs(experiment, scheduler)

    found = unknown()
    if not found:
        time.sleep(SETTLES_S)
        found = unknown()
    return found[:1]


def _queued(experiment: ExperimentFolder, scheduler: str) -> list[str]:
    listed = local.jobs() if scheduler == "local" else queue(scheduler).jobs(run_command)
    return [job.job_id for job in listed if job.user == this_user() and Path(job.path).is_relative_to(experiment.path)]


def _age(job_id: str) -> int:
    return int(re.findall(r"\d+", job_id)[0])


def known_jobs(experiment: ExperimentFolder) -> set[str]:
    """The ids of all jobs and arrays that files of the experiment name; no ids of elements."""
    return {job_id for script in script_numbers(experiment) for job_id in jobs_of_script(experiment, script)}


def jobs_of_script(experiment: ExperimentFolder, script: int) -> set[str]:
    """The ids of the jobs and arrays that were submitted with one script."""
    ids = {(read_json(experiment.job(script)) or {"job_id": ""})["job_id"]}
    for path in experiment.all_next_jobs(script):
        ids |= set((read_json(path) or {"jobs": []})["jobs"])
    return {array_of(job_id) for job_id in ids}


def script_numbers(experiment: ExperimentFolder) -> list[int]:
    """The numbers of the scripts that the scheduler was given for this experiment, in order."""
    return sorted(int(path.name.partition(".")[0]) for path in experiment.jobs.glob("*.array.json"))
