"""Finds jobs of an experiment that are in the queue although no file of the experiment contains their ids.

A submitter that is killed between submitting a job and recording its id leaves such a job behind. It can still be
found, because every job names the experiment's folder to its scheduler: as its working folder, in the path of its log,
or on its command line.
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
"""Seconds to wait before a job counts as not queued.

A killed submitter leaves its sbatch or qsub process running, which may still queue the job a moment later.
"""


def unknown_jobs(experiment: ExperimentFolder, scheduler: str) -> list[str]:
    """Return the queued jobs and arrays of this experiment whose ids no file contains, oldest first. Raises
    CommandError.
    """
    return sorted({array_of(job_id) for job_id in _queued(experiment, scheduler)} - known_jobs(experiment), key=_age)


def unknown_elements(experiment: ExperimentFolder, scheduler: str, index: int) -> list[str]:
    """Return the queued elements with this index of arrays whose ids no file contains, oldest first.

    The ids are those of the elements. Raises CommandError.
    """
    known = known_jobs(experiment)
    queued = (job_id for job_id in _queued(experiment, scheduler) if array_of(job_id) not in known)
    return sorted((job_id for job_id in queued if re.search(rf"(?:_|\[){index}\]?(?:\.|$)", job_id)), key=_age)


def found_successor(experiment: ExperimentFolder, scheduler: str, next_jobs: Path) -> list[str]:
    """Return, as a list of at most one, the queued successor that is not yet recorded in the file `next_jobs`.

    The successor is the job that continues the newest one in that file. Raises CommandError.
    """
    script, index = map(int, next_jobs.name.partition(".")[0].split("-"))
    is_array = JobArray.of(experiment, script).count > 1

    def unknown() -> list[str]:
        return unknown_elements(experiment, scheduler, index) if is_array else unknown_jobs(experiment, scheduler)

    found = unknown()
    if not found:
        # A scheduler that was blocked for a while answers squeue before it queues a job that it received earlier
        # (measured).
        time.sleep(SETTLES_S)
        found = unknown()
    return found[:1]


def _queued(experiment: ExperimentFolder, scheduler: str) -> list[str]:
    listed = local.jobs() if scheduler == "local" else queue(scheduler).jobs(run_command)
    return [job.job_id for job in listed if job.user == this_user() and Path(job.path).is_relative_to(experiment.path)]


def _age(job_id: str) -> int:
    """Return the sort key of a job id: its number, which is lower for older jobs."""
    return int(re.findall(r"\d+", job_id)[0])


def known_jobs(experiment: ExperimentFolder) -> set[str]:
    """Return the ids of all jobs and arrays that files of the experiment contain; ids of elements are reduced to their
    array.
    """
    return {job_id for script in script_numbers(experiment) for job_id in jobs_of_script(experiment, script)}


def jobs_of_script(experiment: ExperimentFolder, script: int) -> set[str]:
    """Return the ids of the jobs and arrays that were submitted with this script."""
    ids = {(read_json(experiment.job(script)) or {"job_id": ""})["job_id"]}
    for path in experiment.all_next_jobs(script):
        ids |= set((read_json(path) or {"jobs": []})["jobs"])
    return {array_of(job_id) for job_id in ids}


def script_numbers(experiment: ExperimentFolder) -> list[int]:
    """Return the numbers of the scripts that were written for this experiment, in ascending order."""
    return sorted(int(path.name.partition(".")[0]) for path in experiment.jobs.glob("*.array.json"))
