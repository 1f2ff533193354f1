"""plan -> scripts -> job ids. A dry run is the same code without the last calls."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from hpc_det.config.secrets import masked
from hpc_det.errors import UsageError
from hpc_det.plan.job_plan import JobArray, JobPlan
from hpc_det.plan.placement import placement
from hpc_det.plan.planner import plan_jobs
from hpc_det.search.journal import SearchJournal, search_of
from hpc_det.store.files import write_atomic, write_json
from hpc_det.store.folders import ExperimentFolder, ExperimentStore
from hpc_det.submit.command import run_command
from hpc_det.submit.render import render
from hpc_det.submit.scheduler import scheduler
from hpc_det.submit.snapshot import copy_snapshot, snapshot_files

if TYPE_CHECKING:
    from hpc_det.config.effective import Effective


@dataclass(frozen=True)
class Submission:
    """All that the jobs need, not yet anywhere."""

    plan: JobPlan
    arrays: tuple[JobArray, ...]
    scripts: list[str]
    """One for each array."""
    files: list[Path]
    """The snapshot, relative to the context directory."""


def prepare(effective: Effective, folder: ExperimentFolder) -> Submission:
    """Touches neither scheduler nor disk. Raises UsageError with all that is wrong."""
    _check_path("HPC_DET_ROOT", str(folder.path))
    _check_path("the Python that runs hpc-det", sys.executable)
    place = placement(effective.experiment, effective.cluster, trials_expected(effective))
    plan = plan_jobs(effective.experiment, effective.cluster, folder, place, python=sys.executable)
    scripts = [render(plan, array, folder.script(number)) for number, array in enumerate(place.arrays, start=1)]
    return Submission(plan, place.arrays, scripts, snapshot_files(effective.context_dir))


def submit(effective: Effective, store: ExperimentStore) -> ExperimentFolder:
    """The new experiment, queued. Where anything fails, nothing of it is left, on disk or in the queue."""
    prepare(effective, store.folder(store.next_id()))
    folder = store.create()
    queued: list[str] = []
    try:
        submission = _write(effective, folder)
        _queue(submission, folder, queued)
        # The config comes last: a folder without it was never created.
        write_atomic(folder.config, yaml.safe_dump(masked(effective.tree), sort_keys=False, allow_unicode=True))
    except BaseException:
        for job_id in queued:
            scheduler(effective.cluster.scheduler).cancel(job_id, run_command)
        folder.remove()
        raise
    return folder


def trials_expected(effective: Effective) -> int:
    """How many trials there will be, replacements of invalid ones left out."""
    method, _ = search_of(effective.tree, effective.points)
    return method.trials_expected


def _check_path(what: str, path: str) -> None:
    """A path reaches the script, where a control character would end a line, and submitit, which replaces patterns."""
    if found := re.search("%[jAat]|[\\x00-\\x1f\\x7f-\\x9f\\u2028\\u2029]", path):
        raise UsageError(f"{what}: {path!r} holds {found[0]!r}, which no job script can; choose another folder")


def _write(effective: Effective, folder: ExperimentFolder) -> Submission:
    submission = prepare(effective, folder)
    for needed in (folder.search, folder.jobs, folder.submitit):
        needed.mkdir(mode=0o700)
    copy_snapshot(effective.context_dir, submission.files, folder.code)
    write_json(folder.origin, effective.origins)
    write_json(folder.effective, _with_seed(effective))
    if effective.points:
        write_json(folder.points, effective.points)
    write_atomic(folder.plan, submission.plan.to_json())
    for number, script in enumerate(submission.scripts, start=1):
        write_atomic(folder.script(number), script)
    return submission


def _with_seed(effective: Effective) -> dict[str, object]:
    """The seed defaults to the time of submission, as upstream's does."""
    reproducibility = effective.tree["reproducibility"]
    if reproducibility["experiment_seed"] is None:
        reproducibility["experiment_seed"] = int(time.time())
    return effective.tree


def _queue(submission: Submission, folder: ExperimentFolder, queued: list[str]) -> None:
    """One call of the scheduler for each array. Where the number of jobs at once is limited, one array waits for the
    other. `queued` gets the ids.
    """
    from hpc_det.submit.executor import GangExecutor  # submitit loads for a real submission only

    arrays = submission.arrays
    workers = sum(array.workers for array in arrays)
    SearchJournal(folder).submitted(first=arrays[0].first, count=workers, stay=arrays[0].is_shared)
    for number, array in enumerate(arrays, start=1):
        after = queued[-1] if queued and array.at_once else None
        executor = GangExecutor(folder.submitit, submission.plan.scheduler, folder.script(number), after)
        queued.append(executor.submit_script())
        record = {"job_id": queued[-1], "scheduler": submission.plan.scheduler, "submitted": time.time()}
        write_json(folder.job(number), {**record, "first": array.first, "workers": array.workers})
